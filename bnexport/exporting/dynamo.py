"""The dynamo exporter: torch.export, then torch.onnx with a translation of the custom operator."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.values import Op, Opset

from bnexport import schema, torch_versions
from bnexport.errors import UnsupportedModelError
from bnexport.exporting.dimensions import Axis, Dimensions, Limit, SizeConditions, limits
from bnexport.exporting.exact_sizes import write_resizes, write_sizes
from bnexport.exporting.finish import MINIMUM_OPSET
from bnexport.exporting.substitutes import AnySize
from bnexport.exporting.wrapper import Traced, TracedGraph
from bnexport.sync_bn import operators

# aten::index_put that adds, the gradient of indexing and of embeddings, and aten::index_add.
#
# torch.onnx writes them as ScatterND with reduction "add". ONNX Runtime shares that out over threads without regard to
# indices that come twice (microsoft/onnxruntime#18048), and loses values: with two threads, sums of 100 values are off
# by 10. Here they are taken apart into scatter_add, which becomes ScatterElements and runs in order.

Tensor = torch.Tensor

_ATEN = torch.ops.aten


def _add(self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *_: bool) -> Any:
    """Compute self with values added at indices (one for each leading dimension of self, or None); NotImplemented
    where nothing is added.
    """
    used = [dim for dim, index in enumerate(indices) if index is not None]
    given = torch.broadcast_tensors(*(index for index in indices if index is not None))
    if not accumulate or any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return NotImplemented
    rest = [dim for dim in range(self.dim()) if dim not in used]
    # The indices' dimensions stand where the first of adjacent ones does; else in front.
    lead = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    shape, count = [self.shape[dim] for dim in rest], given[0].dim()
    values = values.expand([*shape[:lead], *given[0].shape, *shape[lead:]])
    values = values.movedim(list(range(lead, lead + count)), list(range(count)))
    position = torch.zeros_like(given[0], dtype=torch.int64)
    for dim, index in zip(used, given):
        size = self.shape[dim]
        position = position * size + torch.where(index < 0, index + size, index)
    ordered = self.permute([*used, *rest])
    rows = ordered.reshape(math.prod(ordered.shape[: len(used)]), math.prod(shape))
    added = values.reshape(position.numel(), math.prod(shape))
    result = rows.scatter_add(0, position.reshape(-1, 1).expand(added.shape), added).reshape(ordered.shape)
    order = [*used, *rest]
    return result.permute([order.index(dim) for dim in range(self.dim())])


def _add_in_place(self: Tensor, *arguments: Any) -> Any:
    result = _add(self, *arguments)
    return result if result is NotImplemented else self.copy_(result)


def _index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    shape = [-1 if axis == dim % self.dim() else 1 for axis in range(self.dim())]
    return self.scatter_add(dim, index.to(torch.int64).view(shape).expand(source.shape), alpha * source)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _ATEN.index_put.default: _add,
    _ATEN._unsafe_index_put.default: _add,
    _ATEN.index_put_.default: _add_in_place,
    _ATEN._index_put_impl_.default: _add_in_place,
    _ATEN.index_add.default: _index_add,
}


def rewrite(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Take them apart in a program that has one."""
    if any(_adds(node) for node in program.graph.nodes):
        return program.run_decompositions(DECOMPOSITIONS)
    return program


def _adds(node: torch.fx.Node) -> bool:
    accumulates = True in node.args[3:4] or node.kwargs.get("accumulate", False)
    return node.target is _ATEN.index_add.default or (node.target in DECOMPOSITIONS and bool(accumulates))


_MMCV = Opset(schema.DOMAIN, schema.VERSION)
_NODE = Op(_MMCV, schema.SYNC_BATCH_NORM.name, schema.op_schema(schema.SYNC_BATCH_NORM))

# aten operators that torch.onnx translates with inference semantics even when asked to train,
# with the position of their `training` argument.
_BATCH_NORMS = {
    "aten::batch_norm": 5,
    "aten::native_batch_norm": 5,
    "aten::_native_batch_norm_legit": 5,
    "aten::_native_batch_norm_legit_functional": 5,
    "aten::cudnn_batch_norm": 5,
    "aten::instance_norm": 5,
}


