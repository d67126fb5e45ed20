"""Graphs of a step: names and types for its users, the graphs of a group, the inference model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer

from bnexport import folding, model_io, schema
from bnexport.errors import MalformedModelError, UnsupportedModelError
from bnexport.graph.nodes import set_lowest_ir_version
from bnexport.graph.simplify import remove_identities
from bnexport.model_io import walk
from bnexport.schema import NEW_SUFFIX
from bnexport.training import contract
from bnexport.training.state import GRADIENT_SUFFIX, LEARNING_RATE, LOSS_WEIGHT, SEED, Description, Kind

if TYPE_CHECKING:
    from bnexport.folding import FoldResult


# Completion of a traced training graph: simplification, names and groups.

_OURS = {operator.name: operator for operator in schema.OPERATORS}
_OF_TRAINING = {operator.name: operator for operator in contract.OPERATORS}


def finish(model: ir.Model, groups: dict[str, str]) -> None:
    """Simplify `model` in place.

    State that no computation reads is no input any more, and an output `name.new` that is the input
    `name` is dropped: parameters without gradients, statistics of a batch norm that is fixed. groups:
    what each process group of this process is called in the model.
    """
    graph = model.graph
    graph.name = "bnexport"
    remove_identities(model)
    _drop_unchanged(graph)
    optimizer.fold_constants(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    _drop_inputs(graph, [value for value in graph.inputs if not value.uses() and not value.is_graph_output()])
    _mask_by_outputs(graph)
    for node in model.graph.all_nodes():
        if node.domain == schema.DOMAIN and node.op_type in _OURS:
            model.opset_imports[schema.DOMAIN] = schema.VERSION
            group = node.attributes["group"].as_string()
            node.attributes["group"] = ir.AttrString("group", groups.get(group, group))
            _leave_unused_outputs_empty(node, _OURS[node.op_type])
        elif node.domain == contract.DOMAIN:
            model.opset_imports[contract.DOMAIN] = contract.VERSION
            _leave_unused_outputs_empty(node, _OF_TRAINING[node.op_type])
    passes.RemoveUnusedFunctionsPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    set_lowest_ir_version(model)
    passes.TopologicalSortPass()(model)
    # The exporter's metadata holds stack traces with the user's paths.
    passes.ClearMetadataAndDocStringPass()(model)


def _mask_by_outputs(graph: ir.Graph) -> None:
    """Let ReluGrad read the output of a Relu or Clip instead of its input: the same mask, and one saved activation
    less.

    What follows a ReLU saves its output anyway.
    """
    for node in graph:
        if node.domain != contract.DOMAIN or node.op_type != contract.RELU_GRAD.name:
            continue
        value = node.inputs[1]
        assert value is not None
        forward = next((user for user in value.consumers() if _bounds(user) == _gradient_bounds(node)), None)
        if forward is not None:
            node.replace_input_with(1, forward.outputs[0])


def _gradient_bounds(node: ir.Node) -> tuple[float, float]:
    low, high = node.attributes.get("low"), node.attributes.get("high")
    return (0.0 if low is None else low.as_float()), (math.inf if high is None else high.as_float())


def _bounds(node: ir.Node) -> tuple[float, float] | None:
    """Return the bounds of a Relu or of a Clip to constants, or None."""
    if node.domain != "" or node.op_type not in ("Relu", "Clip"):
        return None
    if node.op_type == "Relu":
        return 0.0, math.inf
    limits = [
        None if value is None else ir.convenience.get_const_tensor(value) for value in (*node.inputs, None, None)[1:3]
    ]
    if any(limit is None and value is not None for limit, value in zip(limits, node.inputs[1:3])):
        return None
    low, high = (None if limit is None else float(limit.numpy()) for limit in limits)
    return (-math.inf if low is None else low), (math.inf if high is None else high)


def _leave_unused_outputs_empty(node: ir.Node, operator: schema.Operator) -> None:
    """Clear the names of unused optional outputs: the kernels compute every named one."""
    for output, declared in zip(node.outputs, operator.outputs):
        if declared.optional and not output.uses() and not output.is_graph_output():
            output.name, output.type, output.shape = "", None, None


def uses_library(model: ir.Model) -> bool:
    """Whether a session needs the custom-op library for `model`."""
    return schema.DOMAIN in model.opset_imports or contract.DOMAIN in model.opset_imports


def keep_outputs(model: ir.Model, names: Iterable[str]) -> None:
    """Reduce the graph to the outputs `names` and the inputs that they need."""
    kept = set(names)
    model.graph.outputs[:] = [output for output in model.graph.outputs if output.name in kept]
    passes.RemoveUnusedNodesPass()(model)
    inputs = model.graph.inputs
    _drop_inputs(model.graph, [value for value in inputs if not value.uses() and not value.is_graph_output()])


def _drop_unchanged(graph: ir.Graph) -> None:
    """Remove outputs `name.new` that are only a copy of the input `name`."""
    graph.outputs[:] = [output for output in graph.outputs if not _is_copy(output)]


def _is_copy(output: ir.Value) -> bool:
    producer = output.producer()
    if producer is None or producer.op_type != "Identity":
        return False
    source = producer.inputs[0]
    return source is not None and source.is_graph_input() and output.name == f"{source.name}{NEW_SUFFIX}"


def _drop_inputs(graph: ir.Graph, values: list[ir.Value]) -> None:
    dropped = {id(value) for value in values}
    graph.inputs[:] = [value for value in graph.inputs if id(value) not in dropped]


# Split of a step's graph for a group of processes, between its gradients and its update.
#
#     gradients   batch, state, loss_weight -> loss, outputs, name.new of buffers, name.grad
#     update      name.grad, state, lr      -> name.new of parameters and of the optimizer's state
#
# Between the two the gradients are added over the group. The gradient of the joint loss
#
#     L = sum over ranks r of w_r L_r,   sum of all w_r = 1 (a mean) or each w_r = 1 (a sum)
#
# is the sum of what the ranks compute when each starts its backward pass with w_r: batch norms exchange
# gradients of all ranks on the way, so weighting afterwards would be wrong for uneven batches. Hence the
# number `loss_weight`, a constant 1 in the file, which becomes an input here.

_OUR_NAMES = {operator.name for operator in schema.OPERATORS}
_UPDATED = (Kind.PARAMETER, Kind.OPTIMIZER)
# Seeds are below 2^63; ranks are kept apart in bits that counting steps does not reach.
_RANK_SHIFT = 40


def prepare(model: ir.Model, *, returns_gradients: bool) -> tuple[str, ...]:
    """Prepare an exported step for the split, in place: names stay, inputs and outputs are those of one process.

    The input `loss_weight` becomes a constant. Without returns_gradients, outputs `name.grad` become inner
    values of these names. Returns the parameters that have gradients.
    """
    graph = model.graph
    for weight in [value for value in graph.inputs if value.name == LOSS_WEIGHT]:
        graph.inputs.remove(weight)
        weight.const_value = ir.tensor(np.array(1.0), name=LOSS_WEIGHT)
        graph.register_initializer(weight)
    outputs = [value for value in graph.outputs if str(value.name).endswith(GRADIENT_SUFFIX)]
    if not returns_gradients:
        hidden = {id(value) for value in outputs}
        graph.outputs[:] = [value for value in graph.outputs if id(value) not in hidden]
        for value in outputs:
            _merge_copy(value)
        # A gradient without node is a constant, which needs no exchange.
        outputs = [value for value in outputs if value.producer() is not None]
    return tuple(str(value.name).removesuffix(GRADIENT_SUFFIX) for value in outputs)


def keep_gradients(model: ir.Model, description: Description, group: str, size: int, rank: int, where: str) -> None:
    """Reduce the graph to loss, gradients and new buffers, for `rank` of the `size` processes in the registered
    `group`; in place.

    Every batch norm with training statistics takes them from the group. where: the file's name, for messages.

    Raises UnsupportedModelError for a step that would differ between processes, MalformedModelError for
    one that cannot be cut.
    """
    if description.standard_ops_only:
        raise UnsupportedModelError(
            f"{where}: got a step of standard operators only, which cannot communicate; export it again without "
            "standard_ops_only to train it on several processes"
        )
    graph = model.graph
    _join_group(graph, group, size)
    _refuse_local_state(graph, description, where)
    _own_seed(graph, rank)
    weight = graph.initializers.pop(LOSS_WEIGHT, None)
    if weight is None:
        raise MalformedModelError(f"{where}: holds no constant {LOSS_WEIGHT!r}; export the step again")
    graph.inputs.append(weight)
    grads = _grads(graph, description, where)
    updated = _updated(description)
    kept = [value for value in graph.outputs if value.name not in updated]
    graph.outputs[:] = [*kept, *(grad for grad in grads if not grad.is_graph_output())]
    _drop_unused(model)


def keep_update(model: ir.Model, description: Description, where: str) -> None:
    """Reduce the graph to new parameters and optimizer state, as functions of the old ones, the gradients and lr; in
    place.

    Raises MalformedModelError for a step that cannot be cut.
    """
    graph = model.graph
    for grad in _grads(graph, description, where):
        given = ir.Value(name=grad.name, type=grad.type, shape=grad.shape)
        grad.name = f"{grad.name}.inner"
        grad.replace_all_uses_with(given)
        graph.inputs.append(given)
    updated = _updated(description)
    graph.outputs[:] = [value for value in graph.outputs if value.name in updated]
    _drop_unused(model)
    known = {*description.state, *(name + GRADIENT_SUFFIX for name in description.gradients), LEARNING_RATE}
    foreign = [str(value.name) for value in graph.inputs if value.name not in known]
    if foreign:
        raise MalformedModelError(
            f"{where}: the update reads {', '.join(foreign)} beside the gradients, so that it cannot run after their "
            "sum; export the step again"
        )


def _updated(description: Description) -> set[str]:
    return {name + NEW_SUFFIX for name, kind in description.state.items() if kind in _UPDATED}


def _grads(graph: ir.Graph, description: Description, where: str) -> list[ir.Value]:
    wanted = {name + GRADIENT_SUFFIX: None for name in description.gradients}
    found = {str(output.name): output for node in graph for output in node.outputs if output.name in wanted}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise MalformedModelError(f"{where}: holds no value {missing[0]!r}; export the step again")
    return [found[name] for name in wanted]


def _join_group(graph: ir.Graph, group: str, size: int) -> None:
    """Assign nodes of one process and of the default group to `group`; their gradients are summed with all others."""
    for node in graph.all_nodes():
        if node.domain == schema.DOMAIN and node.op_type in _OUR_NAMES:
            if node.attributes["group"].as_string() not in {"", schema.WORLD_GROUP}:
                continue
            node.attributes["group"] = ir.AttrString("group", group)
            node.attributes["group_size"] = ir.AttrInt64("group_size", size)
            if "grad_reduction" in node.attributes:
                node.attributes["grad_reduction"] = ir.AttrString("grad_reduction", "local")


def _refuse_local_state(graph: ir.Graph, description: Description, where: str) -> None:
    """Refuse a buffer that follows the rows of one process: it would differ between processes, unlike a group's
    statistics.
    """
    batch = set(description.inputs)
    for output in graph.outputs:
        name = str(output.name).removesuffix(NEW_SUFFIX)
        if description.state.get(name) is None or description.state[name] in _UPDATED:
            continue
        if any(value.name in batch for value in _sources(output)):
            raise UnsupportedModelError(
                f"{where}: buffer {name!r}: its update depends on the rows of a process, so that the processes would "
                "drift apart; train on one process, or make it a statistic of a batch norm"
            )


def _sources(value: ir.Value) -> Iterator[ir.Value]:
    """Return the graph inputs that `value` depends on other than through statistics of a group."""
    seen, waiting = set(), [value]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        producer = value.producer()
        if producer is None:
            yield value
        elif not (producer.op_type == schema.SYNC_BATCH_NORM.name and value.index() != 0):
            waiting += _read(producer)


def _read(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node and the values that its subgraphs capture."""
    return [value for each in (node, *walk.inner_nodes(node)) for value in each.inputs if value is not None]


