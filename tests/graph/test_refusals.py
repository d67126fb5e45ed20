"""What the evaluator, the reference and the conversion to inference answer for, next to what they do not, by `refusals.txt`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from bnexport.graph import evaluate
from bnexport.graph.conversion import convert
from bnexport.graph.onnx_reference import MendedEvaluator
from bnexport.model_io import from_proto
from tests.support.onnx_text import array, model


def evaluator(node: str, operands: str) -> str:
    values = [None if text == "none" else array(text) for text in operands.split("; ")]
    try:
        (result,) = evaluate.rounded(ir.from_proto(onnx.parser.parse_node(node)), values, 23)
    except evaluate.NotEvaluated as error:
        return error.code
    return str(result.ravel().tolist())


def example(nodes: str, opset: str) -> onnx.ModelProto:
    header = f'<ir_version: 8, opset_import: ["": {opset}, "mmcv": 1]>'
    return model(f"g (float[3,4,5] x, float[A,B] m) => (float[C,D,E] y) {{ {nodes} }}", header=header)


def reference(nodes: str, opset: str) -> str:
    try:
        MendedEvaluator(example(nodes, opset)).run(None, {"x": np.ones((3, 4, 5)), "m": np.ones((3, 4))})
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return "done"


def conversion(nodes: str, opset: str) -> str:
    proto = example(nodes, opset)
    if "n = " in nodes:
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info("n", onnx.TensorProto.UNDEFINED, [4]))
    (found,) = convert(from_proto(proto), trained=True)
    return found.reason.code if found.reason else "done"


@pytest.mark.parametrize("row", (Path(__file__).parent / "refusals.txt").read_text().splitlines()[1:])
def test_refused_or_answered(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    who, expected, nodes, given, *bounds = row.split(" | ")
    for name, value in (bound.split("=") for bound in bounds):
        monkeypatch.setattr(evaluate, name, int(value))
    answer = {"evaluator": evaluator, "reference": reference, "conversion": conversion}[who](nodes, given)
    assert expected in answer if who == "reference" else expected == answer
