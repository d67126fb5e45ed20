"""The algebra against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bnexport.folding.affine import ChannelAffine, round_vector
from bnexport.graph.nodes import Refused

NUMBERS = st.floats(-100, 100, allow_nan=False).filter(lambda value: value == 0 or abs(value) > 1e-3)
VECTORS = st.lists(NUMBERS, min_size=3, max_size=3).map(np.array)
MAPS = st.builds(ChannelAffine, VECTORS, VECTORS, VECTORS)
X = np.array([[-2.0, 0.0, 5.0], [1.0, 3.5, -0.25]])


def near(first: np.ndarray, second: np.ndarray, size: float) -> None:
    """A few roundings of values up to `size`."""
    np.testing.assert_allclose(first, second, rtol=0, atol=8 * 2.0**-53 * size)


@settings(deadline=None)
@given(MAPS, MAPS)
def test_composition(first: ChannelAffine, second: ChannelAffine) -> None:
    size = (100 * (105 + 100) + 300) * 100 + 300
    near(first.then(second).apply(X), second.apply(first.apply(X)), size)


@settings(deadline=None)
@given(MAPS)
def test_offset_is_the_image_of_zero(affine: ChannelAffine) -> None:
    near(affine.offset, affine.apply(np.zeros(3)), 10_200)
    near(affine.scale * X + affine.offset, affine.apply(X), 21_000)


@settings(deadline=None)
@given(VECTORS, VECTORS, VECTORS, st.lists(st.floats(0.01, 100), min_size=3, max_size=3).map(np.array), st.floats(0, 1))
def test_batch_norm(gamma: np.ndarray, beta: np.ndarray, mean: np.ndarray, var: np.ndarray, eps: float) -> None:
    affine = ChannelAffine.from_batch_norm(gamma, beta, mean, var, eps)
    near(affine.apply(X), gamma * (X - mean) / np.sqrt(var + eps) + beta, 120_000)


def test_slices_and_repeats() -> None:
    affine = ChannelAffine(np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([5.0, 6.0]))
    assert affine.take(slice(1, 2)).shift.tolist() == [6.0]
    assert affine.repeat(2).scale.tolist() == [1.0, 1.0, 2.0, 2.0]


def test_a_vector_may_cancel_but_not_flush() -> None:
    half = np.dtype(np.float16)
    assert round_vector(np.array([1e-12]), half, "bias", magnitude=np.array([1.0])) == 0
    with pytest.raises(Refused, match="flush"):
        round_vector(np.array([1e-12]), half, "bias", magnitude=np.array([1e-12]))
    with pytest.raises(Refused, match="flush"):
        round_vector(np.array([1e-12]), half, "bias")


@pytest.mark.parametrize("eps", [-1.0, np.inf, np.nan])
def test_an_epsilon_that_is_none(eps: float) -> None:
    with pytest.raises(Refused, match=f"epsilon is {eps}"):
        ChannelAffine.from_batch_norm(*np.ones((4, 3)), eps)