def _own_seed(graph: ir.Graph, rank: int) -> None:
    """Derive the masks of a rank from seed ^ (rank << 40); the seed that counts the steps stays common."""
    seed = next((value for value in graph.inputs if value.name == SEED), None)
    if seed is None or rank == 0:
        return
    uses = list(seed.uses())
    name = f"{SEED}.rank"
    offset = ir.val(name, const_value=ir.tensor(np.array(rank << _RANK_SHIFT, np.int64), name=name))
    graph.register_initializer(offset)
    own = ir.node("BitwiseXor", [seed, offset], name=f"{SEED}.own")
    own.outputs[0].name = f"{SEED}.own"
    for node, index in uses:
        if not any(output.name == SEED + NEW_SUFFIX for output in node.outputs):
            node.replace_input_with(index, own.outputs[0])
    graph.insert_before(graph[0], own)


def _merge_copy(value: ir.Value) -> None:
    """Merge two parameters with one gradient: one of them is a copy, needed only by an output."""
    producer = value.producer()
    if producer is not None and producer.op_type == "Identity" and producer.inputs[0] is not None:
        value.replace_all_uses_with(producer.inputs[0])
        assert producer.graph is not None
        producer.graph.remove(producer, safe=True)


def _drop_unused(model: ir.Model) -> None:
    passes.RemoveUnusedNodesPass()(model)
    inputs: Iterable[ir.Value] = list(model.graph.inputs)
    dropped = {id(value) for value in inputs if not value.uses() and not value.is_graph_output()}
    model.graph.inputs[:] = [value for value in model.graph.inputs if id(value) not in dropped]


