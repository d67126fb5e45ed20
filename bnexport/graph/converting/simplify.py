"""Remove nodes that deployment does not need, by the passes of onnx-ir and onnxscript.

Constants and shape arithmetic are evaluated, reshapes to known sizes get them as a constant, and identities, dead code and
repeated expressions leave. It runs behind the folder and before verification. Rules that fold batch norms are left out: the
folder refuses some of those on purpose, and its report would be wrong.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer, rewriter
from onnxscript.rewriter.rules import common

from bnexport.graph.converting.identities import guard_outputs, open_guards, remove_identities

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
# A round may show the next one something: an identity between two transposes, for example.
_ROUNDS = 4


def simplify(model: ir.Model) -> None:
    """Simplify an inference model in place, until a round removes no node; names of inputs and outputs stay."""
    rules = [getattr(common, name) for name in _RULES if hasattr(common, name)]
    names = [output.name for output in model.graph.outputs]
    nodes = None
    guard_outputs(model)
    for _ in range(_ROUNDS):
        optimizer.fold_constants(model, onnx_shape_inference=True)
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
