"""Constants and sizes that the graph computes: rounded by an engine, and equal at the sizes that are tried without being so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper
import pytest

from bnexport import verify
from bnexport.errors import VerificationError
from bnexport.folding import fold
from bnexport.graph.evaluate import NodeEvaluator
from bnexport.model_io import to_proto
from bnexport.verification.proof import search
from bnexport.verification.verdict import Verification
from tests.miscompilations.mistake import affine
from tests.support.claims import outcome, prove_claims
from tests.support.onnx_text import array_of, batch_norm, model, parameters, with_arrays

NORM = "Norm (z, p)"
STANDARDISED = f"m = ReduceMean <axes = [1, 2, 3], keepdims = 1> (w) c = Sub (w, m) z = Conv (x, c) y = {NORM}"
NUMBERS = parameters({"w": (8, 3, 3, 3), **batch_norm("p", 8)})
FACTOR, SHIFT = affine(NUMBERS)


def build(body: str, dtype: str = "float", **values: np.ndarray) -> onnx.ModelProto:
    text = body.replace(NORM, "Norm (z, p_s, p_b, p_m, p_v)")
    used = {key: value for key, value in values.items() if f"{key})" in text or f"{key}," in text}
    return model(f"g ({dtype}[N,3,H,W] x) => ({dtype}[N,8,A,B] y) {{ {body} }}", values=used)


def local(source: onnx.ModelProto, candidate: onnx.ModelProto) -> Verification:
    return verify(source, candidate, method="local")


def standardised(weight: np.ndarray) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A Conv whose filters have the mean 0, with a batch norm, and the parameters of the right fold."""
    centred = (weight - weight.mean((1, 2, 3), keepdims=True)).astype(np.float64) * FACTOR[:, None, None, None]
    source = build(STANDARDISED, **{**NUMBERS, "w": weight})
    return source, {"v": centred.astype(np.float32), "b": SHIFT.astype(np.float32)}


def test_one_filter_without_digits_hides_no_error_of_the_others() -> None:
    weight = NUMBERS["w"].copy()
    weight[0] = np.float32(1000) + np.float32(1e-4) * weight[0]
    source, right = standardised(weight)
    wrong = {**right, "v": right["v"] * np.where(np.arange(8) == 0, 1, 1.2).astype(np.float32)[:, None, None, None]}
    assert local(source, build("y = Conv (x, v, b)", **wrong)).status == "failed"
    # Of that filter itself nothing is known.
    assert outcome(local(source, build("y = Conv (x, v, b)", **right))) == ("not_verified", ["compared"])
    assert outcome(fold(source, verify="local").report.verification) == ("not_verified", ["not_run"])


@pytest.mark.parametrize("biased", [False, True])
def test_filters_that_keep_their_digits_are_proved(biased: bool) -> None:
    """Beside a stored bias, too, which tells the rank."""
    source, right = standardised(NUMBERS["w"])
    if biased:
        bias = parameters({"k": (8,)})
        source = build(STANDARDISED.replace("Conv (x, c)", "Conv (x, c, k)"), **NUMBERS, **bias)
        right["b"] = (right["b"] + bias["k"] * FACTOR).astype(np.float32)
    assert outcome(local(source, build("y = Conv (x, v, b)", **right))) == ("passed", ["proved"])
    right["b" if biased else "v"].flat[5] += np.float32(1e-3)
    assert local(source, build("y = Conv (x, v, b)", **right)).status == "failed"


def test_the_depth_of_a_network_hides_no_error() -> None:
    """A bound is a share of the coefficients of its own layer, not of their products over the layers in front."""
    depth, ones = 60, np.ones((1, 4, 1, 1), np.float32)
    weights = parameters({f"w{i}": (4, 4, 1, 1) for i in range(depth)})
    norms = parameters({name: shape for i in range(depth) for name, shape in batch_norm(f"n{i}", 4).items()})
    values = {**{name: np.float32(0.35) * array for name, array in weights.items()}, **norms}
    layers = " ".join(f"z{i} = Conv (r{i}, w{i}) r{i + 1} = Norm (z{i}, n{i})" for i in range(depth))
    text = f"""g (float[N,4,H,W] x) => (float[N,4,A,B] y) {{{{ r0 = Identity (x) {layers} {{}} z = Conv (r{depth}, w0)
        s = Add (z, k) y = Norm (s, n0) }}}}"""
    source = model(text.format("c = Add (a, e) k = Sub (c, a)"), values={**values, "a": 1e8 * ones, "e": ones})
    wrong = model(text.format(""), values={**values, "k": np.float32(2.9) * ones})
    for candidate in (wrong, fold(wrong, verify=False).model):
        assert local(source, candidate).status != "passed"
        assert verify(source, candidate).status != "passed"