# Conversion of the evaluation graph and a state to an inference model: weights inside, folded, verified.


def export_inference(
    evaluation: str,
    description: Description,
    state: Mapping[str, np.ndarray[Any, Any]],
    path: str | os.PathLike[str],
    *,
    verify: bool,
    overwrite: bool,
) -> FoldResult:
    """Write the model's forward in eval mode with `state` as its weights, without the loss and the target."""
    model = model_io.load(evaluation)
    graph = model.graph
    for value in list(graph.inputs):
        array = state.get(str(value.name))
        if array is not None:
            graph.inputs.remove(value)
            value.const_value = ir.tensor(array, name=value.name)
            graph.register_initializer(value)
    _count_rows_of_inputs(graph, description)
    keep_outputs(model, description.evaluation_outputs)
    optimizer.fold_constants(model)
    return folding.fold(model, path, verify=verify, overwrite=overwrite)


def _count_rows_of_inputs(graph: ir.Graph, description: Description) -> None:
    """Read the batch size from an input: the exporter may read it from the target, which inference lacks."""
    *names, target = description.inputs
    inputs = {str(value.name): value for value in graph.inputs}
    if target not in inputs or not inputs[target].shape:
        return
    rows = _rows(inputs[target])
    for name in names:
        if name in inputs and rows is not None and _rows(inputs[name]) == rows:
            for node, index in list(inputs[target].uses()):
                if node.op_type == "Shape" and _reads_rows_only(node):
                    node.replace_input_with(index, inputs[name])
            return


def _rows(value: ir.Value) -> object:
    """Return dimension 0: a number, or a name that is the same if the sizes are."""
    if not value.shape:
        return None
    size = value.shape[0]
    return size if isinstance(size, int) else size.value


def _reads_rows_only(node: ir.Node) -> bool:
    start, end = node.attributes.get("start"), node.attributes.get("end")
    return (start is None or start.as_int() == 0) and end is not None and end.as_int() == 1
