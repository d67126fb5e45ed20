"""Models that correspond node by node and differ in a constant or an attribute: no run makes them equal."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bnexport.folding import fold, verify
from tests.support.onnx_text import batch_norm, model, parameters

_RNG = np.random.default_rng(0)
TABLE = _RNG.standard_normal((600, 8)).astype(np.float32)
OTHER = np.where(np.arange(600)[:, None] < 300, TABLE, 0).astype(np.float32)
_SMALL = TABLE[:8] * np.array([1e5, 1, 1, 1, 1, 1, 1, 1], np.float32)
# Body, two values of the constant c, other constants.
KINDS = {
    "table behind Cast": (
        "g (int64[N,L] t) => (float[N,L,8] y) { w = Cast <to = 1> (c)\n v = Identity (w)\n y = Gather (v, t) }",
        (TABLE.astype(np.float16), OTHER.astype(np.float16)),
    ),
    "one-hot by Equal": (
        "g (int64[N,L,1] t) => (float[N,L,8] y) { e = Equal (t, r)\n o = Cast <to = 1> (e)\n y = MatMul (o, c) }",
        (TABLE, OTHER),
    ),
    "body of an If": (
        """g (float[N,8] x) => (float[N,8] y) {
            s = Shape (x)\n n = Gather (s, zero)\n g = Greater (n, many)
            y = If (g) <then_branch = a () => (float[N,8] t) { t = Mul (x, c) },
                else_branch = b () => (float[N,8] e) { e = Identity (x) }> }""",
        (np.float32(2), np.float32(3)),
    ),
    "small column": (
        "g (float[N,8] x) => (float[N,8] y) { y = Gemm (x, c) }",
        (_SMALL, _SMALL * [1, -1, 1, 1, 1, 1, 1, 1]),
    ),
    "saturated": (
        "g (float[N,8] x) => (float[N,8] y) { a = MatMul (x, c)\n y = Erf (a) }",
        (1e4 * TABLE[:8], 1e4 * TABLE[8:16]),
    ),
    "threshold": ("g (int64[N] t) => (bool[N] y) { y = Less (t, c) }", (np.int64(10**9), np.int64(2 * 10**9))),
}
OTHERS = {"r": np.arange(600), "zero": np.int64(0), "many": np.int64(10**6)}


def pair(body: str, constants: tuple[object, object]) -> list[onnx.ModelProto]:
    used = {name: value for name, value in OTHERS.items() if name in body.replace("(", " ").replace(")", " ").split()}
    first = np.asarray(constants[0])
    return [model(body, values={**used, "c": np.asarray(each).astype(first.dtype)}) for each in constants]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_alone_does_not_pass(kind: str) -> None:
    first, second = pair(*KINDS[kind])
    verdict = verify(first, second)
    assert verdict.status in ("not_verified", "failed")
    assert verify(first, first)
    assert verify(first, second, method="local").another


def test_what_differs_is_named() -> None:
    body = "g (float[N,8] x) => (float[N,8] y) { a = Mul (x, c)\n b = Elu <alpha = 1.0> (a)\n y = Add (b, x) }"
    source = model(body, values={"c": np.full(8, 1e-30, np.float32)})
    verdict = verify(source, model(body, values={"c": np.full(8, 2e-30, np.float32)}))
    assert verdict.status == "not_verified"
    assert "the constant 'c' differs by 1e-30" in verdict.reason
    changed = model(body.replace("alpha = 1.0", "alpha = 1.5"), values={"c": np.full(8, 1e-30, np.float32)})
    assert "the attribute 'alpha' changed" in verify(source, changed, method="local").another


def test_beside_a_fold_that_is_proved() -> None:
    body = """g (float[N,3,8,8] x, int64[N] t) => (float[N,4,6,6] y, float[N,8] z) {
        a = Conv (x, w)\n y = BatchNormalization (a, p_s, p_b, p_m, p_v)
        v = Cast <to = 1> (c)\n k = Identity (v)\n o = Gather (k, t)\n z = Relu (o) }"""
    values = parameters({"w": (4, 3, 3, 3), **batch_norm("p", 4)})
    first, second = (model(body, values={**values, "c": each.astype(np.float16)}) for each in (TABLE, OTHER))
    folded = fold(second, verify=False, certificate=False).model
    verdict = verify(first, folded)
    assert verdict.status != "passed"
    assert [site.method for site in verdict.sites] == ["proved"]
    assert verify(second, folded)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (1, 1, 8)])
def test_rounding_and_ones_in_front_are_no_difference(shape: tuple[int, ...]) -> None:
    body = "g (float[N,4,8] x) => (float[N,4,8] y) { a = Sin (x)\n b = Max (a, c)\n y = Cos (b) }"
    constant = 0.1 * TABLE[0]
    other = np.nextafter(constant, np.float32(1)).reshape(shape)
    assert verify(model(body, values={"c": constant}), model(body, values={"c": other}))


class TestOtherNames:
    BODY = "g (float[N,8] {0}, float[N,4] {1}) => (float[N,8] {2}) {{ a = Sin ({0})\n s = ReduceSum ({1})\n {2} = Add (a, s) }}"

    def test_they_are_matched_by_position(self) -> None:
        first, second = (model(self.BODY.format(*names)) for names in ("xvy", "xuz"))
        verdict = verify(first, second)
        assert verdict.passed
        assert verdict.reason == "matched by position: u as v, z as y"
        assert verdict.summary().endswith("matched by position: u as v, z as y; 0 folds proved, 0 compared only")
        wrong = model(self.BODY.format(*"xuz").replace("Sin", "Cos"))
        assert verify(first, wrong).status == "failed"

    def test_another_order_or_shape_is_no_match(self) -> None:
        first = model(self.BODY.format(*"xvy"))
        assert "inputs differ" in verify(first, model(self.BODY.format(*"vxy"))).reason
        assert "inputs differ" in verify(first, model(self.BODY.format(*"uwy").replace("N,4", "N,5"))).reason
