"""The algebra against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bnexport.folding.affine import FLOAT_TYPES, ChannelAffine, check_scaled, round_scaled, round_vector
from bnexport.folding.refusal import Refused

NUMBERS = st.floats(-100, 100, allow_nan=False).filter(lambda value: value == 0 or abs(value) > 1e-3)
VECTORS = st.lists(NUMBERS, min_size=3, max_size=3).map(np.array)
MAPS = st.builds(ChannelAffine, VECTORS, VECTORS, VECTORS)
X = np.array([[-2.0, 0.0, 5.0], [1.0, 3.5, -0.25]])


def near(first: np.ndarray, second: np.ndarray, size: float) -> None:
    """A few roundings of values up to `size`."""
    np.testing.assert_allclose(first, second, rtol=0, atol=8 * 2.0**-53 * size)


@given(MAPS, MAPS)
def test_composition(first: ChannelAffine, second: ChannelAffine) -> None:
    size = (100 * (105 + 100) + 300) * 100 + 300
    near(first.then(second).apply(X), second.apply(first.apply(X)), size)


@given(MAPS)
def test_offset_is_the_image_of_zero(affine: ChannelAffine) -> None:
    near(affine.offset, affine.apply(np.zeros(3)), 10_200)
    near(affine.scale * X + affine.offset, affine.apply(X), 21_000)


@given(VECTORS, VECTORS, VECTORS, st.lists(st.floats(0.01, 100), min_size=3, max_size=3).map(np.array), st.floats(0, 1))
def test_batch_norm(gamma: np.ndarray, beta: np.ndarray, mean: np.ndarray, var: np.ndarray, eps: float) -> None:
    affine = ChannelAffine.from_batch_norm(gamma, beta, mean, var, eps)
    near(affine.apply(X), gamma * (X - mean) / np.sqrt(var + eps) + beta, 120_000)


def test_slices_and_repeats() -> None:
    affine = ChannelAffine(np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([5.0, 6.0]))
    assert affine.take(slice(1, 2)).shift.tolist() == [6.0]
    assert affine.repeat(2).scale.tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("name", FLOAT_TYPES)
def test_one_rounding_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnexport.folding.affine._BLOCK", 16)
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((7, 5, 3)).astype(FLOAT_TYPES[name])
    factor = generator.standard_normal((7, 1, 1))
    expected = (weight.astype(np.float64) * factor).astype(FLOAT_TYPES[name])
    np.testing.assert_array_equal(round_scaled(weight, factor).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(
    ("name", "value", "factor", "code"),
    [
        ("float16", 60000.0, 2.0, "overflow"),
        ("bfloat16", 3e38, 2.0, "overflow"),
        ("float32", 3e38, 2.0, "overflow"),
        ("float16", 6.2e-5, 0.5, "underflow"),
        ("float32", 1.2e-38, 0.5, "underflow"),
        ("float32", np.inf, 0.5, "not-finite"),
        ("float16", 60000.0, 1.0, None),
        ("float16", 6.2e-5, 1.0, None),
        ("float16", 0.0, 1e-30, None),
        ("float16", 1.0, 0.0, None),
    ],
)
def test_what_a_type_can_hold(name: str, value: float, factor: float, code: str | None) -> None:
    weight = np.full((2, 2), value).astype(FLOAT_TYPES[name])
    if code is None:
        check_scaled(weight, np.full((2, 1), factor), weight.dtype)
        return
    with pytest.raises(Refused) as caught:
        check_scaled(weight, np.full((2, 1), factor), weight.dtype)
    assert caught.value.code == code


def test_small_elements_beside_a_large_one() -> None:
    """A tiny element of a slice may round to zero: its error is below that of the largest one."""
    weight = np.array([[1.0, 6e-8]], np.float16)
    factor = np.array([[0.1]])
    check_scaled(weight, factor, weight.dtype)
    error = np.abs(round_scaled(weight, factor).astype(np.float64) - weight.astype(np.float64) * factor)
    assert error.max() <= 2.0**-11 * 0.1


def test_dead_channels_of_float32() -> None:
    """A channel at 1e-78 beside one at 1 is nothing; alone it would be the whole layer."""
    factor = np.array([[1.0], [1e-40]])
    check_scaled(np.array([[1.0], [1e-38]], np.float32), factor, np.dtype(np.float32))
    for weight, dtype in (([[1e-38], [1e-38]], np.float32), ([[1.0], [1.0]], np.float16)):
        with pytest.raises(Refused):
            check_scaled(np.array(weight, dtype), np.array([[1e-20], [1e-40]]), np.dtype(dtype))


def test_a_vector_may_cancel_but_not_flush() -> None:
    half = np.dtype(np.float16)
    assert round_vector(np.array([1e-12]), half, "bias", magnitude=np.array([1.0])) == 0
    with pytest.raises(Refused, match="flush"):
        round_vector(np.array([1e-12]), half, "bias", magnitude=np.array([1e-12]))
    with pytest.raises(Refused, match="flush"):
        round_vector(np.array([1e-12]), half, "bias")
