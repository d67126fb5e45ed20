"""What finds no place, in the form that was asked for: a depthwise 1x1 Conv, or Mul and Add."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bnexport.errors import UsageError
from bnexport.folding import fold
from tests.folding.test_lone import random_chain
from tests.support.onnx_text import batch_norm, batch_norms, model, operators_of


def graph(body: str, inputs: str = "float[N,8,H,W] x", result: str = "float[N,8,H,W] y") -> str:
    return f"g ({inputs}) => ({result}) {{ {body.replace('NORM', 'BatchNormalization')} }}"


def norm(value: str, prefix: str = "p") -> str:
    return f"NORM ({value}, {prefix}_s, {prefix}_b, {prefix}_m, {prefix}_v)"


P = batch_norm("p", 8)


def test_what_is_neutral_is_left_out() -> None:
    values = {"p_s": np.ones(8), "p_b": np.arange(8.0), "p_m": np.zeros(8), "p_v": np.ones(8)}
    floats = {name: value.astype(np.float32) for name, value in values.items()}
    body = "r = Relu (x)\n y = BatchNormalization <epsilon = 0.0> (r, p_s, p_b, p_m, p_v)"
    text = f"g (float[N,8,H,W] x) => (float[N,8,H,W] y) {{ {body} }}"
    assert operators_of(fold(model(text, values=floats), leftover="arithmetic")) == ["Relu", "Add"]
    floats["p_b"] *= 0
    floats["p_s"] *= 2
    assert operators_of(fold(model(text, values=floats), leftover="arithmetic")) == ["Relu", "Mul"]
    floats["p_s"] /= 2
    assert operators_of(fold(model(text, values=floats), leftover="arithmetic")) == ["Relu", "Add"]


def test_what_cannot_be_read_stays_with_its_reason() -> None:
    trains = "y, m, v = BatchNormalization <training_mode = 1> (x, p_s, p_b, p_m, p_v)"
    proto = model(f"g (float[N,8,H,W] x) => (float[N,8,H,W] y) {{ {trains} }}", P)
    result = fold(proto, leftover="conv")
    assert operators_of(result) == ["BatchNormalization"]
    assert "training" in result.report.sites[0].reason
    old = model(
        f"g (float[2,8,4,4] x) => (float[2,8,4,4] y) {{ r = Relu (x)\n y = {norm('r').replace('NORM', 'BatchNormalization')} }}",
        P,
        opset=6,
    )
    old.graph.node[1].attribute.append(onnx.helper.make_attribute("is_test", 1))
    assert operators_of(fold(old, leftover="conv")) == ["Relu", "Conv"]
    kept = fold(old, leftover="arithmetic")
    assert operators_of(kept) == ["Relu", "BatchNormalization"]
    assert "before opset 7" in kept.report.sites[0].reason


def test_skipped_and_chosen_ones() -> None:
    body = f"a = {norm('x')}\n r = Relu (a)\n y = {norm('r', 'q')}"
    proto = model(graph(body), P | batch_norm("q", 8))
    proto.graph.node[0].name, proto.graph.node[2].name = "first", "second"
    assert operators_of(fold(proto, leftover="conv", skip=["first"])) == ["BatchNormalization", "Relu", "Conv"]
    assert operators_of(fold(proto, leftover="conv", only=["first"])) == ["Conv", "Relu", "BatchNormalization"]


def test_another_word_is_refused() -> None:
    with pytest.raises(UsageError, match=r"leftover: got 'dwconv', expected one of batch-norm, conv, arithmetic"):
        fold(model(graph(f"y = {norm('x')}"), P), leftover="dwconv")  # type: ignore[arg-type]


def test_half_precision_and_large_means() -> None:
    """The shift is rounded once, though it is the difference of large numbers."""
    values = {"p_s": np.full(8, 2.0), "p_b": np.full(8, 0.1), "p_m": np.full(8, 1000.0), "p_v": np.ones(8)}
    proto = model(graph(f"y = {norm('x')}"), values={name: value.astype(np.float32) for name, value in values.items()})
    result = fold(proto, leftover="conv", verify="local")
    (bias,) = (each for each in result.model.graph.initializer if list(each.dims) == [8])
    scale = 2.0 / np.sqrt(1.0 + float(np.float32(1e-5)))
    exact = float(np.float32(0.1)) - scale * 1000.0
    assert np.array_equal(onnx.numpy_helper.to_array(bias), np.full(8, np.float32(exact)))


def check_random(seeds: range) -> None:
    restated = 0
    for seed in seeds:
        for form in ("conv", "arithmetic"):
            result = fold(random_chain(seed, norms=True), leftover=form)
            assert batch_norms(result.model) == 0, (seed, form)
            verdict = result.report.verification
            assert verdict is None or verdict.passed, (seed, form, verdict)
            restated += sum(site.outcome == "restated" for site in result.report.sites)
    assert restated > len(seeds) // 3


def test_random_chains() -> None:
    check_random(range(12))


@pytest.mark.slow
def test_300_random_chains() -> None:
    check_random(range(2000, 2150))
