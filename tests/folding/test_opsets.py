"""Operators as they were in each opset. Where nothing runs an old one, its successor is the reference."""

from __future__ import annotations

import re

import onnx
import onnx.defs
import pytest

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.onnx_text import assert_near, exact, make_inputs, model, operators, run

NORM = {
    1: "y = Norm <is_test=1, consumed_inputs=[0,0,0,1,1], spatial=1> (z, p:8)",
    6: "y = Norm <is_test=1, momentum=0.8> (z, p:8)",
    7: "y = Norm <spatial=1> (z, p:8)",
    9: "y = Norm <epsilon=0.001> (z, p:8)",
    14: "y = Norm <training_mode=0> (z, p:8)",
}
CONV, X4 = "z = Conv (x, w:8.6.1.1)", "float[N,6,H,W] x) => (float[N,8,A,B] y)"
GEMM, ROWS = "z = Gemm <broadcast={}> (x, w:6.8, c:{})", "float[2,6] x) => (float[2,8] y)"
# Before opset 7 the constant is the second operand and says from which axis on it broadcasts.
SUMS = {
    "axis": "t = Mul <broadcast=1, axis=1> (z, k:8) y = Add <broadcast=1, axis=1> (t, l:8)",
    "axis-and-ones": "t = Mul <broadcast=1, axis=1> (z, k:8.1) y = Sub <broadcast=1, axis=1> (t, l:8.1)",
    "from-the-right": "t = Div <broadcast=1> (z, k:8.1.1) y = Add <broadcast=1> (t, l:8.1.1)",
    "with-a-batch-norm": "n = Norm <is_test=1> (z, p:8) t = Mul <broadcast=1, axis=1> (n, k:8) "
    "y = Add <broadcast=1, axis=1> (t, l:8)",
}
CASES = {
    **{f"batch-norm-{opset}": (opset, X4, f"{CONV} {NORM[max(version for version in NORM if version <= opset)]}")
        for opset in (*range(1, 24), onnx.defs.onnx_opset_version())},
    **{name: (6, X4, f"{CONV} {nodes}") for name, nodes in SUMS.items()},
    "gemm-that-broadcasts": (6, ROWS, f"{GEMM.format(1, '8')} {NORM[6]}"),
    "gemm-that-does-not": (6, ROWS, f"{GEMM.format(0, '2.8')} {NORM[6]}"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_todays_operators(name: str) -> None:
    opset, signature, nodes = CASES[name]
    result = fold(model(f"g ({signature} {{ {nodes} }}", opset=opset), verify=False)
    folded = to_proto(result.model)
    assert (operators(folded), folded.opset_import[0].version) == ([nodes[4:8]], opset)
    today = re.sub(r"<[^>]*(broadcast|is_test|spatial)[^>]*>", "", re.sub(r"\b([kl]):8[.1]*", r"\1:8.1.1", nodes))
    newer = model(f"g ({signature} {{ {today} }}")
    folded.opset_import[0].version = 17
    for attribute in [each for each in folded.graph.node[0].attribute if each.name == "broadcast"]:
        folded.graph.node[0].attribute.remove(attribute)
    inputs = make_inputs(newer)
    assert_near(run(folded, inputs)[0], exact(newer, inputs)[0])


def test_the_other_name_of_the_standard_domain() -> None:
    proto = model(f"g ({X4} {{ {CONV} {NORM[14]} }}")
    proto.opset_import[0].domain = proto.graph.node[0].domain = proto.graph.node[1].domain = "ai.onnx"
    assert operators(to_proto(fold(proto, verify=False).model)) == ["Conv"]
