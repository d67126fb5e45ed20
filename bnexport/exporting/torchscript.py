"""The TorchScript exporter: a symbolic for the custom operator, statistics as plain outputs.

Its symbolics want attribute names with a type suffix, a domain, and the group as a string and a
size; without them the node lands in the default domain or fails to serialise.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.onnx import symbolic_helper

from bnexport import schema, torch_versions
from bnexport.errors import StorageError, UnsupportedModelError, first_line
from bnexport.exporting.dimensions import Dimensions, Note
from bnexport.exporting.exact_sizes import write_resizes
from bnexport.exporting.substitutes import AnySize, MarkedSizes
from bnexport.exporting.tracer_notes import TracerNotes
from bnexport.exporting.wrapper import Traced, TracedGraph
from bnexport.sync_bn.module import SyncBatchNorm

# TorchScript files: scripted if the code allows it, else traced, then frozen.
#
# torch.jit is deprecated: it works in torch 2.13 with a warning, which is not shown here, and is not
# supported on Python 3.14. Freezing is asked for no arithmetic: it would fold a Linear on (N, C, L)
# into a BatchNorm1d along the wrong axis where L equals C. `bnexport.fold_module` has folded before.

NAMESPACES = ("aten", "prim")
_FORBIDDEN = ("prim::PythonOp", "prim::CallMethod", "prim::CallFunction")


def build(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.jit.ScriptModule, str, list[Note]]:
    """Return the frozen module, how it was made ("script" or "trace") and notes. `model` is in eval mode.

    Raises UnsupportedModelError where neither way works, or where operators of other libraries remain.
    """
    notes: list[Note] = []
    with _quiet(), torch.no_grad():
        method = "script"
        try:
            frozen = _freeze(torch.jit.script(model))
        except Exception as error:  # the compiler raises what it likes
            method, reason = "trace", first_line(error)[:200].rstrip(":")
            text = (
                f"scripting fails ({reason}); traced instead: control flow and Python numbers stay as they are for the"
            )
            notes.append(Note("scripting", f"{text} example inputs"))
            try:
                own = tuple(value.clone() for value in inputs)  # code that works in place may change them
                with TracerNotes() as tracer:
                    frozen = _freeze(torch.jit.trace(model, own, strict=False, check_trace=False))
                notes[:0] = tracer.notes(model, inputs)
            except Exception as second:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: TorchScript can neither script it ({reason}) nor trace it"
                    f" ({first_line(second)[:200].rstrip(':')}); use format='onnx' or format='pt2'"
                ) from second
        _refuse_foreign_operators(frozen, type(model).__name__)
    return frozen, method, notes


def save(module: torch.jit.ScriptModule, path: Path) -> None:
    with _quiet():
        torch.jit.save(module, str(path))


def operators(module: torch.jit.ScriptModule) -> set[str]:
    """Return the kinds of all nodes, those of inner blocks included."""
    found: set[str] = set()
    graph = module.inlined_graph  # made for this call: its nodes live as long as it does
    blocks: list[Any] = [graph]
    while blocks:
        for node in blocks.pop().nodes():
            found.add(node.kind())
            blocks += node.blocks()
    return found


def _freeze(module: Any) -> torch.jit.ScriptModule:
    frozen: torch.jit.ScriptModule = torch.jit.freeze(module.eval(), optimize_numerics=False)
    return frozen


def _refuse_foreign_operators(module: torch.jit.ScriptModule, name: str) -> None:
    foreign = sorted(
        kind for kind in operators(module) if kind.partition("::")[0] not in NAMESPACES or kind in _FORBIDDEN
    )
    if foreign:
        raise UnsupportedModelError(
            f"{name}: the TorchScript graph needs {', '.join(foreign[:8])}, which torch alone cannot load;"
            " replace it by torch's own operators before export"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


OPSET = 18
_OPERATOR = "bnexport::sync_batch_norm"


def _symbolic(g: torch_versions.GraphContext, *arguments: Any) -> Any:
    given = schema.TORCH_SYNC_BATCH_NORM.bind(arguments)
    input, *vectors = (given[value.name] for value in schema.SYNC_BATCH_NORM.inputs)
    double = input.type().scalarType() == "Double"
    to = int(ir.DataType.DOUBLE if double else ir.DataType.FLOAT)
    wanted = "Double" if double else "Float"

    def statistics(vector: Any) -> Any:
        if torch_versions.is_none(vector) or vector.type().scalarType() == wanted:
            return vector
        return g.op("Cast", vector, to_i=to)

    attributes = schema.node_attributes(schema.SYNC_BATCH_NORM, given)
    kinds = {attribute.name: attribute.kind.value[0] for attribute in schema.SYNC_BATCH_NORM.attributes}
    outputs = g.op(
        f"{schema.DOMAIN}::{schema.SYNC_BATCH_NORM.name}",
        input,
        *map(statistics, vectors),
        **{f"{name}_{kinds[name]}": value for name, value in attributes.items()},
        outputs=len(schema.SYNC_BATCH_NORM.outputs),
    )
    outputs[0].setType(input.type())
    statistics_type = input.type().with_dtype(torch.float64 if double else torch.float32)
    sizes = input.type().sizes()
    if sizes is not None:
        statistics_type = statistics_type.with_sizes([sizes[1]])
    for output in outputs[1:]:
        output.setType(statistics_type)
    return tuple(outputs)


# How torch reads the arguments of a symbolic function: values, integers, floats, strings.
_DESCRIPTORS: dict[str, Any] = {"bool": "i", "int": "i", "float": "f", "str": "s"}
_parsed_symbolic = symbolic_helper.parse_args(
    *(_DESCRIPTORS.get(argument.type, "v") for argument in schema.TORCH_SYNC_BATCH_NORM.arguments)
)(schema.TORCH_SYNC_BATCH_NORM.sign(_symbolic, "g"))


def _linspace(g: torch_versions.GraphContext, start: Any, end: Any, steps: Any, dtype: Any, *_: Any) -> Any:
    """Translate linspace, also of one value: torch's own translation divides by steps - 1, which is 0 for an image of one
    row, and coordinates became NaN.
    """
    kind = 6 if torch_versions.is_none(dtype) else torch_versions.constant(dtype, "i", "dtype")  # 6: float32
    to = int(torch.onnx.JitScalarType(kind).onnx_type())  # type: ignore[attr-defined,call-overload]
    zero, one = (g.op("Constant", value_t=torch.tensor(number)) for number in (0, 1))
    count = g.op("Cast", steps, to_i=int(ir.DataType.INT64))
    intervals = g.op("Max", g.op("Sub", count, one), one)
    first, last, divisor, index = (
        g.op("Cast", value, to_i=to) for value in (start, end, intervals, g.op("Range", zero, count, one))
    )
    step = g.op("Div", g.op("Sub", last, first), divisor)
    return g.op("Add", g.op("Mul", index, step), first)


def _floor_divide(g: torch_versions.GraphContext, dividend: Any, divisor: Any) -> Any:
    """Translate floor_divide, and // of sizes: torch's own translation rounds towards zero."""
    if torch_versions.is_float(dividend) or torch_versions.is_float(divisor):
        return g.op("Floor", g.op("Div", dividend, divisor))
    numbers = [torch_versions.scalar(value) for value in (dividend, divisor)]
    if all(isinstance(number, torch.Tensor) for number in numbers):
        return g.op("Constant", value_t=torch.floor_divide(*numbers))
    return g.op("Div", g.op("Sub", dividend, g.op("Mod", dividend, divisor)), divisor)


