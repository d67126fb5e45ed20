"""The folder as a pass, and a search that leaves no trace of what it gave up."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import IdentityEliminationPass, RemoveUnusedNodesPass

from bnexport.errors import UsageError
from bnexport.folding import BatchNormFolder, FoldResult, fold
from bnexport.folding.folder import FolderResult
from bnexport.model_io import as_model, to_proto
from tests.support.onnx_text import model, operators_of

NET = model(
    "g (float[N,6,H,W] x) => (float[N,8,A,B] y) { i = Identity (x) z = Conv (i, w:8.6.3.3) t = Norm (z, p:8) y = Relu (t) }"
)


def test_as_one_of_several_passes() -> None:
    mine = as_model(NET)
    result = ir.passes.Sequential(IdentityEliminationPass(), BatchNormFolder(), RemoveUnusedNodesPass())(mine)
    assert result.modified and result.model is mine
    assert [node.op_type for node in mine.graph] == ["Conv", "Relu"]
    assert not BatchNormFolder()(as_model(model("g (float[N] x) => (float[N] y) { y = Relu (x) }"))).modified


def test_one_folder_for_many_models_does_what_fold_does() -> None:
    with pytest.raises(UsageError, match="skip: got 'none'"):
        BatchNormFolder(skip=["none"])(as_model(NET))
    folder, expected = BatchNormFolder(), fold(NET, verify=False, certificate=False)
    for _ in range(2):
        result = folder(as_model(NET))
        assert isinstance(result, FolderResult)
        assert to_proto(result.model) == to_proto(as_model(expected.model))
        assert (result.report.sites, result.report.after.batch_norm) == (expected.report.sites, 0)


def shifted(nodes: str, last: str, inputs: str) -> FoldResult:
    """A batch norm that only shifts, exactly: it may go into either operand of a sum."""
    values = {"p_s": np.ones(4, np.float32), "p_v": np.ones(4, np.float32)}
    nodes = f"{nodes} y = Norm <epsilon = 0.0> ({last}, p:4)"
    return fold(model(f"g ({inputs}, float[N,3,5,5] u) => (float[N,4,5,5] y) {{ {nodes} }}", values=values))


def test_a_branch_that_was_given_up_leaves_no_rule_in_the_report() -> None:
    """The first operand leads through Transpose to an input, where nothing takes the shift; the second to a Conv."""
    nodes = "a = Transpose <perm = [1, 0, 2, 3]> (x) b = Conv (u, w:4.3.1.1) s = Add (a, b)"
    result = shifted(nodes, "s", "float[4,N,5,5] x")
    assert operators_of(result) == ["Transpose", "Conv", "Add"]
    (site,) = result.report.folded
    assert (site.rules, result.report.verification.passed) == (("elementwise", "conv"), True)


@pytest.mark.parametrize(("count", "outcome"), [(60, "folded"), (80, "kept")])
def test_branches_that_were_given_up_cost_no_depth(count: int, outcome: str) -> None:
    """Sums in a row; the first operand of each is a branch of one step that leads nowhere. A path may have 64 steps."""
    dead = " ".join(f"t{i} = Transpose <perm = [0, 1, 2, 3]> (x)" for i in range(count))
    sums = " ".join(f"s{i + 1} = Add (t{i}, s{i})" for i in range(count))
    result = shifted(f"{dead} s0 = Conv (u, w:4.3.1.1) {sums}", f"s{count}", "float[N,4,5,5] x")
    assert result.report.sites[0].outcome == outcome
