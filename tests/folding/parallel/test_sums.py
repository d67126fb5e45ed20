"""Sums of branches beyond the corpus: in bodies and functions, chosen and skipped, their report and their names."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.onnx_text import fold_and_check, model, operators

X = "float[N,4,H,W] x"
BN, PAD = "BatchNormalization", "pads=[1,1,1,1]"
BLOCK = f"a = Conv (x, w1:4.4.1.1) c = Conv <{PAD}> (x, w3:4.4.3.3, b:4) t = Add (a, c) s = Add (t, x) y = Relu (s)"
NORMS = (
    f"n = Norm (x, p:4) c = Conv <{PAD}> (x, w3:4.4.3.3) d = Norm (c, q:4) s = Add (n, d) r = Relu (s) y = Add (r, s)"
)


def build(nodes: str, inputs: str = X, **options: object) -> onnx.ModelProto:
    return model(f"g ({inputs}) => (float[N,A,B,C] y) {{ {nodes} }}", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "shape"), [("w1", (4, 4, 1, 1)), ("b", 4)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_parameter_that_is_not_finite_stays(value: float, name: str, shape: tuple[int, ...] | int) -> None:
    folded = to_proto(fold(build(BLOCK, values={name: np.full(shape, value, np.float32)}), verify=False).model)
    assert operators(folded) == ["Conv", "Conv", "Add", "Relu"], "the other two are merged"
    assert not all(np.isfinite(onnx.numpy_helper.to_array(tensor)).all() for tensor in folded.graph.initializer)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, ["Conv"]), ({"only": ["parallel"]}, ["Conv"]), ({"skip": ["parallel"]}, [BN, "Conv", "Add"]),
        ({"skip": [f"{BN} -> n"]}, [BN, "Conv", "Add"]), ({"skip": [f"{BN} -> d"]}, [BN, BN, "Conv", "Add"]),
        ({"only": [f"{BN} -> d"]}, [BN, "Conv", "Add"]), ({"only": [f"{BN} -> n", f"{BN} -> d"]}, ["Conv"]),
    ],
)  # fmt: skip
def test_selection(options: dict[str, list[str]], left: list[str]) -> None:
    folded, _ = fold_and_check(build(NORMS), left=left.count(BN), **options)
    assert sorted(operators(folded)) == sorted([*left, "Relu", "Add"])


def test_the_report_has_a_line_for_each_merge() -> None:
    result = fold(build(NORMS))
    (site,) = result.report.sites
    assert (site.outcome, site.rules, site.channels) == ("folded", ("parallel",), 4)
    assert site.summary == "2 branches, 2 batch norms -> 1 Conv 3x3"
    assert set(site.nodes) == {f"{BN} -> n", "Conv -> c", f"{BN} -> d", "Add -> s"}
    assert set(site.targets) <= {node.name for node in result.model.graph.node}
    assert result.report.verification.passed
    sites = fold(
        build(f"r = Relu (x) {BLOCK.replace(' t =', ' n = Norm (r, p:4) t =')[:-12]} y = Mul (s, n)")
    ).report.sites
    assert [each.nodes[-1] for each in sites] == [f"{BN} -> n", "Add -> s"]


def test_names_are_kept() -> None:
    """The convolution that carries the sum keeps its name and its weight's, the sum's value its name."""
    proto = build(BLOCK)
    proto.graph.node[1].name = "block.conv3"
    folded = to_proto(fold(proto, verify=False).model)
    assert folded.graph.node[0].name == "block.conv3"
    assert folded.graph.node[0].output[0] == "s"
    assert {tensor.name for tensor in folded.graph.initializer} == {"w3", "b"}