_SYMBOLICS = {_OPERATOR: _parsed_symbolic, "aten::linspace": _linspace, "aten::floor_divide": _floor_divide}


def trace(wrapper: Traced, dimensions: Dimensions, *, opset: int = OPSET) -> TracedGraph:
    """Trace `wrapper` into an onnx_ir Model with torch.onnx.export(dynamo=False), with notes on what the trace took for constant.

    Raises UnsupportedModelError for buffers that code other than our batch norms' changes: tracing loses
    changes in place.
    """
    _refuse_foreign_state(wrapper)
    axes = {name: dict(shape) for name, shape in zip(dimensions.names, dimensions.free) if shape}
    for operator, symbolic in _SYMBOLICS.items():
        torch.onnx.register_custom_op_symbolic(operator, symbolic, OPSET)  # type: ignore[attr-defined]
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            images = AnySize(dynamic=any(index for _, index in dimensions.axes))
            notes = _write(wrapper, dimensions, axes, images, file, opset)
            model = ir.load(file)
            for initializer in model.graph.initializers.values():
                # The folder goes away: external tensors of models over 2 GB come into memory.
                tensor = initializer.const_value
                if isinstance(tensor, ir.ExternalTensor):
                    initializer.const_value = ir.Tensor(tensor.numpy().copy(), name=tensor.name)
            _refuse_batch_statistics(model.graph)
            _forget_wrong_shapes(model.graph, axes)
            write_resizes(model, images.factors)
            return TracedGraph(model, dimensions, tuple(notes))
    except OSError as error:
        raise StorageError(
            f"cannot write the traced model to the folder for temporary files: {error.strerror or error};"
            " nothing was changed; make room there, or set TMPDIR to another folder"
        ) from error
    finally:
        for operator in _SYMBOLICS:
            torch.onnx.unregister_custom_op_symbolic(operator, OPSET)  # type: ignore[attr-defined]


