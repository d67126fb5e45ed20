"""Sizes that contradict each other, with which a model runs on no input: its batch norm stays, for a reason that names them."""

from __future__ import annotations

import pytest

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.onnx_text import batch_norm, model, operators

NORM = batch_norm("p", 8)
# (nodes that read x (N, 6, H, W), shapes, the reason)
WRONG = {
    "scales-behind-fewer-channels": ("z = Conv (x, w)\n y = BatchNormalization (z, p_s, p_b, p_m, p_v)",
        {"w": (4, 6, 3, 3), **batch_norm("p", 7)}, "Conv makes 4 channels, the map has 7"),
    "vectors-of-two-lengths": ("z = Conv (x, w)\n y = BatchNormalization (z, p_s, p_b, p_m, p_v)",
        {"w": (8, 6, 3, 3), **NORM, "p_m": (5,)}, "its parameters have 8, 8, 5 and 8 elements"),
    "a-matrix-of-means": ("z = Conv (x, w)\n y = BatchNormalization (z, p_s, p_b, p_m, p_v)",
        {"w": (8, 6, 3, 3), **NORM, "p_m": (8, 1)}, "the mean has shape (8, 1), expected one value for each channel"),
    "in-a-branch": (
        """y = If (b) <then_branch = t () => (o) { z = Conv (x, w)
            o = BatchNormalization (z, p_s, p_b, p_m, p_v) }, else_branch = e () => (q) { q = Identity (x) }>""",
        {"w": (4, 6, 3, 3), **NORM},
        "Conv makes 4 channels, the map has 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "shapes", "reason"), WRONG.values(), ids=WRONG.keys())
def test_a_batch_norm_of_other_sizes_stays(nodes: str, shapes: dict[str, tuple[int, ...]], reason: str) -> None:
    inputs = "float[N,6,H,W] x" + (", bool b" if "If (b)" in nodes else "")
    proto = model(f"g ({inputs}) => (float y) {{ {nodes} }}", shapes)
    before = operators(proto)
    result = fold(proto)
    (site,) = result.report.sites
    assert reason in site.reason
    assert not result.report.folded
    assert operators(to_proto(result.model)) == before