@pytest.mark.parametrize("shape", [(), (8,)], ids=["number", "vector"])
@pytest.mark.parametrize("factor", [0.0, 1.0, 2.9, -0.9])
def test_a_factor_that_cancels_is_not_proved(factor: float, shape: tuple[int, ...]) -> None:
    """(1e8 + 1) - 1e8 is 0 in float32; a proof does not win over a run that decides nothing."""
    a, e, k = (np.full(shape, number, np.float32) for number in (1e8, 1, factor))
    text = "g (float[N,8] x) => (float[A,B] y) {{ {} y = Mul (x, k) }}"
    source = model(text.format("c = Add (a, e) k = Sub (c, a)"), values={"a": a, "e": e})
    other = model(text.format(""), values={"k": k})
    status, marks = outcome(local(source, other))
    assert status == "not_verified" and "proved" not in marks
    if factor not in (0.0, 1.0):  # the engine's result, and the exact one
        assert not verify(source, other).passed


def test_what_overflows_in_its_type_is_not_verified() -> None:
    """Squares of float16 are infinite here, so that the weights are 0."""
    body = f"q = Mul (w, w) n = ReduceSum (q, axes) r = Sqrt (n) u = Div (w, r) z = Conv (x, u) y = {NORM}"
    numbers = {key: value.astype(np.float16) for key, value in NUMBERS.items()} | {"axes": np.asarray([1, 2, 3])}
    numbers["w"] = (NUMBERS["w"] * 600).astype(np.float16)
    report = fold(build(body, "float16", **numbers), verify="local").report
    assert len(report.folded) == 1
    assert report.verification.status == "not_verified" and "overflows" in report.verification.reason


@pytest.mark.parametrize(("steps", "status"), [(0, "passed"), (16, "not_verified")])
def test_a_weight_of_two_types_has_the_digits_of_the_coarser(steps: int, status: str) -> None:
    half = (NUMBERS["w"] / 3).astype(np.float16)
    half.flat[5] += steps * np.spacing(half.flat[5])
    source = build("y = Conv (x, w)", w=NUMBERS["w"])
    text = "c = Cast <to = 1> (h) v = Mul (c, k) y = Conv (x, v)"
    assert local(source, build(text, h=half, k=np.full((8, 1, 1, 1), 3, np.float32))).status == status


def test_a_stored_constant_is_no_map_from_a_size_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is computed is in memory already."""
    monkeypatch.setattr(search, "_ELEMENTS", 3)
    values = {"f": np.full(4, 4, np.float32), "t": np.full(4, 16, np.float32)}
    for source, other, status in (
        ("a = Mul (x, f) y = Mul (a, f)", "y = Mul (x, t)", "not_verified"),
        ("c = Sqrt (f) a = Mul (x, c) y = Mul (a, c)", "c = Sqrt (t) y = Mul (x, c)", "passed"),
    ):
        texts = (f"g (float[N,4] x) => (float[N,4] y) {{ {each} }}" for each in (source, other))
        assert local(*(model(text, values=values) for text in texts)).status == status


def test_a_fold_that_rounds_to_the_weights_that_were_there() -> None:
    """The batch norm takes back what a division does; its shift goes into the bias."""
    wide = np.linspace(0.5, 2, 8).astype(np.float32)
    root = np.sqrt(NUMBERS["p_v"].astype(np.float64) + 1e-5)
    values = {
        **{**NUMBERS, "w": np.copysign(np.float32(1.5), NUMBERS["w"]), "k": wide.reshape(8, 1, 1)},
        **{"p_s": (root * wide).astype(np.float32), "h": np.ones((8, 1, 1), np.float32)},
    }
    source = build(f"c = Conv (x, w) d = Div (c, k) z = Add (d, h) y = {NORM}", **values)
    assert outcome(fold(source, verify="local").report.verification)[1] == ["proved"]
    result = fold(source, verify=False)
    good = to_proto(result.model)
    bias = next(each.name for each in good.graph.initializer if list(each.dims) == [8])
    wrong = with_arrays(good, {bias: array_of(good, bias) + np.float32(1e-3)})
    assert prove_claims(source, wrong, result.report).status == "failed"


# {0}: the convolution, {1}: the batch norm of a value, or a copy.
SIZES = {
    "a shape from the batch": """z = {0} n = {1} (z{2}) s = Shape (n) g = Gather <axis = 0> (s, zero) u = Unsqueeze (g, first)
        t = Concat <axis = 0> (u, rest) y = Reshape (n, t)""",
    "a slice to half of the width": """z = {0} s = Shape (x) e = Slice (s, third, fourth) h = Div (e, second)
        d = Slice (z, first, h, third) y = {1} (d{2})""",
    "a slice to 100": "z = {0} d = Slice (z, first, many, third) y = {1} (d{2})",
}
PLACES = {"first": [0], "second": [2], "third": [3], "fourth": [4], "rest": [-1], "many": [100], "zero": 0}


@pytest.mark.parametrize("name", SIZES)
def test_a_right_fold_past_computed_sizes_is_proved(name: str) -> None:
    places = {key: np.asarray(value) for key, value in PLACES.items() if key in SIZES[name]}

    def net(*texts: str, **values: np.ndarray) -> onnx.ModelProto:
        made = model(
            f"g (float[N,6,H,W] x) => (float y) {{ {SIZES[name].format(*texts)} }}", values={**places, **values}
        )
        made.graph.output[0].type.tensor_type.ClearField("shape")
        return made

    source = net("Conv (x, w:8.6.1.1)", "Norm", ", p:8")
    assert outcome(local(source, net("Conv (x, v, b)", "Identity", "", **folded_into(source)))) == (
        "passed",
        ["proved"],
    )


def folded_into(source: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The weight v and the bias b of a Conv with the batch norm behind it."""
    factor, shift = affine({f"p_{name}": array_of(source, f"p_{name}") for name in "sbmv"})
    values = {"v": array_of(source, "w") * factor[:, None, None, None], "b": shift}
    return {name: value.astype(np.float32) for name, value in values.items()}


