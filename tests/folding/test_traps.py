"""Folds of which more is asked for: names, attributes, what is written beside, one rounding, and dead channels of half networks."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

import bnexport.errors
from bnexport import tolerances
from bnexport.folding import fold
from bnexport.model_io import to_proto
from bnexport.runtime.engine import Serialised
from bnexport.verification.oracle import PreciseModel
from tests.folding.corpus.case import MMCV
from tests.support.onnx_text import assert_refused, fold_and_check, make_inputs, model, operators_of, parameters, run

CONV, NORM = "z = Conv (x, w:8.6.1.1)", "y = Norm (z, p:8)"
Y = "float[N,8,A,B] y"


def conv_bn(nodes: str = f"{CONV} {NORM}", output: str = Y, **options: str) -> onnx.ModelProto:
    return model(f"g (float[N,6,H,W] x) => ({output}) {{ {nodes} }}", **options)


def test_redefined_operator() -> None:
    proto = conv_bn()
    function = '<opset_import: ["": 17], domain: ""> Conv (a, b) => (c) { c = Add (a, b) }'
    proto.functions.append(onnx.parser.parse_function(function))
    with pytest.raises(bnexport.errors.UnsupportedModelError, match="redefines"):
        fold(proto)


def test_names_stay_unique() -> None:
    outputs = f"{Y}, float[8,6,1,1] w, float[N,6,A,B] w_folded"
    proto = conv_bn(f"{CONV} w_folded = Identity (x) {NORM}", outputs)
    proto.graph.node[1].output[0] = proto.graph.output[2].name = "w.folded"
    graph = fold_and_check(proto)[0].graph
    names = [*(tensor.name for tensor in graph.initializer), *(name for node in graph.node for name in node.output)]
    assert len(names) == len(set(names))


def test_what_is_no_part_of_a_fold_comes_out_as_it_went_in() -> None:
    header = '<ir_version: 10, opset_import: ["": 17, "other": 3], producer_name: "somebody", doc_string: "notes">'
    more = "a = other.Thing <alpha: float = 0.5> (y) q = Abs (a) r = LeakyRelu <alpha=0.25> (q)"
    proto = conv_bn(f"{CONV} {NORM} {more}", "float[N,8,A,B] r", header=header)
    proto.metadata_props.add(key="author", value="them")
    proto.graph.metadata_props.add(key="part", value="first")
    proto.graph.doc_string = "a graph"
    for node, name in zip(proto.graph.node, ("conv", "norm", "thing", "abs", "leaky"), strict=True):
        node.name, node.doc_string = name, f"about {name}"
        node.metadata_props.add(key="line", value=name)
        if not node.domain:
            node.ClearField("domain")  # written as an empty field by the parser
    for name in ("y", "a", "q"):
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, 1, ("N", 8, "A", "B")))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(3.0), "nobody reads this"))
    folded = to_proto(fold(proto, verify=False, certificate=False).model)
    for field in ("ir_version", "producer_name", "doc_string", "opset_import", "metadata_props"):
        assert getattr(folded, field) == getattr(proto, field), field
    for field in ("name", "input", "output", "doc_string", "metadata_props"):
        assert getattr(folded.graph, field) == getattr(proto.graph, field), field
    conv, thing, *others = folded.graph.node
    assert others == list(proto.graph.node[3:])
    for got, source in ((conv, proto.graph.node[0]), (thing, proto.graph.node[2])):
        for field in ("name", "attribute", "doc_string", "metadata_props"):
            assert getattr(got, field) == getattr(source, field), field
    assert thing.input[0] == conv.output[0]
    assert {value.name for value in folded.graph.value_info} >= {"a", "q"}
    assert proto.graph.initializer[-1] in list(folded.graph.initializer)


def test_a_part_that_is_an_output() -> None:
    """The parts are mapped on their own, so the other one keeps its values to the bit."""
    nodes = "t = Conv (x, w:8.6.1.1) z, u = Split <axis=1> (t) y = Norm (z, p:4)"
    proto = conv_bn(nodes, "float[N,4,A,B] y, float[N,4,A,B] u")
    folded, _ = fold_and_check(proto)
    inputs = make_inputs(proto)
    np.testing.assert_array_equal(run(folded, inputs)[1], run(proto, inputs)[1])


def test_without_a_bias_an_add_stays() -> None:
    """Their outputs' rank is known to nobody, unless the file tells: then no Add can take the shift."""
    text = "g (float[2,6,9,9] x, float[2,18,7,7] o) => (float[2,8,7,7] y) { z = mmdeploy.MMCVDeformConv2d (x, o, w:8.6.3.3) "
    proto = model(f"{text} y = Norm (z, p:8) }}", header=MMCV)
    result = fold(proto, verify="local", standard_ops=False)
    assert operators_of(result) == ["MMCVDeformConv2d", "BatchNormalization"]
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("z", 1, [2, 8, 7, 7]))
    result = fold(proto, verify="local", standard_ops=False)
    assert operators_of(result) == ["MMCVDeformConv2d", "Add"]
    assert {proof.method for proof in result.report.verification.sites} == {"proved"}


EPSILON = np.float64(np.float32(1e-5))


