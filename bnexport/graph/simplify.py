"""Removal of nodes that deployment does not need, by passes of onnx-ir and onnxscript, and of identities."""

from __future__ import annotations

import contextlib

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer, rewriter
from onnxscript.rewriter.rules import common

from bnexport.graph.constants import WEIGHT_OPERATORS, Constants
from bnexport.graph.nodes import Names, Refused, is_standard
from bnexport.graph.shapes import Shapes
from bnexport.model_io import walk

# Removal of Identity nodes, and what keeps passes of other packages from breaking the outputs of bodies.
#
#     y = Identity(x)    readers of y read x. Where y is an output of its graph, x takes its place and its name,
#                        if a node of the same graph makes x and x is no output itself; else the node stays
#
# ONNX Runtime loads no body that returns a value of an outer graph, and onnx-ir lets no value be an output of two
# graphs. The passes of onnx-ir and onnxscript do not look: what replaces an output may be such a value. So during
# their work each output of a body or function is made by a node of its own, which they do not know.

_GUARD = "bnexport.guard"


def remove_identities(model: ir.Model) -> None:
    """Remove Identity nodes in place; names of outputs stay."""
    for graph in list(walk.graphs(model)):
        for node in [node for node in graph if is_standard(node, "Identity")]:
            _remove(node, graph)


def _remove(node: ir.Node, graph: ir.Graph) -> None:
    if len(node.inputs) != 1 or len(node.outputs) != 1 or node.inputs[0] is None:
        return
    source, output = node.inputs[0], node.outputs[0]
    is_output, maker = output.is_graph_output(), source.producer()
    if is_output and (maker is None or maker.graph is not graph or source.is_graph_output()):
        return
    source.type, source.shape = source.type or output.type, source.shape or output.shape
    output.replace_all_uses_with(source, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    if is_output:
        source.name, output.name = output.name, None


def guard_outputs(model: ir.Model) -> None:
    """Make each output of a body or function by a node of no known operator, in place."""
    names = Names(model)
    for graph in list(walk.graphs(model)):
        for place, output in enumerate(() if graph is model.graph else tuple(graph.outputs)):
            # The number keeps two guards from being one repeated expression.
            guard = ir.node(_GUARD, [output], {"place": place}, domain=_GUARD)
            value = guard.outputs[0]
            value.type, value.shape, value.name = output.type, output.shape, names.fresh(f"{output.name}.returned")
            maker = output.producer()
            if maker is not None and maker.graph is graph:
                value.name, output.name = output.name, value.name
            graph.append(guard)
            graph.outputs[place] = value


def open_guards(model: ir.Model, *, inlined: bool = False) -> None:
    """Turn guards into Identity nodes. inlined: only those whose body has become a part of the graph around it."""
    for node in walk.nodes(model):
        if node.domain == _GUARD and not (
            inlined and node.outputs[0].is_graph_output() and node.graph is not model.graph
        ):
            node.domain, node.op_type = "", "Identity"
            node.attributes.clear()


# Remove nodes that deployment does not need, by the passes of onnx-ir and onnxscript.
#
# Constants and shape arithmetic are evaluated, reshapes to known sizes get them as a constant, and identities, dead code and
# repeated expressions leave. It runs behind the folder and before verification. Rules that fold batch norms are left out: the
# folder refuses some of those on purpose, and its report would be wrong.

# Those of this list that the installed onnxscript has.
_RULES = (
    *("no_op_cast_rule", "no_op_expand_rule", "no_op_transpose_rule", "transpose_transpose_rule", "cast_cast_rule"),
    *("add_0_rule", "sub_0_rule", "mul_by_1_rule", "div_by_1_rule", "dropout_inference_rule", "dropout_zero_rule"),
    *("materialize_reshape_shape_rule", "reshape_reshape_rule", "squeeze_reshape_1d_rule", "unsqueeze_unsqueeze_rule"),
    *("collapse_slice_rule", "collapse_slice2_rule", "slice_split_rule", "cast_constant_of_shape_rule"),
    *("no_op_static_scatter_nd_rule", "no_op_dynamic_scatter_nd_rule"),
)
# Operators that draw random numbers and that the pass for repeated expressions does not know as such.
_RANDOM = {"Bernoulli", "Dropout"}
# Operators that the passes' evaluator, onnx.reference, computes wrongly before an opset, or in any.
_RIGHT_FROM = {"Softmax": 13, "LogSoftmax": 13, "Hardmax": 13, "BatchNormalization": 14, "GlobalMaxPool": 99}
# A round may show the next one something: an identity between two transposes, for example.
_ROUNDS = 4


def _evaluate_sums(model: ir.Model) -> None:
    """Replace sums and powers of constants by Constant nodes, rounded once as engines do: the passes add in float32."""
    names, constants = Names(model), Constants(model, Shapes(model))
    for node in list(walk.nodes(model)):
        if not is_standard(node, *WEIGHT_OPERATORS) or node.outputs[0].is_graph_output():
            continue
        with contextlib.suppress(Refused):
            tensor = ir.Tensor(constants.array(node.outputs[0], "constant"))
            name = names.fresh(f"{node.outputs[0].name}.evaluated")
            constant = ir.node("Constant", [], {"value": tensor}, outputs=[ir.Value(name=name)])
            assert node.graph is not None
            node.graph.insert_before(node, constant)
            node.outputs[0].replace_all_uses_with(constant.outputs[0])


def simplify(model: ir.Model) -> None:
    """Simplify an inference model in place, until a round removes no node; names of inputs and outputs stay."""
    _evaluate_sums(model)
    rules = [getattr(common, name) for name in _RULES if hasattr(common, name)]
    names = [output.name for output in model.graph.outputs]
    nodes = None
    opset = model.opset_imports.get("", 0)

    def choose(node: ir.Node) -> bool | None:
        """Leave out what would be evaluated wrongly; None for the passes' own choice."""
        return False if opset < _RIGHT_FROM.get(node.op_type, 0) else None

    guard_outputs(model)
    for _ in range(_ROUNDS):
        optimizer.fold_constants(model, onnx_shape_inference=True, should_fold=choose)
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        rewriter.RewritePass(rules)(model)
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        open_guards(model, inlined=True)
        remove_identities(model)
        if not any(node.op_type in _RANDOM for node in model.graph.all_nodes()):
            passes.CommonSubexpressionEliminationPass()(model)
        passes.RemoveUnusedNodesPass()(model)
        if len(model.graph) == nodes:
            break
        nodes = len(model.graph)
    open_guards(model)
    remove_identities(model)
    _restore_outputs(model.graph, names)
    passes.DeduplicateInitializersPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    passes.TopologicalSortPass()(model)
    # Rewriting notes its rules in the metadata.
    passes.ClearMetadataAndDocStringPass()(model)


def _restore_outputs(graph: ir.Graph, names: list[str | None]) -> None:
    """Give each output its name back: passes leave one value, with one name, for outputs that are equal."""
    seen: set[ir.Value] = set()
    for index, (output, name) in enumerate(zip(list(graph.outputs), names, strict=True)):
        if output in seen or (output.is_graph_input() and output.name != name):
            copy = ir.node("Identity", [output], outputs=[ir.Value(name=name, type=output.type, shape=output.shape)])
            graph.append(copy)
            graph.outputs[index] = copy.outputs[0]
        elif output.name != name:
            output.name = name
        seen.add(output)