def test_a_report_does_not_vouch_for_other_sizes() -> None:
    """The other shape fits where the batch divides the area."""
    body = """g (float[N,6,6,6] x) => (float[A,B,C,D] y) { z = Conv (x, w:8.6.1.1) s = Shape (z) b = Slice (s, zero, one)
        c = Slice (s, at, two) t = Concat <axis = 0> (b, c, rest) r = Reshape (z, t) n = Norm (r, p:8) m = Reshape (n, s)
        y = Norm (m, p) }"""
    numbers = {"zero": 0, "one": 1, "at": 1, "two": 2, "rest": -1}
    source = model(body, values={name: np.asarray([number]) for name, number in numbers.items()})
    result = fold(source, verify=False)
    assert prove_claims(source, result.model, result.report).passed
    wrong = with_arrays(to_proto(result.model), {"at": np.asarray([0])})
    assert prove_claims(source, wrong, result.report).status == "failed"


def test_sizes_without_a_name_are_different_sizes() -> None:
    text = "g (float[N,4,A,B] x) => (float[N,4,C,D] y) {{ {} }}"
    body = "c = Conv (x, w:4.4.1.1) s = Shape (c) h = Slice (s, two, three) t = Slice (c, zero, h, three) y = Norm (t, p:4)"
    source = model(
        text.format(body), values={name: np.asarray([n]) for name, n in (("two", 2), ("three", 3), ("zero", 0))}
    )
    wrong = model(text.format("y = Conv (x, v, b)"), values=folded_into(source))
    for proto in (source, wrong):
        for value in (*proto.graph.input, *proto.graph.output):
            for dimension in value.type.tensor_type.shape.dim[2:]:
                dimension.dim_param = ""
    assert local(source, wrong).status == "not_verified"


@pytest.mark.parametrize("version", [3, 8])
def test_an_initializer_that_is_an_input_of_a_body_is_no_constant(version: int) -> None:
    text = """g (float[1] x) => (float[1] y) { y = Loop (n, t, x) <body = b (int64 i, bool c, float[1] v) => (bool d, float[1] o)
        { o = OP  d = Identity (c) }> }"""
    stored = {"n": np.asarray(3), "t": np.asarray(True)}

    def loop(operation: str, **inner: float) -> onnx.ModelProto:
        made = model(text.replace("OP", operation), values=stored, opset=10, ir_version=version)
        body = made.graph.node[0].attribute[0].g
        arrays = {name: np.asarray([value], np.float32) for name, value in inner.items()}
        body.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
        return made

    source = loop("Mul (v, k)", v=3, k=2)
    assert local(source, loop("Constant <value = float[1] {6.0}> ()", v=3)).status == "not_verified"


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


@pytest.mark.parametrize("operator", WEIGHTS)
def test_a_fault_of_the_evaluator_does_not_pass(monkeypatch: pytest.MonkeyPatch, operator: str) -> None:
    """Folder and proof compute the same wrong weight: the proof alone passes; whole models refute it by default."""
    text = f"{WEIGHTS[operator]} z = Conv (x, w) y = Norm (z, p:4)"
    values = {name: np.asarray(each) for name, each in INTEGERS.items() if f"{name})" in text or f"{name}," in text}
    proto = model(f"g (float[N,4,H,W] x) => (float[N,4,A,B] y) {{ {text} }}", values=values)
    assert fold(proto).report.verification.passed
    right, seen = NodeEvaluator.__call__, list[str]()

    def wrong(self: NodeEvaluator, inputs: Sequence[Any]) -> list[Any]:
        results = right(self, inputs)
        if self._node.op_type != operator:
            return results
        seen.append(operator)
        return [each + 1 if each is not None and each.dtype.kind == "f" else each for each in results]

    monkeypatch.setattr(NodeEvaluator, "__call__", wrong)
    result = fold(proto, verify=False)
    assert seen and result.report.changed
    assert prove_claims(proto, result.model, result.report).status == "passed"
    assert verify(proto, result.model).status == "failed"
    with pytest.raises(VerificationError):
        fold(proto)
