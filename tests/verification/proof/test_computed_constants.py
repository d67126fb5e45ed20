"""Constants that the graph computes: an engine may be off from them by rounding, each element by its own."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bnexport import verify
from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.claims import prove_claims
from tests.support.onnx_text import batch_norm, model, parameters

NORM = "BatchNormalization (z, p_s, p_b, p_m, p_v)"
STANDARDISED = f"m = ReduceMean <axes = [1, 2, 3], keepdims = 1> (w)\n c = Sub (w, m)\n z = Conv (x, c)\n y = {NORM}"
NUMBERS = parameters({"w": (8, 3, 3, 3), **batch_norm("p", 8)})
FACTOR = (NUMBERS["p_s"] / np.sqrt(NUMBERS["p_v"] + np.float32(1e-5))).astype(np.float64)


def build(body: str, dtype: str = "float", **values: np.ndarray) -> onnx.ModelProto:
    used = {key: value for key, value in values.items() if f"{key})" in body or f"{key}," in body}
    return model(f"g ({dtype}[N,3,H,W] x) => ({dtype}[N,8,A,B] y) {{ {body} }}", values=used)


def standardised(weight: np.ndarray) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A Conv whose filters have the mean 0, with a batch norm, and the parameters of the right fold."""
    numbers = {**NUMBERS, "w": weight}
    centred = (weight - weight.mean((1, 2, 3), keepdims=True)).astype(np.float64) * FACTOR[:, None, None, None]
    shift = NUMBERS["p_b"] - NUMBERS["p_m"] * FACTOR
    return build(STANDARDISED, **numbers), {"v": centred.astype(np.float32), "b": shift.astype(np.float32)}


def test_one_filter_without_digits_hides_no_error_of_the_others() -> None:
    weight = NUMBERS["w"].copy()
    weight[0] = np.float32(1000) + np.float32(1e-4) * weight[0]
    source, right = standardised(weight)
    wrong = {**right, "v": right["v"] * np.where(np.arange(8) == 0, 1, 1.2).astype(np.float32)[:, None, None, None]}
    assert verify(source, build("y = Conv (x, v, b)", **wrong), method="local").status == "failed"
    # Of that filter itself nothing is known.
    verdict = verify(source, build("y = Conv (x, v, b)", **right), method="local")
    assert (verdict.status, [proof.method for proof in verdict.sites]) == ("not_verified", ["compared"])
    verdict = fold(source, verify="local").report.verification
    assert verdict is not None
    assert (verdict.status, [proof.method for proof in verdict.sites]) == ("not_verified", ["not_run"])


def test_filters_that_keep_their_digits_are_proved() -> None:
    source, right = standardised(NUMBERS["w"])
    verdict = verify(source, build("y = Conv (x, v, b)", **right), method="local")
    assert (verdict.status, [proof.method for proof in verdict.sites]) == ("passed", ["proved"])
    right["v"][3, 1, 1, 1] *= np.float32(1.0001)
    assert verify(source, build("y = Conv (x, v, b)", **right), method="local").status == "failed"


def test_the_depth_of_a_network_hides_no_error() -> None:
    """A bound is a share of the coefficients of its own layer, not of their products over the layers in front."""
    depth, ones = 60, np.ones((1, 4, 1, 1), np.float32)
    weights = parameters({f"w{i}": (4, 4, 1, 1) for i in range(depth)})
    norms = parameters({name: shape for i in range(depth) for name, shape in batch_norm(f"n{i}", 4).items()})
    values = {**{name: np.float32(0.35) * array for name, array in weights.items()}, **norms}
    layers = [
        f"z{i} = Conv (r{i}, w{i}) r{i + 1} = BatchNormalization (z{i}, n{i}_s, n{i}_b, n{i}_m, n{i}_v)"
        for i in range(depth)
    ]
    last = f"z = Conv (r{depth}, w0) s = Add (z, k) y = BatchNormalization (s, n0_s, n0_b, n0_m, n0_v)"
    text = f"g (float[N,4,H,W] x) => (float[N,4,A,B] y) {{{{ r0 = Identity (x) {' '.join(layers)} {{}} {last} }}}}"
    source = model(text.format("c = Add (a, e) k = Sub (c, a)"), values={**values, "a": 1e8 * ones, "e": ones})
    wrong = model(text.format(""), values={**values, "k": np.float32(2.9) * ones})
    for candidate in (wrong, fold(wrong, verify=False).model):
        assert verify(source, candidate, method="local").status != "passed"
        assert verify(source, candidate).status != "passed"


@pytest.mark.parametrize("shape", [(), (8,)], ids=["number", "vector"])
@pytest.mark.parametrize("factor", [0.0, 1.0, 2.9, -0.9])
def test_a_factor_that_cancels_is_not_proved(factor: float, shape: tuple[int, ...]) -> None:
    """(1e8 + 1) - 1e8 is 0 in float32; a proof does not win over a run that decides nothing."""
    values = {key: np.full(shape, number, np.float32) for key, number in (("a", 1e8), ("e", 1), ("k", factor))}
    text = "g (float[N,8] x) => (float[A,B] y) {{ {} }}"
    source = model(
        text.format("c = Add (a, e)\n k = Sub (c, a)\n y = Mul (x, k)"), values={key: values[key] for key in "ae"}
    )
    other = model(text.format("y = Mul (x, k)"), values={"k": values["k"]})
    verdict = verify(source, other, method="local")
    assert verdict.status == "not_verified"
    assert "proved" not in {proof.method for proof in verdict.sites}
    if factor not in (0.0, 1.0):  # the engine's result, and the exact one
        assert not verify(source, other).passed


