"""Completion of a traced graph for users: names, complete nodes, the portable body."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnx_ir.convenience
import onnx_ir.passes.common as passes
import torch
from onnxscript import optimizer

from bnexport import schema
from bnexport.errors import UnsupportedModelError
from bnexport.graph.constants import EXPRESSIONS, WEIGHT_OPERATORS
from bnexport.graph.evaluate import ANSWERED, NotEvaluated, constant_tensor, expression, read_tensor
from bnexport.graph.evaluate import evaluate as evaluate_node
from bnexport.graph.nodes import Names, Refused, is_standard, module_path, set_lowest_ir_version
from bnexport.graph.simplify import remove_identities

# The portable body: MMCVSyncBatchNorm of one process in standard ONNX operators.
#
# Attached to a model as a local function under the node's own (domain, name), it lets a runtime
# without our library run the node; a runtime with the library runs the kernel. Right for
# group_size 1 only: for larger groups it would normalise locally without a word, so those nodes get
# no body.
#
#     d      = x - mean        centred twice in training, so that float sums keep |mean| >> std
#     invstd = 1 / sqrt(var + eps), 0 where var and eps are both 0
#     y      = d * (weight * invstd) + bias
#
# An If on training_mode serves both modes. Sums instead of means survive an empty batch. The caller
# passes all five inputs (ones, zeros or neutral statistics for absent ones): ONNX does not infer
# types through an absent input of a function.

_TEXT = """
<domain: "{domain}", opset_import: ["" : {opset}]>
{name} <{attributes}> ({inputs}) => ({outputs})
{{
    x = CastLike (input, running_mean)
    shape = Shape (input)
    rank = Size (shape)
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_int = 2> ()
    step = Constant <value_int = 1> ()
    spatial_rank = Sub (rank, two)
    spatial_rank_1d = Unsqueeze (spatial_rank, zero)
    channels = Shape <start = 1, end = 2> (input)
    spatial_ones = Expand (one, spatial_rank_1d)
    wide = Concat <axis = 0> (one, channels, spatial_ones)
    spatial_axes = Range (two, rank, step)
    axes = Concat <axis = 0> (zero, spatial_axes)
    reduced = Gather <axis = 0> (shape, axes)
    count_int = ReduceProd <keepdims = 0> (reduced)
    count = CastLike (count_int, running_mean)
    mode = Constant <value_int: int = @training_mode> ()
    training = Cast <to = 9> (mode)
    zero_float = Constant <value_float = 0.0> ()
    one_float = Constant <value_float = 1.0> ()
    eps_float = Constant <value_float: float = @eps> ()
    momentum_float = Constant <value_float: float = @momentum> ()
    zero_s = CastLike (zero_float, running_mean)
    one_s = CastLike (one_float, running_mean)
    eps_s = CastLike (eps_float, running_mean)
    momentum_s = CastLike (momentum_float, running_mean)
    centred, saved_mean, var, running_mean_out, running_var_out = If (training) <
        then_branch = from_batch () => (t_centred, t_mean, t_var, t_running_mean, t_running_var) {{
            t_divisor = Max (count, one_s)
            t_sum = ReduceSum <keepdims = 0> (x, axes)
            t_first_mean = Div (t_sum, t_divisor)
            t_first_mean_wide = Reshape <allowzero = 1> (t_first_mean, wide)
            t_first_centred = Sub (x, t_first_mean_wide)
            t_rest_sum = ReduceSum <keepdims = 0> (t_first_centred, axes)
            t_rest = Div (t_rest_sum, t_divisor)
            t_rest_wide = Reshape <allowzero = 1> (t_rest, wide)
            t_centred = Sub (t_first_centred, t_rest_wide)
            t_mean = Add (t_first_mean, t_rest)
            t_square = Mul (t_centred, t_centred)
            t_m2 = ReduceSum <keepdims = 0> (t_square, axes)
            t_var = Div (t_m2, t_divisor)
            t_count_less_one = Sub (count, one_s)
            t_bessel = Max (t_count_less_one, one_s)
            t_unbiased = Div (t_m2, t_bessel)
            t_is_empty = Equal (count, zero_s)
            t_m = Where (t_is_empty, zero_s, momentum_s)
            t_keep = Sub (one_s, t_m)
            t_old_mean = Mul (running_mean, t_keep)
            t_new_mean = Mul (t_mean, t_m)
            t_running_mean = Add (t_old_mean, t_new_mean)
            t_old_var = Mul (running_var, t_keep)
            t_new_var = Mul (t_unbiased, t_m)
            t_running_var = Add (t_old_var, t_new_var)
        }},
        else_branch = from_running () => (e_centred, e_mean, e_var, e_running_mean, e_running_var) {{
            e_mean = Identity (running_mean)
            e_var = Identity (running_var)
            e_running_mean = Identity (running_mean)
            e_running_var = Identity (running_var)
            e_mean_wide = Reshape <allowzero = 1> (running_mean, wide)
            e_centred = Sub (x, e_mean_wide)
        }}
    >
    total = Add (var, eps_s)
    constant_channel = Equal (total, zero_s)
    std = Sqrt (total)
    safe_std = Where (constant_channel, one_s, std)
    inverse = Div (one_s, safe_std)
    saved_invstd = Where (constant_channel, zero_s, inverse)
    scale = Mul (weight, saved_invstd)
    scale_wide = Reshape <allowzero = 1> (scale, wide)
    bias_wide = Reshape <allowzero = 1> (bias, wide)
    scaled = Mul (centred, scale_wide)
    shifted = Add (scaled, bias_wide)
    output = CastLike (shifted, input)
}}
"""

# The first opset with axes as an input of the reductions.
MINIMUM_OPSET = 18


def portable_body(opset: int) -> onnx.FunctionProto:
    """Return the body as a FunctionProto of domain `mmcv` for a model of the given default-domain opset (>= 18)."""
    operator = schema.SYNC_BATCH_NORM
    text = _TEXT.format(
        domain=operator.domain,
        name=operator.name,
        opset=max(opset, MINIMUM_OPSET),
        attributes=", ".join(attribute.name for attribute in operator.attributes),
        inputs=", ".join(value.name for value in operator.inputs),
        outputs=", ".join(value.name for value in operator.outputs),
    )
    return onnx.parser.parse_function(text)


# Weights computed from parameters alone, such as those of weight-standardised convolutions.
#
# Such a subgraph gives the same values in every run. It is evaluated once (`graph/evaluate.py`) where it does
# more than lay out, scale or cast a parameter; the result takes the place of the subgraph, and a
# batch norm behind the layer folds into it.

# What costs little in every run stays, for the folder to evaluate where a batch norm folds into it.
_LEFT = frozenset((*EXPRESSIONS, "Constant")) - WEIGHT_OPERATORS


def evaluate(model: ir.Model) -> None:
    """Replace, in place, values that depend only on initializers by constants, if that makes the file smaller (`_LEFT`).

    A value that is larger than the largest initializer it is made of stays computed, and so does one that the
    evaluator does not answer for.
    """
    graph = model.graph
    listed = set(graph.inputs)
    # The largest initializer that each fixed value is made of; None for what Constant nodes alone decide.
    sources: dict[ir.Value, ir.Value | None] = {}
    sources.update((value, value) for value in graph.initializers.values() if value not in listed)
    wanted: set[ir.Value] = set()
    for node in graph:
        operands = [value for value in node.inputs if value is not None]
        if not is_standard(node, "Constant", *ANSWERED) or any(value not in sources for value in operands):
            continue
        source = max((sources[value] for value in operands), key=_size, default=None)
        sources.update(dict.fromkeys(node.outputs, source))
        if source is not None and (node.op_type not in _LEFT or wanted.intersection(operands)):
            wanted.update(node.outputs)
    version, arrays = model.opset_imports[""], dict[ir.Value, np.ndarray]()
    names = Names(model)
    for value in wanted:
        if value.is_graph_output() or all(wanted.issuperset(node.outputs) for node, _ in value.uses()):
            continue
        source = sources[value]
        assert source is not None
        try:
            array = expression(value, arrays, _stored, lambda node, inputs: evaluate_node(node, inputs, version))
        except (NotEvaluated, Refused):
            continue
        if array.size <= _size(source):
            constant = _initializer(graph, names.fresh(f"{source.name}.computed"), array)
            ir.convenience.replace_all_uses_with(value, constant)


def _stored(value: ir.Value) -> np.ndarray | None:
    node = value.producer()
    if node is not None and node.op_type == "Constant":
        return read_tensor(constant_tensor(node))
    return None if node is not None or value.const_value is None else read_tensor(value.const_value)


def _size(value: ir.Value | None) -> int:
    return 0 if value is None or value.const_value is None else int(value.const_value.size)


def _initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    value = ir.val(name, const_value=ir.tensor(np.asarray(array, order="C"), name=name))
    graph.register_initializer(value)
    return value


_PREFIX = "model."


def finish(
    model: ir.Model,
    outputs: list[str],
    state: Mapping[str, torch.Tensor],
    groups: Mapping[str, str],
    shared: Mapping[str, str],
) -> None:
    """Name initializers and outputs and complete sync batch norm nodes, in place.

    outputs: names for the model's outputs; state: the state tensors by name, whose updates are the
    remaining outputs; groups: what each group of this process is called in the model; shared: the first
    name for each further name of a shared tensor. A training graph's constants are not folded: state is
    an initializer there.
    """
    graph = model.graph
    graph.name = "bnexport"
    _strip_prefix(graph)
    _use_first_names(graph, shared)
    _name_nodes(graph)
    remove_identities(model)
    if not state:
        evaluate(model)
        optimizer.fold_constants(model)
    passes.RemoveUnusedNodesPass()(model)
    _name_outputs(graph, outputs + [name + schema.NEW_SUFFIX for name in state])
    for output, (name, tensor) in zip(graph.outputs[len(outputs) :], state.items()):
        if name not in graph.initializers:  # the forward replaces it without reading it
            _initializer(graph, name, tensor.detach().cpu().numpy())
        output.shape = graph.initializers[name].shape
    sync_nodes = [
        node
        for node in model.graph.all_nodes()
        if node.op_type == schema.SYNC_BATCH_NORM.name and node.domain == schema.DOMAIN
    ]
    names = _Names(graph)
    for node in sync_nodes:
        _complete(graph, node, names)
        group = node.attributes["group"].as_string()
        node.attributes["group"] = ir.AttrString("group", groups.get(group, group))
    if sync_nodes:
        model.opset_imports[schema.DOMAIN] = schema.VERSION
        if all(node.attributes["group_size"].as_int() == 1 for node in sync_nodes):
            _attach_body(model)
    passes.RemoveUnusedOpsetsPass()(model)
    set_lowest_ir_version(model)
    passes.TopologicalSortPass()(model)
    # The exporter's metadata holds stack traces with the user's paths.
    passes.ClearMetadataAndDocStringPass()(model)


class _Names:
    """Values of a graph by name, kept up to date when they are renamed."""

    def __init__(self, graph: ir.Graph) -> None:
        values = [*graph.inputs, *graph.initializers.values()]
        for node in graph.all_nodes():
            values.extend(node.outputs)
        self._by_name = {str(value.name): value for value in values}

    def rename(self, value: ir.Value, name: str) -> None:
        """Rename `value`; a previous owner of the name gets another one."""
        if value.name == name:
            return
        other = self._by_name.get(name)
        if other is not None:
            self._set(other, self.free(name))
        self._set(value, name)

    def free(self, base: str) -> str:
        name, index = base, 0
        while name in self._by_name:
            index += 1
            name = f"{base}_{index}"
        return name

    def _set(self, value: ir.Value, name: str) -> None:
        self._by_name.pop(str(value.name), None)
        value.name = name
        if value.const_value is not None:
            value.const_value.name = name
        self._by_name[name] = value


def _strip_prefix(graph: ir.Graph) -> None:
    """Rename `model.conv.weight` to `conv.weight`, its name in the state_dict."""
    names = _Names(graph)
    for name, value in list(graph.initializers.items()):
        if name.startswith(_PREFIX):
            names.rename(value, name.removeprefix(_PREFIX))


def _use_first_names(graph: ir.Graph, shared: Mapping[str, str]) -> None:
    """Rename a tensor shared by several modules to its first name in the state_dict; exporters pick any of them."""
    names = _Names(graph)
    for name, first in shared.items():
        value = graph.initializers.get(name)
        if value is not None and first not in graph.initializers:
            names.rename(value, first)


def _name_nodes(graph: ir.Graph) -> None:
    """Name nodes after their module, if the exporter records it: `stem.1/BatchNormalization`."""
    taken: set[str] = set()
    for node in graph.all_nodes():
        path = f"{module_path(node)}.".removeprefix(_PREFIX).rstrip(".")
        base = name = f"{path}/{node.op_type}" if path else node.op_type
        index = 1
        while name in taken:
            name, index = f"{base}_{index}", index + 1
        taken.add(name)
        node.name = name


def _name_outputs(graph: ir.Graph, names: list[str]) -> None:
    if len(names) != len(graph.outputs):
        raise UnsupportedModelError(
            f"the exporter returned {len(graph.outputs)} outputs, expected {len(names)}: {', '.join(names)}"
        )
    seen: set[int] = set()
    for index, output in enumerate(list(graph.outputs)):
        # An input, an initializer or an output listed twice cannot carry a second name.
        if output.producer() is None or id(output) in seen:
            copy = ir.node("Identity", [output])
            copy.outputs[0].type, copy.outputs[0].shape = output.type, output.shape
            graph.append(copy)
            graph.outputs[index] = copy.outputs[0]
        seen.add(id(graph.outputs[index]))
    values = _Names(graph)
    for output, name in zip(list(graph.outputs), names):
        values.rename(output, name)


def _complete(graph: ir.Graph, node: ir.Node, names: _Names) -> None:
    """Add all inputs, output slots and attributes, which the portable body needs."""
    operator = schema.SYNC_BATCH_NORM
    for attribute in operator.attributes:
        if attribute.name not in node.attributes:
            node.attributes[attribute.name] = ir.convenience.convert_attribute(attribute.name, attribute.default)
    node.resize_outputs(len(operator.outputs))
    channels = _channels(node)
    last = operator.outputs[-1]
    for slot, output in zip(operator.outputs, node.outputs):
        if slot.type == "S":
            output.type = ir.TensorType(_statistics_type(node))
            output.shape = None if channels is None else ir.Shape([channels])
        if slot is last and not output.name:
            names.rename(output, names.free(f"{node.outputs[0].name}.{slot.name}"))
        elif slot.name != "output" and slot is not last and not output.uses() and not output.is_graph_output():
            # An unused slot is an empty name. The last slot keeps one, since onnx-ir drops trailing
            # empty names, and a node with fewer outputs than its function fails type inference.
            output.name, output.type, output.shape = "", None, None
    node.resize_inputs(len(operator.inputs))
    if node.attributes["group_size"].as_int() != 1:
        return
    for index, fill in ((1, 0.0), (2, 1.0), (3, 1.0), (4, 0.0)):
        if node.inputs[index] is None:
            node.replace_input_with(index, _neutral(graph, node, operator.inputs[index].name, fill))


def _statistics_type(node: ir.Node) -> ir.DataType:
    """Return S: the type of any vector, else the statistics' type for the data's type."""
    for value in (*node.inputs[1:], node.inputs[0]):
        if value is not None and value.dtype is not None:
            return ir.DataType.DOUBLE if value.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    return ir.DataType.FLOAT


def _channels(node: ir.Node) -> int | None:
    """Return C from the data's shape, else from one of the vectors."""
    axes = (1, 0, 0, 0, 0)
    for value, axis in zip(node.inputs, axes):
        size = None if value is None or value.shape is None else value.shape[axis]
        if isinstance(size, int):
            return size
    return None


def _neutral(graph: ir.Graph, node: ir.Node, slot: str, fill: float) -> ir.Value:
    """Create an initializer for an absent vector: scale 1, shift 0, statistics that are ignored."""
    channels = _channels(node)
    if channels is None:
        raise UnsupportedModelError(
            f"node {node.name!r}: its number of channels is not static, so the absent input {slot!r} cannot be filled in"
        )
    dtype = _statistics_type(node)
    name = f"bnexport.neutral_{slot}_{channels}_{dtype.name.lower()}"
    if name not in graph.initializers:
        _initializer(graph, name, np.full(channels, fill, dtype.numpy()))
    return graph.initializers[name]


def _attach_body(model: ir.Model) -> None:
    opset = model.opset_imports.get("", MINIMUM_OPSET)
    body = ir.serde.deserialize_function(portable_body(opset))
    model.functions[body.identifier()] = body
