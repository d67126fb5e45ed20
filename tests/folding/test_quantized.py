"""Weights of files from training aware of quantisation: floats, QuantizeLinear, DequantizeLinear, and the operator.

The stored or computed integers stay, or change their sign; the scale takes the map, and Q and DQ stay where they are.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.claims import prove_claims
from tests.support.onnx_text import batch_norm, batch_norms, fold_and_check, model, operators, run

P = batch_norm("p", 8)
NORM = "y = BatchNormalization (z, p_s, p_b, p_m, p_v)"
Q = "q = QuantizeLinear {0} (w, s, o)\n d = DequantizeLinear {0} (q, s, o)"


def values(
    weight: tuple[int, ...], count: int | None = None, *, sign: bool = False, seed: int = 0
) -> dict[str, np.ndarray]:
    """Parameters of a batch norm, and of a weight whose integers are within -127 and 127. count: of scales; None for one."""
    generator = np.random.default_rng(seed)
    made = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in P.items()}
    made["p_v"] = np.abs(made["p_v"]) + np.float32(0.5)
    made["p_s"] = made["p_s"] + np.sign(made["p_s"]) * np.float32(0.2)
    if not sign:
        made["p_s"] = np.abs(made["p_s"])
    made["s"] = np.asarray(0.01 + generator.random(count) / 50, np.float32) if count else np.float32(0.02)
    made["o"] = np.zeros(np.shape(made["s"]), np.int8)
    made["w"] = np.clip(generator.standard_normal(weight), -1.2, 1.2).astype(np.float32)
    return made


def graph(body: str, inputs: str = "float[N,6,H,W] x", output: str = "float[N,8,A,B] y", scales: str = "") -> str:
    return f"g ({inputs}) => ({output}) {{ {Q.format(scales)}\n {body}\n {NORM} }}"


CASES = {
    "conv": (graph("z = Conv (x, d)"), values((8, 6, 3, 3))),
    "conv-negative": (graph("z = Conv (x, d)"), values((8, 6, 3, 3), sign=True)),
    "conv-channels": (graph("z = Conv <pads = [1,1,1,1]> (x, d)", scales="<axis = 0>"), values((8, 6, 3, 3), 8)),
    "conv-channels-negative": (graph("z = Conv (x, d)", scales="<axis = -4>"), values((8, 6, 3, 3), 8, sign=True)),
    "depthwise": (graph("z = Conv <group = 8> (x, d)", "float[N,8,H,W] x", scales="<axis = 0>"),
        values((8, 1, 3, 3), 8, sign=True)),
    "transposed": (graph("z = ConvTranspose (x, d)", scales="<axis = 1>"), values((6, 8, 2, 2), 8, sign=True)),
    "gemm": (graph("z = Gemm <transB = 1> (x, d)", "float[N,6] x", "float[N,8] y", "<axis = 0>"),
        values((8, 6), 8, sign=True)),
    "matmul": (graph("m = MatMul (x, d)\n z = Transpose <perm = [0,2,1]> (m)", "float[N,L,6] x", "float[N,8,L] y"),
        values((6, 8), sign=True)),
}  # fmt: skip
BELOW = {
    "below": (f"g (float[N,8,H,W] x) => (float[N,4,A,B] y) {{ {Q.format('<axis = 0>')}\n"
        " r = BatchNormalization (x, p_s, p_b, p_m, p_v)\n y = Conv (r, d) }", values((4, 8, 1, 1), 4), "quantized"),
    "zero-point": (CASES["conv"][0], CASES["conv"][1] | {"o": np.int8(3)}, "quantized"),
    "unsigned-negative": (CASES["conv"][0], CASES["conv-negative"][1] | {"o": np.uint8(0)}, "quantized"),
    "no-counterpart": (CASES["conv"][0], CASES["conv-negative"][1] | {"w": np.full((8, 6, 3, 3), -9.0, np.float32)},
        "quantized"),
    "zero-scale": (CASES["conv"][0], CASES["conv"][1] | {"p_s": np.zeros(8, np.float32)}, "quantized"),
    "shared": (graph("c = Conv (x, d)\n t = Sigmoid (c)\n z = Conv (x, d)").replace("A,B] y)",
        "A,B] y, float[N,8,A,B] t)"), CASES["conv"][1], "quantized"),
    "another-axis": (graph("z = Conv (x, d)", scales="<axis = 1>"), values((8, 6, 3, 3), 6), "quantized"),
}  # fmt: skip


def integers(proto: onnx.ModelProto) -> np.ndarray:
    """What the QuantizeLinear of a model gives in an engine."""
    changed = copy.deepcopy(proto)
    node = next(each for each in changed.graph.node if each.op_type == "QuantizeLinear")
    del changed.graph.output[:]
    changed.graph.output.append(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.INT8, None))
    shapes = onnx.shape_inference.infer_shapes(changed)
    weight = next(each for each in shapes.graph.initializer if each.name == node.input[0])
    changed.graph.output[0].type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto())
    for size in weight.dims:
        changed.graph.output[0].type.tensor_type.shape.dim.add().dim_value = size
    feed = {
        each.name: np.zeros([each_.dim_value or 7 for each_ in each.type.tensor_type.shape.dim], np.float32)
        for each in changed.graph.input
    }
    return run(changed, feed)[0]


@pytest.mark.parametrize("case", CASES)
def test_q_and_dq_stay(case: str) -> None:
    text, held = CASES[case]
    source = model(text, values=held, opset=21, ir_version=10)
    folded, result = fold_and_check(source, sizes={"H": 7, "W": 6, "L": 5})
    assert operators(folded) == [name for name in operators(source) if name != "BatchNormalization"] or case == "matmul"
    assert {proof.method for proof in result.report.verification.sites} == {"proved"}
    before, after = integers(source), integers(folded)
    assert np.array_equal(np.abs(before), np.abs(after))
    assert np.array_equal(before, after) == (held["p_s"] > 0).all()


@pytest.mark.parametrize("case", BELOW)
def test_right_or_refused_with_a_reason(case: str) -> None:
    text, held, code = BELOW[case]
    result = fold(model(text, values=held, opset=21, ir_version=10))
    assert batch_norms(to_proto(result.model)) == 1
    assert code in {refusal.code for refusal in result.report.kept[0].refusals}


def test_a_scale_shared_by_two_convolutions_is_copied() -> None:
    body = (
        "q = QuantizeLinear (w, s, o)\n d = DequantizeLinear (q, s, o)\n t = QuantizeLinear (v, s, o)\n"
        f" e = DequantizeLinear (t, s, o)\n c = Conv (x, e)\n z = Conv (c, d)\n {NORM}"
    )
    held = values((8, 6, 3, 3), sign=True) | {"v": np.random.default_rng(1).random((6, 6, 1, 1)).astype(np.float32)}
    folded, _ = fold_and_check(
        model(f"g (float[N,6,H,W] x) => (float[N,8,A,B] y) {{ {body} }}", values=held, opset=21, ir_version=10),
        sizes={"H": 7, "W": 7},
    )
    scales = {tensor.name: list(tensor.dims) for tensor in folded.graph.initializer}
    assert scales["s"] == []


def test_stored_integers_are_negated() -> None:
    held = {name: value for name, value in values((8, 6, 3, 3), sign=True).items() if name != "w"}
    held["q"] = np.random.default_rng(0).integers(-127, 128, (8, 6, 3, 3)).astype(np.int8)
    text = f"g (float[N,6,H,W] x) => (float[N,8,A,B] y) {{ d = DequantizeLinear (q, s, o)\n z = Conv (x, d)\n {NORM} }}"
    folded, result = fold_and_check(model(text, values=held, opset=21, ir_version=10), sizes={"H": 7, "W": 6})
    assert operators(folded) == ["DequantizeLinear", "Conv"]
    assert {proof.method for proof in result.report.verification.sites} == {"proved"}


def test_one_integer_more_is_a_difference() -> None:
    source = model(CASES["conv-negative"][0], values=CASES["conv-negative"][1])
    result = fold(source, verify=False)
    folded, report = to_proto(result.model), result.report
    assert prove_claims(source, folded, report).passed
    for tensor in folded.graph.initializer:
        if list(tensor.dims) in ([8, 6, 3, 3], [8]) and tensor.data_type == onnx.TensorProto.FLOAT:
            wrong, array = copy.deepcopy(folded), onnx.numpy_helper.to_array(tensor).copy()
            array.flat[3] += 0.05
            next(each for each in wrong.graph.initializer if each.name == tensor.name).CopyFrom(
                onnx.numpy_helper.from_array(array, tensor.name)
            )
            assert not prove_claims(source, wrong, report).passed, tensor.name


def check_random(seeds: range) -> None:
    names = list(CASES)
    for seed in seeds:
        text, held = CASES[names[seed % len(names)]]
        made = values(held["w"].shape, held["s"].size if np.ndim(held["s"]) else None, sign=bool(seed % 3), seed=seed)
        source = model(text, values=made, opset=21, ir_version=10)
        result = fold(source)
        verdict = result.report.verification
        assert verdict.passed and {proof.method for proof in verdict.sites} == {"proved"}, (seed, verdict)
        assert np.array_equal(np.abs(integers(source)), np.abs(integers(to_proto(result.model)))), seed


def test_random_weights() -> None:
    check_random(range(16))


@pytest.mark.slow
def test_300_random_weights() -> None:
    check_random(range(1000, 1300))


@pytest.mark.slow
def test_a_file_of_torch_ao(tmp_path: Path) -> None:
    """Modules that fake-quantise their weights in training, exported with their batch norms."""
    import torch
    from torch import nn
    from torch.ao.nn import qat
    from torch.ao.quantization import QConfig, default_fake_quant, default_per_channel_weight_fake_quant

    torch.manual_seed(0)
    config = QConfig(activation=default_fake_quant, weight=default_per_channel_weight_fake_quant)
    net = nn.Sequential(
        qat.Conv2d(3, 8, 3, padding=1, qconfig=config), nn.BatchNorm2d(8), nn.ReLU(),
        qat.Conv2d(8, 12, 3, qconfig=config), nn.BatchNorm2d(12),
    )  # fmt: skip
    for _ in range(5):
        net(torch.randn(4, 3, 16, 16))
    for norm in (net[1], net[4]):
        # Its integers may be -128, so that no sign can change.
        nn.init.uniform_(norm.weight, 0.2, 1.5)
    net.eval().apply(torch.ao.quantization.disable_observer)
    path = tmp_path / "qat.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net,
            (torch.randn(2, 3, 16, 16),),
            path,
            dynamo=False,
            opset_version=17,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
        )
    source = onnx.load(path)
    assert batch_norms(source) == 2, operators(source)
    result = fold(source)
    folded = to_proto(result.model)
    assert batch_norms(folded) == 0, [site.reason for site in result.report.sites]
    assert operators(folded).count("QuantizeLinear") == operators(source).count("QuantizeLinear") == 2
    assert result.report.verification.passed


@pytest.mark.slow
def test_a_file_of_the_quantizer_of_onnxruntime(tmp_path: Path) -> None:
    """Weights as integers, and as floats with a QuantizeLinear."""
    from onnxruntime import quantization

    shapes = {"w": (8, 3, 3, 3), "b": (8,), "v": (6, 8, 3, 3), **P, **batch_norm("r", 6)}
    body = (
        f"z = Conv (x, w, b)\n {NORM.replace('y =', 'n =')}\n a = Relu (n)\n c = Conv (a, v)\n"
        " y = BatchNormalization (c, r_s, r_b, r_m, r_v)"
    )
    onnx.save(model(f"g (float[2,3,16,16] x) => (float[2,6,12,12] y) {{ {body} }}", shapes), tmp_path / "in.onnx")

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            generator = np.random.default_rng(0)
            self.rows = iter([{"x": generator.standard_normal((2, 3, 16, 16)).astype(np.float32)} for _ in range(4)])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.rows, None)

    for pair in (False, True):
        options = {"AddQDQPairToWeight": pair, "OpTypesToExcludeOutputQuantization": ["Conv"]}
        quantization.quantize_static(
            tmp_path / "in.onnx", tmp_path / f"q{pair}.onnx", Reader(), per_channel=True,
            op_types_to_quantize=["Conv"], weight_type=quantization.QuantType.QInt8, extra_options=options,
        )  # fmt: skip
        source = onnx.load(tmp_path / f"q{pair}.onnx")
        assert batch_norms(source) == 2
        result = fold(source)
        folded = to_proto(result.model)
        assert batch_norms(folded) == 0, [site.reason for site in result.report.sites]
        assert operators(folded).count("QuantizeLinear") == operators(source).count("QuantizeLinear")
        assert result.report.verification.passed