def test_what_overflows_in_its_type_is_not_verified() -> None:
    """Squares of float16 are infinite here, so that the weights are 0."""
    body = f"""q = Mul (w, w)
        n = ReduceSum (q, axes)
        r = Sqrt (n)
        u = Div (w, r)
        z = Conv (x, u)
        y = {NORM}"""
    numbers = {key: value.astype(np.float16) for key, value in NUMBERS.items()}
    numbers["w"] = (NUMBERS["w"] * 600).astype(np.float16)
    source = build(body, "float16", **numbers, axes=np.asarray([1, 2, 3]))
    report = fold(source, verify="local").report
    assert len(report.folded) == 1
    assert report.verification is not None
    assert report.verification.status == "not_verified"
    assert "overflows" in report.verification.reason


def test_a_computed_number_is_no_vector_of_one() -> None:
    """The product of a number and a vector of one element is a vector."""
    source = model("g (float x) => (float y) { a = Sqrt (w) y = Mul (x, a) }", values={"w": np.float32(4)})
    for shape, status in (((1,), "not_verified"), ((), "passed")):
        values = {"a": np.full(shape, 2, np.float32)}
        other = model("g (float x) => (float y) { y = Mul (x, a) }", values=values)
        assert verify(source, other, method="local").status == status


def test_a_computed_weight_beside_a_stored_bias_tells_the_rank() -> None:
    bias = parameters({"k": (8,)})
    source = build(STANDARDISED.replace("Conv (x, c)", "Conv (x, c, k)"), **NUMBERS, **bias)
    right = standardised(NUMBERS["w"])[1]
    right["b"] = (right["b"] + bias["k"] * FACTOR).astype(np.float32)
    verdict = verify(source, build("y = Conv (x, v, b)", **right), method="local")
    assert (verdict.status, [proof.method for proof in verdict.sites]) == ("passed", ["proved"])
    right["b"][5] += np.float32(1e-3)
    assert verify(source, build("y = Conv (x, v, b)", **right), method="local").status == "failed"


def test_an_operator_of_another_domain_has_no_rank_of_its_namesake() -> None:
    header = '<ir_version: 8, opset_import: ["": 17, "other": 1]>'
    text = "g (float[N,3] x) => (float y) {{ z = other.Conv (x, w) {} }}"
    shift = NUMBERS["p_b"] - NUMBERS["p_m"] * FACTOR
    wide = {"f": FACTOR.astype(np.float32).reshape(8, 1, 1), "h": shift.astype(np.float32).reshape(8, 1, 1)}
    source = model(text.format(f"y = {NORM}"), values=NUMBERS, header=header)
    values = {"w": NUMBERS["w"], **wide}
    candidate = model(text.format("s = Mul (z, f) y = Add (s, h)"), values=values, header=header)
    # Of rank 2 the result has one more axis.
    assert verify(source, candidate, method="local").status == "not_verified"


def test_a_fold_that_rounds_to_the_weights_that_were_there() -> None:
    """The batch norm takes back what a division does; its shift goes into the bias."""
    root = np.sqrt(NUMBERS["p_v"].astype(np.float64) + 1e-5)
    wide = np.linspace(0.5, 2, 8).astype(np.float32)
    values = {
        **NUMBERS,
        "w": np.copysign(np.float32(1.5), NUMBERS["w"]),
        "k": wide.reshape(8, 1, 1),
        "p_s": (root * wide).astype(np.float32),
        "h": np.ones((8, 1, 1), np.float32),
    }
    source = build(f"c = Conv (x, w) d = Div (c, k) z = Add (d, h) y = {NORM}", **values)
    verdict = fold(source, verify="local").report.verification
    assert verdict is not None
    assert [proof.method for proof in verdict.sites] == ["proved"]
    result = fold(source, verify=False)
    wrong = to_proto(result.model)
    bias = next(each for each in wrong.graph.initializer if list(each.dims) == [8])
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + np.float32(1e-3), bias.name))
    assert prove_claims(source, wrong, result.report).status == "failed"


@pytest.mark.parametrize("form", ["Resize (w)", "Resize <axes = [2, 7]> (w, , , at)"], ids=["no size", "another axis"])
def test_a_constant_that_no_engine_makes_is_not_verified(form: str) -> None:
    text = "g (float[N,2,4,4] x) => (float[A,B,C,D] y) {{ r = {} y = Add (x, r) }}"
    values = {"w": np.ones((1, 2, 2, 2), np.float32), "at": np.array([4, 4], np.int64)}
    source, candidate = (model(text.format(each), values=values, opset=18) for each in (form, "Identity (w)"))
    assert verify(source, candidate, method="local").status == "not_verified"
