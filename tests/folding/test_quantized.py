"""Quantised weights: stored or computed integers stay, or change their sign; the scale takes the map, Q and DQ stay."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from bnexport.folding import fold
from tests.folding.corpus.case import Case
from tests.folding.corpus.quantized import CASES, values
from tests.support.onnx_text import batch_norms, model, operators, operators_of, run

COMPUTED = {
    name: case for name, case in CASES.items() if case.left.startswith("QuantizeLinear") and "v" not in case.values
}


def integers(proto: onnx.ModelProto) -> np.ndarray:
    """What the QuantizeLinear of a model gives in an engine, or what is stored."""
    tensors = {each.name: each for each in proto.graph.initializer}
    if proto.graph.node[0].op_type != "QuantizeLinear":
        return onnx.numpy_helper.to_array(tensors[proto.graph.node[0].input[0]]).astype(int)
    node = proto.graph.node[0]
    output = onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.INT8, tensors[node.input[0]].dims)
    kept = [tensors[name] for name in node.input]
    graph = onnx.helper.make_graph([node], "integers", [], [output], kept)
    return run(onnx.helper.make_model(graph, opset_imports=proto.opset_import, ir_version=10), {})[0].astype(int)


def check(case: Case, seed: int = 0) -> onnx.ModelProto:
    source = case.model(seed)
    result = fold(source)
    verdict = result.report.verification
    assert verdict.passed and {proof.method for proof in verdict.sites} == {"proved"}, (case, verdict)
    before, after = integers(source), integers(result.model)
    assert np.array_equal(np.abs(before), np.abs(after))
    assert np.array_equal(before, after) == (case.values["p_s"] > 0).all()
    return result.model


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.left])
def test_integers_stay_or_change_their_sign(name: str) -> None:
    folded = check(CASES[name])
    if name == "scale-of-two":
        assert {tensor.name: list(tensor.dims) for tensor in folded.graph.initializer}["s"] == []


def check_random(seeds: range) -> None:
    for seed in seeds:
        case = list(COMPUTED.values())[seed % len(COMPUTED)]
        weight, scales = case.values["w"].shape, case.values["s"].size if np.ndim(case.values["s"]) else None
        check(dataclasses.replace(case, values=values(weight, scales, sign=bool(seed % 3), seed=seed)))


def test_random_weights() -> None:
    check_random(range(16))


@pytest.mark.slow
def test_300_random_weights() -> None:
    check_random(range(1000, 1300))


def check_file(source: onnx.ModelProto) -> None:
    assert batch_norms(source) == 2, operators(source)
    result = fold(source)
    assert batch_norms(result.model) == 0, [site.reason for site in result.report.sites]
    assert operators_of(result).count("QuantizeLinear") == operators(source).count("QuantizeLinear")
    assert result.report.verification.passed


@pytest.mark.slow
def test_a_file_of_the_quantizer_of_onnxruntime(tmp_path: Path) -> None:
    """Weights as integers, and as floats with a QuantizeLinear."""
    from onnxruntime import quantization

    body = "z = Conv (x, w:8.3.3.3, b:8) n = Norm (z, p:8) a = Relu (n) c = Conv (a, v:6.8.3.3) y = Norm (c, r:6)"
    onnx.save(model(f"g (float[2,3,16,16] x) => (float[2,6,12,12] y) {{ {body} }}"), tmp_path / "in.onnx")
    generator = np.random.default_rng(0)
    for pair in (False, True):
        rows = iter([{"x": generator.standard_normal((2, 3, 16, 16)).astype(np.float32)} for _ in range(4)])
        reader = type(
            "Reader", (quantization.CalibrationDataReader,), {"get_next": lambda _, rows=rows: next(rows, None)}
        )
        options = {"AddQDQPairToWeight": pair, "OpTypesToExcludeOutputQuantization": ["Conv"]}
        quantization.quantize_static(
            tmp_path / "in.onnx", tmp_path / f"q{pair}.onnx", reader(), per_channel=True,
            op_types_to_quantize=["Conv"], weight_type=quantization.QuantType.QInt8, extra_options=options,
        )  # fmt: skip
        check_file(onnx.load(tmp_path / f"q{pair}.onnx"))
