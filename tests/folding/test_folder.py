"""The folder as a pass, and a search that leaves no trace of what it gave up."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import IdentityEliminationPass, RemoveUnusedNodesPass

from bnexport.errors import UsageError
from bnexport.folding import BatchNormFolder, fold
from bnexport.folding.folder import FolderResult
from bnexport.model_io import as_model, to_proto
from tests.support.onnx_text import batch_norm, batch_norms, model, operators

NET = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {
    i = Identity (x)
    z = Conv (i, w)
    t = BatchNormalization (z, p_s, p_b, p_m, p_v)
    y = Relu (t) }"""
SHAPES = {"w": (8, 6, 3, 3), **batch_norm("p", 8)}
# y = x - mean + bias, exactly: a map that only shifts, and may go into either operand of the sum.
SHIFT = {"p_s": np.ones(4, np.float32), "p_v": np.ones(4, np.float32)}


def test_as_one_of_several_passes() -> None:
    mine = as_model(model(NET, SHAPES))
    result = ir.passes.Sequential(IdentityEliminationPass(), BatchNormFolder(), RemoveUnusedNodesPass())(mine)
    assert result.modified
    assert result.model is mine
    assert [node.op_type for node in mine.graph] == ["Conv", "Relu"]


def test_result_is_that_of_fold() -> None:
    proto = model(NET, SHAPES)
    result = BatchNormFolder()(as_model(proto))
    assert isinstance(result, FolderResult)
    expected = fold(proto, verify=False, certificate=False)
    assert to_proto(result.model) == to_proto(as_model(expected.model))
    assert result.report.sites == expected.report.sites
    assert result.report.after.batch_norm == 0


def test_nothing_to_fold_is_no_modification() -> None:
    result = BatchNormFolder()(as_model(model("g (float[N] x) => (float[N] y) { y = Relu (x) }")))
    assert not result.modified


def test_one_folder_for_many_models() -> None:
    folder = BatchNormFolder(skip=["none"])
    with pytest.raises(UsageError, match="skip: got 'none'"):
        folder(as_model(model(NET, SHAPES)))
    folder = BatchNormFolder()
    for _ in range(2):
        proto = to_proto(folder(as_model(model(NET, SHAPES))).model)
        assert batch_norms(proto) == 0


def test_a_branch_that_was_given_up_leaves_no_rule_in_the_report() -> None:
    # The first operand leads through Transpose to an input, where nothing takes the shift; the second to a Conv.
    body = """g (float[4,N,5,5] x, float[N,3,5,5] u) => (float[N,4,5,5] y) {
        a = Transpose <perm = [1, 0, 2, 3]> (x)
        b = Conv (u, w)
        s = Add (a, b)
        y = BatchNormalization <epsilon = 0.0> (s, p_s, p_b, p_m, p_v) }"""
    proto = model(body, {"w": (4, 3, 1, 1), **batch_norm("p", 4)}, values=None)
    for tensor in proto.graph.initializer:
        if tensor.name in SHIFT:
            tensor.raw_data = SHIFT[tensor.name].tobytes()
    result = fold(proto)
    assert operators(to_proto(result.model)) == ["Transpose", "Conv", "Add"]
    (site,) = result.report.folded
    assert site.rules == ("elementwise", "conv")
    assert result.report.verification is not None
    assert result.report.verification.passed


def test_branches_that_were_given_up_cost_no_depth() -> None:
    # Sums in a row; the first operand of each is a branch of one step that leads nowhere. A path may have 64 steps.
    def outcome(count: int) -> str:
        sums = "\n".join(f"s{i + 1} = Add (t{i}, s{i})" for i in range(count))
        dead = "\n".join(f"t{i} = Transpose <perm = [0, 1, 2, 3]> (x)" for i in range(count))
        body = f"""g (float[N,4,5,5] x, float[N,3,5,5] u) => (float[N,4,5,5] y) {{
            {dead}
            s0 = Conv (u, w)
            {sums}
            y = BatchNormalization <epsilon = 0.0> (s{count}, p_s, p_b, p_m, p_v) }}"""
        proto = model(body, {"w": (4, 3, 1, 1), **batch_norm("p", 4)})
        for tensor in proto.graph.initializer:
            if tensor.name in SHIFT:
                tensor.raw_data = SHIFT[tensor.name].tobytes()
        return fold(proto, verify=False).report.sites[0].outcome

    assert outcome(60) == "folded"
    assert outcome(80) == "kept"
