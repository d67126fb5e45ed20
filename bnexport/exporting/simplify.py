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

# Those of this list that the installed onnxscript has.
_RULES = (
    *("no_op_cast_rule", "no_op_expand_rule", "no_op_transpose_rule", "transpose_transpose_rule", "cast_cast_rule"),
    *("add_0_rule", "sub_0_rule", "mul_by_1_rule", "div_by_1_rule", "dropout_inference_rule", "dropout_zero_rule"),
    *("materialize_reshape_shape_rule", "reshape_reshape_rule", "squeeze_reshape_1d_rule", "unsqueeze_unsqueeze_rule"),
    *("collapse_slice_rule", "collapse_slice2_rule", "slice_split_rule", "cast_constant_of_shape_rule"),
    *("no_op_static_scatter_nd_rule", "no_op_dynamic_scatter_nd_rule"),
)
# A round may show the next one something: an identity between two transposes, for example.
_ROUNDS = 4


def simplify(model: ir.Model) -> None:
    """Simplify an inference model in place, until a round removes no node; names of inputs and outputs stay."""
    rules = [getattr(common, name) for name in _RULES if hasattr(common, name)]
    nodes = None
    for _ in range(_ROUNDS):
        optimizer.fold_constants(model, onnx_shape_inference=True)
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        rewriter.RewritePass(rules)(model)
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        passes.IdentityEliminationPass()(model)
        passes.CommonSubexpressionEliminationPass()(model)
        passes.RemoveUnusedNodesPass()(model)
        if len(model.graph) == nodes:
            break
        nodes = len(model.graph)
    passes.DeduplicateInitializersPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    passes.TopologicalSortPass()(model)
    # Rewriting notes its rules in the metadata.
    passes.ClearMetadataAndDocStringPass()(model)
