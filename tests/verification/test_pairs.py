"""Pairs of models get their verdicts, also where they correspond node by node and no run makes them equal."""

from __future__ import annotations

import numpy as np
import pytest

from bnexport import verify
from bnexport.folding import fold
from tests.support.claims import outcome
from tests.support.onnx_text import model
from tests.verification.pairs import PAIRS


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_gets_its_verdict(name: str) -> None:
    pair = PAIRS[name]
    first, second = pair.models()
    for method, status in pair.says.items():
        for source, other in ((first, second), (second, first))[: 1 + pair.turned]:
            verdict = verify(source, other, method=method)  # type: ignore[arg-type]
            assert "proved" not in {proof.method for proof in verdict.sites}
            if status == "another":
                assert verdict.status != "passed"
                assert verify(source, other, method="local").another
            else:
                assert verdict.status == status, verdict
    method = next(iter(pair.says))
    assert verify(first, first, method=method).passed  # type: ignore[arg-type]


_RNG = np.random.default_rng(0)
TABLE = _RNG.standard_normal((600, 8)).astype(np.float32)
OTHER = np.where(np.arange(600)[:, None] < 300, TABLE, 0).astype(np.float32)


def test_what_differs_is_named() -> None:
    body = "g (float[N,8] x) => (float[N,8] y) { a = Mul (x, c)\n b = Elu <alpha = 1.0> (a)\n y = Add (b, x) }"
    source = model(body, values={"c": np.full(8, 1e-30, np.float32)})
    verdict = verify(source, model(body, values={"c": np.full(8, 2e-30, np.float32)}))
    assert verdict.status == "not_verified"
    assert "the constant 'c' differs by 1e-30" in verdict.reason
    changed = model(body.replace("alpha = 1.0", "alpha = 1.5"), values={"c": np.full(8, 1e-30, np.float32)})
    assert "the attribute 'alpha' changed" in verify(source, changed, method="local").another


def test_beside_a_fold_that_is_proved() -> None:
    body = """g (float[N,3,8,8] x, int64[N] t) => (float[N,4,6,6] y, float[N,8] z) { a = Conv (x, w:4.3.3.3) y = Norm (a, p:4)
        v = Cast <to = 1> (c) k = Identity (v) o = Gather (k, t) z = Relu (o) }"""
    first, second = (model(body, values={"c": each.astype(np.float16)}) for each in (TABLE, OTHER))
    folded = fold(second, verify=False, certificate=False).model
    status, marks = outcome(verify(first, folded))
    assert status != "passed" and marks == ["proved"]
    assert verify(second, folded)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (1, 1, 8)])
def test_rounding_and_ones_in_front_are_no_difference(shape: tuple[int, ...]) -> None:
    body = "g (float[N,4,8] x) => (float[N,4,8] y) { a = Sin (x)\n b = Max (a, c)\n y = Cos (b) }"
    constant = 0.1 * TABLE[0]
    other = np.nextafter(constant, np.float32(1)).reshape(shape)
    assert verify(model(body, values={"c": constant}), model(body, values={"c": other}))


BODY = "g (float[N,8] {0}, float[N,4] {1}) => (float[N,8] {2}) {{ a = Sin ({0})\n s = ReduceSum ({1})\n {2} = Add (a, s) }}"


def test_other_names_are_matched_by_position() -> None:
    first, second = (model(BODY.format(*names)) for names in ("xvy", "xuz"))
    verdict = verify(first, second)
    assert verdict.passed and verdict.reason == "matched by position: u as v, z as y"
    assert verdict.summary().endswith("matched by position: u as v, z as y; 0 folds proved, 0 compared only")
    assert verify(first, model(BODY.format(*"xuz").replace("Sin", "Cos"))).status == "failed"
    # Another order or shape is no match.
    assert "inputs differ" in verify(first, model(BODY.format(*"vxy"))).reason
    assert "inputs differ" in verify(first, model(BODY.format(*"uwy").replace("N,4", "N,5"))).reason
