"""Maps read from batch norms and arithmetic, and each reason for which a node is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.sites import read_batch_norm, read_elementwise, varying_axis
from bnexport.graph.nodes import Refused
from tests.support.contexts import context_of
from tests.support.onnx_text import model

X = "float[N,4,H,W] x"


def elementwise(node: str, opset: int = 17, inputs: str = X, **constants: Any) -> ChannelAffine:
    values = {name: np.asarray(array, np.float32) for name, array in constants.items()}
    proto = model(f"g ({inputs}) => (float[N,4,H,W] y) {{ y = {node} }}", values=values, opset=opset)
    context = context_of(proto, opset)
    return read_elementwise(context.model.graph[0], 1, 4, context)


VECTOR = [1.0, 2.0, 4.0, 8.0]


def test_constants_by_axis_before_opset_7() -> None:
    for start, shape in ((0, (1, 4)), (1, (4,)), (1, (4, 1, 1)), (0, (1, 4, 1, 1))):
        node = f"Mul <broadcast=1, axis={start}> (x, d)"
        assert elementwise(node, 6, d=np.reshape(VECTOR, shape)).scale.tolist() == VECTOR
    for start, shape in ((-1, (4,)), (2, (4, 1, 1))):
        with pytest.raises(Refused, match=f"broadcasts from axis {start} on"):
            elementwise(f"Mul <broadcast=1, axis={start}> (x, d)", 6, d=np.reshape(VECTOR, shape))
    with pytest.raises(Refused, match="no constant operand"):
        elementwise("Mul <broadcast=1> (d, x)", 6, d=np.reshape(VECTOR, (4, 1, 1)))


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
    for node, constant, inputs, message in (
        ("Div (d, x)", column, X, "divides a constant"),
        ("Div (x, d)", 0 * column, X, "divides by zero"),
        ("Mul (x, d)", VECTOR, X, "varies along another axis than 1"),
        ("Mul (x, d)", VECTOR[:3], "float[N,M] x", "the constant has 3 values, the channel axis 4"),
        ("Mul (x, d)", [VECTOR], "float[M] x", "a constant of rank 2 enlarges data of rank 1"),
        ("Mul (x, d)", column, "float[] x", "the rank of the data is not known"),
        ("Mul (x, d)", [[3.0]], "float[] x", "the rank of the data is not known"),
        ("Pow (x, d)", column, X, "Pow has no constant operand"),
    ):
        with pytest.raises(Refused, match=message):
            elementwise(node, inputs=inputs, d=constant)


def test_the_axis_along_which_a_constant_varies() -> None:
    shapes = [(4, 1, 1), (1, 4, 1, 1), (4,), (1, 1, 1, 4), (4, 4), (1,), (1, 1, 4, 1, 1)]
    assert [varying_axis(np.ones(shape), 4) for shape in shapes] == [1, 1, 3, 3, None, None, None]


def test_a_scale_that_may_be_divided_by() -> None:
    assert ChannelAffine.scaling(np.array([0.5, -4.0])).inverse_scale(2.0).tolist() == [2.0, -0.25]
    with pytest.raises(Refused, match="would be divided by"):
        ChannelAffine.scaling(np.array([0.5, -4.0])).inverse_scale(1.9)


def norm(inputs: str, source: str = "float[N,4,H,W] x", opset: int = 17, attributes: str = "", **changed: Any) -> None:
    values = {name: np.ones(4, np.float32) for name in "sbmv"}
    values |= {name: np.asarray(array, np.float32) for name, array in changed.items()}
    text = f"g ({source}) => (float[N,4,H,W] y) {{ y = BatchNormalization {attributes} ({inputs}) }}"
    context = context_of(model(text, values=values, opset=opset), opset)
    read_batch_norm(context.model.graph[0], context)


ALL_INPUTS = "x, s, b, m, v"
NORMS: list[tuple[str, str, dict[str, Any]]] = [
    ("bad-node", "it has 4 inputs, expected 5", {"inputs": "x, s, b, m"}),
    ("bad-node", "it has no input", {"inputs": '"", s, b, m, v'}),
    ("rank", "its input has rank 1: one channel, without an axis", {"source": "float[N] x"}),
    ("shape", "its parameters have 4, 3, 4 and 4 elements", {"b": np.ones(3)}),
    ("shape", r"the mean has shape \(1, 4\)", {"m": np.ones((1, 4))}),
    ("not-finite", "the variance holds", {"v": [1, 1, np.inf, 1]}),
    ("not-finite", "the bias holds", {"b": [1, 1, np.nan, 1]}),
    ("negative-variance", "smallest -0.5", {"v": [1, 1, -0.5, 1]}),
    ("zero-variance", "is 0 in a channel", {"v": [1, 1, 0, 1], "attributes": "<epsilon=0.0>"}),
    ("bad-epsilon", "epsilon is -1", {"attributes": "<epsilon=-1.0>"}),
    ("scale", "the bound is 1e", {"s": [1, 1, 1e7, 1]}),
    ("training", "--training-to-inference", {"attributes": "<training_mode=1>"}),
    ("not-per-channel", "where channels are meant", {"attributes": "<spatial=0>", "opset": 7}),
    ("not-per-channel", "where channels are meant", {"attributes": "<spatial=0>", "opset": 17}),
    ("not-per-channel", "a mean for every position", {"attributes": "<spatial=0>", "opset": 7, "m": np.ones((4, 1))}),
    ("unknown-attribute", "'other'", {"attributes": "<other=0>"}),
]


@pytest.mark.parametrize(("code", "message", "options"), NORMS)
def test_batch_norms(code: str, message: str, options: dict[str, Any]) -> None:
    norm(ALL_INPUTS)
    with pytest.raises(Refused, match=message) as caught:
        norm(**{"inputs": ALL_INPUTS, **options})
    assert caught.value.code == code