def _translate(*arguments: Any) -> Any:
    given = schema.TORCH_SYNC_BATCH_NORM.bind(arguments)
    data, *vectors = (given[value.name] for value in schema.SYNC_BATCH_NORM.inputs)
    to = ir.DataType.DOUBLE if data.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    vectors = [vector if vector is None or vector.dtype == to else op.Cast(vector, to=int(to)) for vector in vectors]
    return _NODE(data, *vectors, **schema.node_attributes(schema.SYNC_BATCH_NORM, given))


schema.TORCH_SYNC_BATCH_NORM.sign(_translate)


def _conv3d(
    data: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Any:
    """Conv without a bias where torch has none: onnxscript 0.7 writes one of shape (C, 2), which no runtime takes."""
    strides, pads, dilations = (list(each) * (3 // len(each)) for each in (stride, padding, dilation))
    attributes: dict[str, Any] = {"strides": strides, "pads": pads * 2, "dilations": dilations, "group": groups}
    attributes["kernel_shape"] = [int(size) for size in weight.shape[2:]]
    vectors = [] if bias is None else [bias]
    if len(data.shape) == 5:
        return op.Conv(data, weight, *vectors, **attributes)
    batch: Any = op.Constant(value_ints=[0])
    single: Any = op.Conv(op.Unsqueeze(data, batch), weight, *vectors, **attributes)
    return op.Squeeze(single, batch)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    operators.sync_batch_norm: _translate,
    torch.ops.aten.conv3d.default: _conv3d,
}


def trace(wrapper: Traced, dimensions: Dimensions, *, opset: int = MINIMUM_OPSET) -> TracedGraph:
    """Trace `wrapper` into an onnx_ir Model, with the conditions on sizes that torch.export took for granted."""
    with quiet():
        with AnySize(dynamic=True):
            program, left = export_program(wrapper, dimensions, named=0)
        program = rewrite(program)
        _refuse_batch_statistics(program)
        write_floor_divisions(program)
        conditions = SizeConditions(program_inputs(program))
        with no_stack_traces():
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                custom_translation_table=TRANSLATIONS,
                dynamic_shapes=(tuple(map(dict, left.free)),) if left.axes else None,
                input_names=list(dimensions.names),
                optimize=False,
                opset_version=opset,
                verbose=False,
            )
    assert onnx_program is not None
    if any(isinstance(node.target, torch_versions.HigherOrderOperator) for node in program.graph.nodes):
        torch.compiler.reset()  # torch.cond compiles its branches, and would fail from now on
    write_doubles(onnx_program)
    numbers = numbers_of(onnx_program)
    write_sizes(onnx_program, numbers)
    write_resizes(onnx_program.model, numbers)
    _write_constant_sizes(onnx_program.model.graph)
    return TracedGraph(onnx_program.model, left, conditions=conditions, limits=limits_of(program, left))


@contextlib.contextmanager
def no_stack_traces() -> Iterator[None]:
    """Read no Python stack for each number that decompositions compute with: half of an export of "same" padding."""
    config = torch.fx.config
    before = getattr(config, "do_not_emit_stack_traces", None)
    if before is None:
        yield
        return
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def export_program(
    module: torch.nn.Module, dimensions: Dimensions, *, named: int
) -> tuple[torch.export.ExportedProgram, Dimensions]:
    """Run torch.export with dynamic sizes if the model allows them; return the program and what it left dynamic.

    named: how many inputs have a parameter of their own; the others are one of the module's forward, *inputs.
    """
    args, shapes = dimensions.inputs, dimensions.free

    def attempt(
        args: tuple[torch.Tensor, ...], *, automatic: bool, fixed: Collection[Axis] = ()
    ) -> torch.export.ExportedProgram:
        sizes: Any = None
        if any(shapes):
            axes = [[(place, index) for index in shape] for place, shape in enumerate(shapes)]
            sizes = tuple(
                {axis[1]: torch_versions.dynamic_size(axis, automatic) for axis in each if axis not in fixed}
                for each in axes
            )
        specification = sizes if sizes is None or named >= len(args) else (*sizes[:named], sizes[named:])
        with torch.no_grad():
            return torch.export.export(module, args, dynamic_shapes=specification, strict=False)

    if not any(shapes):
        return attempt(args, automatic=False), dimensions
    wide = _widen(args, shapes)
    try:
        program = attempt(wide, automatic=False)
    except (torch_versions.user_error(), ValueError, RuntimeError) as error:
        try:
            program = attempt(wide, automatic=True)
        except Exception:
            raise error from None
    doubled = _wrongly_doubled(program, dimensions, wide)
    if doubled:
        narrow = tuple(arg if place in doubled else wide[place] for place, arg in enumerate(args))
        program = attempt(narrow, automatic=True, fixed={(place, 0) for place in doubled})
    return program, dimensions.without(_fixed(program, dimensions), "constant")


def _widen(args: tuple[torch.Tensor, ...], shapes: Sequence[Mapping[int, str]]) -> tuple[torch.Tensor, ...]:
    """Repeat batches of one: torch.export treats a size of 1 as a constant."""
    return tuple(torch.cat([arg, arg]) if 0 in shape and arg.shape[0] == 1 else arg for arg, shape in zip(args, shapes))


def _wrongly_doubled(
    program: torch.export.ExportedProgram, dimensions: Dimensions, wide: tuple[torch.Tensor, ...]
) -> set[int]:
    """Return the inputs whose batch was doubled only to be dynamic, and which the model treats differently then."""
    doubled = {place for place, (one, two) in enumerate(zip(dimensions.inputs, wide)) if one is not two}
    example = tuple(tuple(tensor.shape) for tensor in dimensions.inputs)
    if doubled and SizeConditions(program_inputs(program)).broken(example):
        return doubled
    return {place for place, index in _fixed(program, dimensions) if index == 0 and place in doubled}


def _fixed(program: torch.export.ExportedProgram, dimensions: Dimensions) -> list[Axis]:
    """Return the dynamic dimensions that are constant in the program."""
    inputs = program_inputs(program)
    return [(place, index) for place, index in dimensions.axes if constant(inputs[place].shape[index]) is not None]


def limits_of(program: torch.export.ExportedProgram, dimensions: Dimensions) -> tuple[Limit, ...]:
    """Return the limits of the dimensions that it left dynamic."""
    return limits(program_inputs(program), program.range_constraints, dimensions.axes)


def bound(dimensions: Dimensions, program: torch.export.ExportedProgram) -> Dimensions:
    """Make those dimensions static that a program to be exported has constant."""
    if len(program_inputs(program)) != len(dimensions.inputs):
        return dimensions
    return dimensions.without(_fixed(program, dimensions), "constant")


def constant(size: int | torch.SymInt) -> int | None:
    """Return the value of a size that is not a symbol."""
    return size if isinstance(size, int) else size.node.maybe_as_int()


def user_inputs(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """Return the placeholders of the model's inputs, in their order."""
    names = set(program.graph_signature.user_inputs)
    return [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]


def program_inputs(program: torch.export.ExportedProgram) -> list[torch.Tensor]:
    """Return the model's inputs as fake tensors, with symbols for their dynamic sizes."""
    return [node.meta["val"] for node in user_inputs(program)]


def _refuse_batch_statistics(program: torch.export.ExportedProgram) -> None:
    """Refuse batch norms in training mode that have running statistics, which the graph would not return."""
    for node in list(program.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch_versions.Operator):
            continue
        position = _BATCH_NORMS.get(node.target.name().split(".")[0])
        if position is not None and len(node.args) > position and node.args[position] is True and len(node.args) > 3:
            if node.args[3] is None:
                continue
            where = next((name for name, _ in (node.meta.get("nn_module_stack") or {}).values()), "") or node.name
            raise UnsupportedModelError(
                f"{where.removeprefix('model.')}: {node.target.name()} in training mode would be exported with inference semantics; "
                "put that module into eval mode, or use torch.nn.BatchNorm or bnexport.SyncBatchNorm modules"
            )


def write_floor_divisions(program: torch.export.ExportedProgram) -> None:
    """Write a // b of sizes that may be negative as (a - a % b) // b: torch.onnx translates // by Div, which rounds
    towards zero, and % by Mod, whose result has the divisor's sign as in Python."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=operator.floordiv):
        values = [each.meta["val"] if isinstance(each, torch.fx.Node) else each for each in node.args]
        if not all(isinstance(value, (int, torch.SymInt)) for value in values):
            continue
        least, divisor = (_least(value) for value in values)
        if least >= 0 and divisor > 0:
            continue
        with graph.inserting_before(node):
            rest = graph.call_function(operator.mod, node.args)
            rest.meta["val"] = values[0] % values[1]
            multiple = graph.call_function(operator.sub, (node.args[0], rest))
            multiple.meta["val"] = values[0] - rest.meta["val"]
        node.args = (multiple, node.args[1])
    program.graph_module.recompile()


def write_doubles(exported: torch.onnx.ONNXProgram) -> None:
    """Write numbers of float64 arithmetic in float64: torch.onnx writes most as a float32 that is cast.

    The file holds the rounded number, the recorded program the number itself.
    """
    numbers = numbers_of(exported)
    for node in list(exported.model.graph.all_nodes()):
        value = (
            node.inputs[0]
            if node.op_type in {"Cast", "CastLike"} and _result_type(node) == ir.DataType.DOUBLE
            else None
        )
        tensor = None if value is None else ir.convenience.get_const_tensor(value)
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or tensor.size != 1:
            continue
        number = numbers.get(float(tensor.numpy().item()))
        if number is not None and value is not None and value.producer() is not None:
            exact = ir.node("Constant", [], attributes={"value": ir.tensor(np.full(tensor.numpy().shape, number))})
            node.prepend(exact)
            node.replace_input_with(0, exact.outputs[0])


def _result_type(cast: ir.Node) -> ir.DataType | None:
    if cast.op_type == "CastLike":
        return None if cast.inputs[1] is None else cast.inputs[1].dtype
    return ir.DataType(cast.attributes["to"].as_int())


def numbers_of(exported: torch.onnx.ONNXProgram) -> dict[float, float]:
    """Return the numbers of a program by what they are in float32, where that tells them apart."""
    assert exported.exported_program is not None
    modules = exported.exported_program.graph_module.modules()
    graphs = [each.graph for each in modules if isinstance(each, torch.fx.GraphModule)]
    leaves = [torch_versions.pytree.tree_leaves((node.args, node.kwargs)) for graph in graphs for node in graph.nodes]
    numbers: dict[float, set[float]] = {}
    for value in (leaf for each in leaves for leaf in each if isinstance(leaf, float)):
        with np.errstate(over="ignore"):
            numbers.setdefault(float(np.float32(value)), set()).add(value)
    return {rounded: next(iter(found)) for rounded, found in numbers.items() if len(found) == 1}


def _least(size: int | torch.SymInt) -> Any:
    """Return the lower end of the range of a size."""
    return size if isinstance(size, int) else size.node.shape_env.bound_sympy(size.node.expr).lower


def _write_constant_sizes(graph: ir.Graph) -> None:
    """Write symbols that torch.export found constant, such as a size named "6", as numbers."""
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None:
            sizes = [size if isinstance(size, int) else size.value for size in value.shape]
            value.shape = ir.Shape([int(size) if isinstance(size, str) and size.isdigit() else size for size in sizes])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the exporter's progress and deprecation messages; errors are still raised."""
    loggers = [
        logging.getLogger(name)
        for name in ("torch.onnx", "torch.export", "torch._dynamo", "torch.fx", "onnxscript", "onnx_ir")
    ]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        # torch.export prints the graph up to a failure to stderr.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
