"""Numbers of one array that have bounds of their own: operands of a Concat, and what a Softmax masks."""

from __future__ import annotations

import numpy as np
import onnx
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
ANOTHER = {
    "split": "v, w = Split <axis = 1> (b, two)\n y = Concat <axis = 1> (v, w, s)",
    "transposed": f"{PARTED['transposed'].replace('y =', 'z =')}\n y = Transpose <perm = [1, 0]> (z)",
    "negated": "c = Concat <axis = 1> (b, s)\n h = Neg (c)\n y = Neg (h)",
}


def built(nodes: str) -> onnx.ModelProto:
    return model(BODY.format(nodes), values=NUMBERS)


@pytest.mark.parametrize("name", PARTED)
def test_small_numbers_beside_large_ones(name: str) -> None:
    right = built(PARTED[name])
    wrong = BODY.format(PARTED[name]).replace("s = Sigmoid (x)", "h = Sigmoid (x)\n s = Add (h, off)")
    result = verify(right, model(wrong, values=NUMBERS))
    assert result.status == "failed" and "of Concat" in result.reason
    assert verify(right, right).passed


@pytest.mark.parametrize("name", ANOTHER)
def test_the_candidate_may_make_the_output_in_another_way(name: str) -> None:
    """Its operands have other sizes, or it has no Concat."""
    first, second = built(PARTED["plain"]), built(ANOTHER[name])
    assert verify(first, second).passed
    assert verify(second, first).passed


@pytest.mark.parametrize(
    ("nodes", "places"),
    [
        *((nodes, [place]) for nodes, place in zip(PARTED.values(), (-1, 0, 0), strict=True)),
        ("c = Concat <axis = 1> (b, s)\n y = Relu (c)", []),
        *(
            (f"y = Concat {operands}", [])
            for operands in ("<axis = 0> (b, row)", "<axis = 1> (b, x)", "<axis = 1> (b)")
        ),
    ],
)
def test_which_outputs_have_parts(nodes: str, places: list[int]) -> None:
    assert [each.output_axis for each in find_parted(ir.from_proto(built(nodes)))] == places


def test_a_constant_part_decides_nothing_on_smaller_inputs() -> None:
    """exp (x) overflows at first; the size is the same for all inputs."""
    proto = model(
        """g (float[N,4] x) => (float[N,8] y) { a = Mul (x, size) e = Exp (a) d = Shape (x) f = Expand (row, d)
        y = Concat <axis = 1> (e, f) }""",
        values=NUMBERS,
    )
    result = verify(proto, proto, method="whole")
    assert result.passed and result.input_scale < 1


def test_only_numbers_far_below_the_largest_are_masked() -> None:
    rows = np.array([[0, 3, -1e9], [1, 2, -np.inf], [1, 2, -700], [np.nan, 1, -1e9], [np.inf, 1, -1e9]], np.float32)
    expected = rows.copy()
    expected[:2, 2] = 0, 1
    np.testing.assert_array_equal(without_masked(rows, 1), expected)
    np.testing.assert_array_equal(without_masked(rows.T, 0), expected.T)
    hidden = np.full((2, 3), -np.inf, np.float32)
    np.testing.assert_array_equal(without_masked(hidden, 1), hidden)
