"""Numbers of one array that have bounds of their own: operands of a Concat, and what a Softmax masks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from bnexport import verify
from bnexport.verification.probing import find_parted, without_masked
from tests.support.onnx_text import model

NUMBERS = {
    **{"size": np.float32(640), "off": np.float32(1e-3), "k": np.eye(4, dtype=np.float32)},
    **{"two": np.array([2, 2]), "row": np.ones((1, 4), np.float32)},
}
BODY = "g (float[N,4] x) => (float[A,B] y) {{ b = Mul (x, size)\n s = Sigmoid (x)\n {} }}"
PARTED = {
    "plain": "y = Concat <axis = -1> (b, s)",
    "transposed": "c = Concat <axis = 1> (b, s)\n i = Identity (c)\n y = Transpose <perm = [1, 0]> (i)",
    "twice": "t = Transpose <perm = [1, 0]> (s)\n u = Transpose <perm = [1, 0]> (b)\n y = Concat <axis = 0> (u, t)",
}


class TestParts:
    @pytest.mark.parametrize("name", PARTED)
    def test_small_numbers_beside_large_ones(self, name: str) -> None:
        right = model(BODY.format(PARTED[name]), values=NUMBERS)
        wrong = model(
            BODY.format(PARTED[name]).replace("s = Sigmoid (x)", "h = Sigmoid (x)\n s = Add (h, off)"), values=NUMBERS
        )
        result = verify(right, wrong)
        assert result.status == "failed"
        assert "of Concat" in result.reason
        assert verify(right, right).passed

    def test_the_candidate_may_make_the_output_in_another_way(self) -> None:
        """Its operands have other sizes, or it has no Concat."""
        split = "v, w = Split <axis = 1> (b, two)\n y = Concat <axis = 1> (v, w, s)"
        transposed = f"{PARTED['transposed'].replace('y =', 'z =')}\n y = Transpose <perm = [1, 0]> (z)"
        first = model(BODY.format(PARTED["plain"]), values=NUMBERS)
        for nodes in (split, transposed, "c = Concat <axis = 1> (b, s)\n h = Neg (c)\n y = Neg (h)"):
            second = model(BODY.format(nodes), values=NUMBERS)
            assert verify(first, second).passed
            assert verify(second, first).passed

    @pytest.mark.parametrize(
        ("nodes", "places"),
        [
            *((nodes, [place]) for nodes, place in zip(PARTED.values(), (-1, 0, 0), strict=True)),
            ("c = Concat <axis = 1> (b, s)\n y = Relu (c)", []),
            ("y = Concat <axis = 0> (b, row)", []),
            ("y = Concat <axis = 1> (b, x)", []),
            ("y = Concat <axis = 1> (b)", []),
        ],
    )
    def test_which_outputs_have_parts(self, nodes: str, places: list[int]) -> None:
        found = find_parted(ir.from_proto(model(BODY.format(nodes), values=NUMBERS)))
        assert [each.output_axis for each in found] == places

    def test_a_constant_part_decides_nothing_on_smaller_inputs(self) -> None:
        """exp (x) overflows at first; the size is the same for all inputs."""
        body = """g (float[N,4] x) => (float[N,8] y) {
            a = Mul (x, size)
            e = Exp (a)
            d = Shape (x)
            f = Expand (row, d)
            y = Concat <axis = 1> (e, f) }"""
        proto = model(body, values=NUMBERS)
        result = verify(proto, proto, method="whole")
        assert result.passed
        assert result.input_scale < 1


class TestMasks:
    def test_only_numbers_far_below_the_largest(self) -> None:
        rows = np.array([[0, 3, -1e9], [1, 2, -np.inf], [1, 2, -700], [np.nan, 1, -1e9], [np.inf, 1, -1e9]], np.float32)
        expected = rows.copy()
        expected[:2, 2] = 0, 1
        np.testing.assert_array_equal(without_masked(rows, 1), expected)
        np.testing.assert_array_equal(without_masked(rows.T, 0), expected.T)
        hidden = np.full((2, 3), -np.inf, np.float32)
        np.testing.assert_array_equal(without_masked(hidden, 1), hidden)
