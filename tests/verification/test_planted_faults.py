"""A fault of the one evaluator of nodes misleads the folder and the proof alike; ONNX Runtime refutes it by default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest

from bnexport import verify
from bnexport.errors import VerificationError
from bnexport.folding import fold
from bnexport.graph.evaluate import NodeEvaluator
from tests.support.claims import prove_claims
from tests.support.onnx_text import model

# How the weight of the convolution in front of a batch norm is computed.
WEIGHTS = {
    "Transpose": "w = Transpose <perm = [0, 1, 3, 2]> (v:4.4.3.3)",
    "Reshape": "w = Reshape (v:4.4.3.3, s)",
    "Mul": "w = Mul (v:4.4.3.3, v)",
    "Sub": "w = Sub (v:4.4.3.3, u:4.4.3.3)",
    "ReduceMax": "m = ReduceMax <axes = [1]> (v:4.4.3.3) w = Add (v, m)",
    "Concat": "w = Concat <axis = 1> (h:4.2.3.3, h)",
    "Slice": "w = Slice (d:8.4.3.3, starts, ends, axes)",
    "Cast": "f = Cast <to = 10> (v:4.4.3.3) w = Cast <to = 1> (f)",
}
INTEGERS = {"s": [4, 4, 3, 3], "starts": [2], "ends": [6], "axes": [0]}


def planted(monkeypatch: pytest.MonkeyPatch, operator: str, fault: Callable[[np.ndarray], np.ndarray]) -> list[str]:
    """Change the floats that the evaluator gives for one operator; return a list of its evaluations to come."""
    right, seen = NodeEvaluator.__call__, list[str]()

    def wrong(self: NodeEvaluator, inputs: Sequence[Any]) -> list[Any]:
        results = right(self, inputs)
        if self._node.op_type != operator:
            return results
        seen.append(operator)
        return [fault(each) if each is not None and each.dtype.kind == "f" else each for each in results]

    monkeypatch.setattr(NodeEvaluator, "__call__", wrong)
    return seen


def source(operator: str) -> onnx.ModelProto:
    text = f"{WEIGHTS[operator]} z = Conv (x, w) y = Norm (z, p:4)"
    values = {name: np.asarray(each) for name, each in INTEGERS.items() if f"{name})" in text or f"{name}," in text}
    return model(f"g (float[N,4,H,W] x) => (float[N,4,A,B] y) {{ {text} }}", values=values)


@pytest.mark.parametrize("operator", WEIGHTS)
def test_a_wrong_constant_does_not_pass(monkeypatch: pytest.MonkeyPatch, operator: str) -> None:
    """Folder and proof compute the same wrong weight: the proof alone passes, whole models do not agree."""
    proto = source(operator)
    assert fold(proto).report.verification.passed
    seen = planted(monkeypatch, operator, lambda values: values + 1)
    result = fold(proto, verify=False)
    assert seen
    assert result.report.changed
    assert prove_claims(proto, result.model, result.report).status == "passed"
    assert verify(proto, result.model).status == "failed"
    with pytest.raises(VerificationError):
        fold(proto)
