"""Sums of branches in ONNX text, and the check that each fold of one is right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.onnx_text import assert_near, batch_norm, exact, make_inputs, model, operators, run

X = "float[N,4,H,W] x"
Y = "float[N,A,B,D] y"
# Parameters that a case may name: square convolutions of four channels, affine maps, batch norms.
SHAPES: dict[str, tuple[int, ...]] = {
    "w1": (4, 4, 1, 1),
    "v1": (4, 4, 1, 1),
    "w2": (4, 4, 2, 2),
    "w3": (4, 4, 3, 3),
    "v3": (4, 4, 3, 3),
    "w5": (4, 4, 5, 5),
    "w13": (4, 4, 1, 3),
    "w31": (4, 4, 3, 1),
    "d1": (4, 1, 1, 1),
    "d3": (4, 1, 3, 3),
    "g3": (4, 2, 3, 3),
    "one": (1, 4, 1, 1),
    "wide": (8, 4, 1, 1),
    "narrow": (4, 8, 3, 3),
    "less": (2, 4, 1, 1),
    "more": (4, 2, 3, 3),
    "b": (4,),
    "c_s": (4, 1, 1),
    "full": (1, 4, 7, 7),
    "scalar": (1,),
    "last": (7,),
    "m": (7, 7),
    "m2": (7, 7),
    **batch_norm("p", 4),
    **batch_norm("q", 4),
}
BN = "BatchNormalization"
PAD = "pads=[1,1,1,1]"
VALUES = {
    "pads1": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    "crop": np.array([0, 0, -1, -1, 0, 0, -1, -1]),
    "backwards": np.array([1, 1, 0, 0, 1, 1, 0, 0]),
    "minus1": np.array([-1]),
    "far": np.array([-(2**63) + 1]),
    "zero": np.array([0]),
    "unit": np.ones(1, np.float32),
    "ones": np.array([1, 1]),
    "sixes": np.array([6, 6]),
    "axes23": np.array([2, 3]),
    "w2b": np.random.default_rng(3).standard_normal((4, 4, 2, 2)).astype(np.float32),
}


def named(nodes: str, names: object) -> list[str]:
    words = "".join(letter if letter.isalnum() or letter == "_" else " " for letter in nodes).split()
    return [name for name in names if name in words]  # type: ignore[attr-defined]


def build(
    nodes: str, inputs: str = X, outputs: str = Y, dtype: str = "float32", **values: np.ndarray
) -> onnx.ModelProto:
    """The parameters that the nodes name become initializers."""
    shapes = {name: SHAPES[name] for name in named(nodes, SHAPES) if name not in values}
    values = {**{name: VALUES[name] for name in named(nodes, VALUES)}, **values}
    return model(f"g ({inputs}) => ({outputs}) {{ {nodes} }}", shapes, values=values, dtype=dtype)


def check(
    proto: onnx.ModelProto, expected: list[str], oracle: Callable[..., list[np.ndarray]] = exact, **options: object
) -> onnx.ModelProto:
    """Folds; these operators are left, and the outputs are those of the source, to float64's eye."""
    untouched, inputs = proto.SerializeToString(), make_inputs(proto)
    result = fold(proto, verify=False, **options)  # type: ignore[arg-type]
    folded = to_proto(result.model)
    assert proto.SerializeToString() == untouched
    onnx.checker.check_model(folded)
    for value, got, right in zip(folded.graph.output, run(folded, inputs), oracle(proto, inputs), strict=True):
        assert_near(got, right, value.name)
    reasons = [(site.nodes, site.summary or site.reason) for site in result.report.sites]
    assert sorted(operators(folded)) == sorted(expected), reasons
    assert len(folded.graph.node) <= len(proto.graph.node)
    return folded