def tensors(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


@pytest.mark.parametrize(
    ("kind", "dtype", "statistics"),
    [
        ("float", np.float32, np.float32),
        ("bfloat16", ml_dtypes.bfloat16, ml_dtypes.bfloat16),  # nothing runs it here
        ("float16", np.float16, np.float32),
        ("double", np.float64, np.float64),  # ONNX Runtime has no such Conv
    ],
)
def test_one_rounding(kind: str, dtype: type, statistics: type) -> None:
    """Three maps in a row: each weight and bias is the nearest to the exact one, in the type that it had."""
    body = f"""g ({kind}[N,6,H,W] x) => ({kind}[N,8,A,B] y) {{ t = Conv (x, w, c) u = Norm (t, p:8) v = Norm (u, q)
        y = Mul (v, d) }}"""
    shapes = {
        "w": (8, 6, 1, 1),
        "c": (8,),
        "d": (8, 1, 1),
        **{f"{norm}_{each}": (8,) for norm in "pq" for each in "sbmv"},
    }
    values = {
        name: value.astype(statistics if name[0] in "pq" else dtype) for name, value in parameters(shapes).items()
    }
    result = fold(model(body, values=values, opset=22 if kind == "bfloat16" else 17))
    assert operators_of(result) == ["Conv"]
    assert kind != "double" or result.report.verification.engine.startswith("onnx.reference ")
    wide = {name: value.astype(np.float64) for name, value in values.items()}
    scale, bias = np.ones(8), wide["c"]
    for norm in "pq":
        k = wide[f"{norm}_s"] / np.sqrt(wide[f"{norm}_v"] + EPSILON)
        scale, bias = scale * k, (bias - wide[f"{norm}_m"]) * k + wide[f"{norm}_b"]
    scale, bias = scale * wide["d"].reshape(8), bias * wide["d"].reshape(8)
    got = tensors(result.model)
    assert {array.dtype for array in got.values()} == {np.dtype(dtype)}
    for name, expected in (("w", wide["w"] * scale.reshape(8, 1, 1, 1)), ("c", bias)):
        rounded = expected.astype(dtype).astype(np.float64)
        np.testing.assert_allclose(got[name].astype(np.float64), rounded, rtol=1e-13 * (kind == "double"), atol=0)


# Layers with 16 outputs; the sizes of x, and of w.
LAYERS = {
    "conv": ("z = Conv <pads = [1, 1, 1, 1]> (x, w)", "N,32,5,5", (16, 32, 3, 3)),
    "transposed-conv": ("z = ConvTranspose (x, w)", "N,32,5,5", (32, 16, 3, 3)),
    "gemm": ("z = Gemm (x, w)", "N,32", (32, 16)),
    "gemm-alpha": ("z = Gemm <transB = 1, alpha = 4.0> (x, w)", "N,32", (16, 32)),
    "large": ("z = Conv <dilations = [5, 5], pads = [5, 5, 5, 5]> (x, w)", "N,512,5,5", (16, 512, 3, 3)),
}


def with_dead_channels(layer: str, *, scale: float = 1e-6, shift: float = -0.2) -> onnx.ModelProto:
    """A half network whose training left channels 3 and 11 with scales near 0: their output is their shift."""
    text, sizes, shape = LAYERS[layer]
    generator = np.random.default_rng(5)
    values = {"w": generator.standard_normal(shape) * 0.02, "p_m": generator.standard_normal(16) * 0.1}
    values |= {"p_s": generator.uniform(0.5, 2, 16), "p_b": generator.standard_normal(16)}
    values["p_v"] = generator.uniform(0.5, 2, 16)
    values["p_s"][[3, 11]], values["p_b"][[3, 11]] = scale, shift
    body = f"g (float16[{sizes}] x) => (float16[N,16{',A,B' * (len(shape) == 4)}] y) {{ {text} y = Norm (z, p) }}"
    return model(body, values={name: value.astype(np.float16) for name, value in values.items()})


@pytest.mark.parametrize("layer", LAYERS)
def test_dead_channels_fold(layer: str, tmp_path: Path) -> None:
    """Some weights become zero; what they made is below the rounding error of the output."""
    proto = with_dead_channels(layer)
    result = fold(proto, tmp_path / "out.onnx")
    assert [site.outcome for site in result.report.sites] == ["folded"]
    assert result.report.verification.passed
    wide = {"x": np.float64(np.float16(tolerances.ACTIVATION)) * np.sign(make_inputs(proto)["x"]).astype(np.float64)}
    before, after = (
        PreciseModel(Serialised(each.SerializeToString()), 30.0).run([wide], ["y"])[0][0]
        for each in (proto, result.model)
    )
    # One rounding of the bias, and what the inputs' bound gives the weights' errors.
    assert 0 < np.abs(after - before)[:, [3, 11]].max() <= 2 * 2.0**-11 * 0.2


@pytest.mark.parametrize("shift", [0.0, 1e-3])
def test_dead_channels_stay_where_an_output_would_show(shift: float) -> None:
    assert_refused(with_dead_channels("conv", shift=shift), "underflow")


def test_dead_channels_stay_when_they_are_inputs() -> None:
    """A scale that goes forward meets every output, whose shifts say nothing about it."""
    numbers = {"p_b": 0, "p_m": 0, "p_v": 1, "p_s": np.where(np.arange(16) == 3, 1e-6, 1)}
    values = {name: np.broadcast_to(number, 16).astype(np.float16) for name, number in numbers.items()}
    values["w"] = np.full((4, 16, 3, 3), 0.02, np.float16)
    body = "g (float16[N,16,5,5] x) => (float16[N,4,A,B] y) { t = Norm (x, p) y = Conv (t, w) }"
    assert_refused(model(body, values=values), "underflow")