def _write(
    wrapper: Traced, dimensions: Dimensions, axes: dict[str, dict[int, str]], images: AnySize, file: Path, opset: int
) -> list[Note]:
    """Write the traced model to `file`; return the tracer's notes."""
    with TracerNotes() as tracer, _no_log(), images, MarkedSizes():
        torch.onnx.export(
            wrapper,
            dimensions.inputs,
            str(file),
            dynamo=False,
            opset_version=opset,
            custom_opsets={schema.DOMAIN: schema.VERSION} if _has_sync_batch_norm(wrapper) else {},
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
            keep_initializers_as_inputs=False,
            input_names=list(dimensions.names),
            dynamic_axes=axes,
        )
    return tracer.notes(wrapper, dimensions.inputs)


@contextlib.contextmanager
def _no_log() -> Iterator[None]:
    """Keep torch from printing the graph that it cannot export to the process's stdout, which Python cannot redirect."""
    log = torch_versions.replace_graph_log(lambda *_: None)  # switched on by each export, whatever it was before
    try:
        yield
    finally:
        torch_versions.replace_graph_log(log)


def _has_sync_batch_norm(wrapper: Traced) -> bool:
    return any(isinstance(module, SyncBatchNorm) for module in wrapper.modules())


def _refuse_foreign_state(wrapper: Traced) -> None:
    for tensor in wrapper.state:
        if not any(isinstance(module, SyncBatchNorm) for module, _ in tensor.places):
            raise UnsupportedModelError(
                f"{tensor.name}: the forward changes this buffer, and exporter='torchscript' would lose that;"
                " use exporter='dynamo', or put its module into eval mode"
            )


def _refuse_batch_statistics(graph: ir.Graph) -> None:
    """Refuse nodes that would update statistics which the graph does not return; a node without any (constants here)
    is right.
    """
    for node in graph.all_nodes():
        training = node.attributes.get("training_mode")
        if node.op_type != "BatchNormalization" or training is None or not training.as_int():
            continue
        if any(value is not None and value.is_initializer() for value in node.inputs[3:5]):
            path = (node.name or "").removeprefix("/model/").replace("/", ".").rpartition(".")[0]
            raise UnsupportedModelError(
                f"{path or 'the model'}: batch norm with the batch's statistics that is not one of the batch norm modules"
                " that bnexport knows; put that module into eval mode, or use torch.nn.BatchNorm or"
                " bnexport.SyncBatchNorm modules"
            )


def _forget_wrong_shapes(graph: ir.Graph, axes: dict[str, dict[int, str]]) -> None:
    """Remove inferred shapes after custom nodes: the exporter gets them wrong, and ONNX Runtime plans memory by
    them.

    It gives every output of such a node the shape of the first, and one symbol to sizes that
    differ. Sizes that are numbers stay, apart from those of the node's further outputs and of what
    is made of them; symbols stay where they name a dimension of an input.
    """
    known = {symbol for shape in axes.values() for symbol in shape.values()}
    wrong: set[ir.Value] = set()
    for node in graph:
        if node.op_type == schema.SYNC_BATCH_NORM.name:
            wrong.update(node.outputs[1:])
        elif wrong.intersection(value for value in node.inputs if value is not None):
            wrong.update(node.outputs)
        for value in node.outputs:
            if value in wrong:
                value.shape = None
            elif value.shape is not None:
                sizes = [size if isinstance(size, int) else size.value for size in value.shape]
                inner = known if value.is_graph_output() else ()
                value.shape = ir.Shape([size if isinstance(size, int) or size in inner else None for size in sizes])
