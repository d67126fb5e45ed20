"""The algebra against its definition, and maps read from arithmetic; why a node is none is in refusals.txt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bnexport.folding.affine import ChannelAffine, check_range, round_vector
from bnexport.folding.sites import read_elementwise, varying_axis
from bnexport.graph.nodes import Refused
from tests.support.contexts import context_of
from tests.support.onnx_text import model

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
    half, tiny = np.dtype(np.float16), np.array([1e-12])
    assert round_vector(tiny, half, "bias", magnitude=np.array([1.0])) == 0
    for magnitude in (tiny, None):
        with pytest.raises(Refused, match="flush"):
            round_vector(tiny, half, "bias", magnitude=magnitude)


def test_a_small_weight_may_stay_but_not_shrink() -> None:
    largest, single = np.array([1e-40]), np.dtype(np.float32)
    check_range(largest, np.ones(1), single)
    with pytest.raises(Refused, match="loses bits"):
        check_range(largest, np.array([0.9]), single)


@pytest.mark.parametrize("eps", [-1.0, np.inf, np.nan])
def test_an_epsilon_that_is_none(eps: float) -> None:
    with pytest.raises(Refused, match=f"epsilon is {eps}"):
        ChannelAffine.from_batch_norm(*np.ones((4, 3)), eps)


def elementwise(node: str, opset: int = 17, inputs: str = "float[N,4,H,W] x", **constants: Any) -> ChannelAffine:
    values = {name: np.asarray(array, np.float32) for name, array in constants.items()}
    proto = model(f"g ({inputs}) => (float[N,4,H,W] y) {{ y = {node} }}", values=values, opset=opset)
    context = context_of(proto, opset)
    return read_elementwise(context.model.graph[0], 1, 4, context)


VECTOR = [1.0, 2.0, 4.0, 8.0]


def test_constants_by_axis_before_opset_7() -> None:
    for start, shape in ((0, (1, 4)), (1, (4,)), (1, (4, 1, 1)), (0, (1, 4, 1, 1))):
        node = f"Mul <broadcast=1, axis={start}> (x, d)"
        assert elementwise(node, 6, d=np.reshape(VECTOR, shape)).scale.tolist() == VECTOR


def test_constants() -> None:
    column = np.reshape(VECTOR, (4, 1, 1))
    assert elementwise("Add (x, d)", d=column).offset.tolist() == VECTOR
    assert elementwise("Sub (x, d)", d=column).center.tolist() == VECTOR
    flipped = elementwise("Sub (d, x)", d=column)
    assert (flipped.scale.tolist(), flipped.offset.tolist()) == ([-1.0] * 4, VECTOR)
    assert elementwise("Div (x, d)", d=column).scale.tolist() == [1, 0.5, 0.25, 0.125]
    assert elementwise("Mul (x, d)", d=3.0).scale.tolist() == [3.0] * 4
    assert elementwise("Mul (x, d)", d=[[[3.0]]]).scale.tolist() == [3.0] * 4
    assert elementwise("Mul (d, x)", 7, d=column).scale.tolist() == VECTOR
    for one in (3.0, [3.0]):  # of no axis, whatever the rank of the data
        assert elementwise("Mul (x, d)", inputs="float[] x", d=one).scale.tolist() == [3.0] * 4
    assert elementwise("Mul (x, d)", inputs="float[N,M] x", d=VECTOR).scale.tolist() == VECTOR


def test_the_axis_along_which_a_constant_varies() -> None:
    shapes = [(4, 1, 1), (1, 4, 1, 1), (4,), (1, 1, 1, 4), (4, 4), (1,), (1, 1, 4, 1, 1)]
    assert [varying_axis(np.ones(shape), 4) for shape in shapes] == [1, 1, 3, 3, None, None, None]


def test_a_scale_that_may_be_divided_by() -> None:
    assert ChannelAffine.scaling(np.array([0.5, -4.0])).inverse_scale(2.0).tolist() == [2.0, -0.25]
    with pytest.raises(Refused, match="would be divided by"):
        ChannelAffine.scaling(np.array([0.5, -4.0])).inverse_scale(1.9)
