"""Outputs that are indices, sequences, or parts with bounds of their own: what rounding explains is no difference."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bnexport import verify
from bnexport.folding import fold
from bnexport.runtime.engine import Serialised
from bnexport.verification.file_job import FileJob
from bnexport.verification.probing import find_front, find_parted, without_masked
from tests.support.onnx_text import array_of, model, with_arrays

HEAD = """g (float16[N,3,H,W] x) => (int64[{}] y) {{ c = Conv <pads = [1, 1, 1, 1]> (x, w:16.3.3.3) b = Norm (c, p:16)
    r = Relu (b) z = Conv (r, u:5.16.1.1) {} }}"""
MAXIMUM = "ArgMax <axis = 1, keepdims = 0> (z)"
SELECTIONS = {
    "argmax": ("N,H,W", f"y = {MAXIMUM}"),
    "argmin": ("N,1,H,W", "y = ArgMin <axis = 1> (z)"),
    "transposed": ("N,H,W", f"a = {MAXIMUM} t = Transpose <perm = [0, 2, 1]> (a) y = Identity (t)"),
    "top": ("N,2,H,W", "v, y = TopK <axis = 1> (z, k)"),
    "cast": ("N,H,W", f"a = {MAXIMUM} i = Cast <to = 6> (a) y = Cast <to = 7> (i)"),
}


def head(name: str) -> onnx.ModelProto:
    return model(HEAD.format(*SELECTIONS[name]), values={"k": np.array([2])}, dtype="float16")


@pytest.mark.parametrize("name", SELECTIONS)
def test_ties_of_a_float16_head(name: str) -> None:
    report = fold(head(name), verify="whole").report
    assert report.folded and report.verification
    outputs = {output.name: output for output in report.verification.outputs}
    assert outputs["y"].bound == "ties"
    assert any("before" in each and output.max_abs_diff > 0 for each, output in outputs.items())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ArgMax <axis = 1> (z)", "ArgMin <axis = 1> (z)"),
        ("ArgMax <axis = 1> (z)", "ArgMax <axis = 1, select_last_index = 1> (z)"),
        ("ArgMax <axis = 2> (z)", "ArgMax <axis = 3> (z)"),
    ],
)
def test_another_selection_fails(first: str, second: str) -> None:
    """Half of the values are 0, exactly: which of them is selected is no matter of rounding."""
    body = "g (float[N,6,8,8] x) => (int64[N,A,B,C] y) {{ h = Relu (x)\n z = Neg (h)\n y = {} }}"
    assert verify(model(body.format(first)), model(body.format(second))).status == "failed"


def test_wrong_values_fail() -> None:
    wrong = with_arrays(head("argmax"), {"u": array_of(head("argmax"), "u") * np.float16(1.1)})
    assert verify(head("argmax"), wrong, method="whole").status == "failed"


SEQUENCE = """g (float[N,3,H,W] x) => (seq(float[N,16,A,B]) y) {{ c = Conv (x, w:16.3.3.3) b = Norm (c, p:16)
    y = SequenceConstruct {} }}"""


def test_a_right_fold_of_a_sequence_passes() -> None:
    result = fold(model(SEQUENCE.format("(b, b)")), verify="whole").report.verification
    assert result and result.outputs[0].max_abs_diff > 0


def test_values_of_a_sequence_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = model("g () => (seq(float[1]) y) { c = Constant <value = float[1] {1}> () y = SequenceConstruct (c) }")
    job = FileJob({"values": ["y"], "providers": [], "inputs": [], "model": None}, [], lambda message: None)
    monkeypatch.setattr(job, "_model", lambda fields: Serialised(proto.SerializeToString()))
    answer, arrays = job.run()
    assert (arrays, answer["reason"].count("an output is a sequence or a map")) == ([], 2)


def test_indices_of_another_name() -> None:
    body = "g (float[N,6] x) => (int64[N] y) {{ s = Sin (x) {0} = ArgMax <axis = 1, keepdims = 0> (s) y = Identity ({0}) }}"
    verdict = verify(*(model(body.format(name)) for name in ("a", "b")), method="whole")
    assert verdict.passed and verdict.engine.startswith("onnxruntime")


@pytest.mark.parametrize(
    ("items", "text"), [("(b)", "sequences or maps differ in length or keys"), ("(c, b)", "differs by")]
)
def test_other_sequences_fail(items: str, text: str) -> None:
    result = verify(model(SEQUENCE.format("(b, c)")), model(SEQUENCE.format(items)), method="whole")
    assert result.status == "failed" and text in result.reason


PARTS = {
    **{"size": np.float32(640), "off": np.float32(1e-3), "k": np.eye(4, dtype=np.float32)},
    **{"two": np.array([2, 2]), "row": np.ones((1, 4), np.float32)},
}
TWO = "g (float[N,4] x) => (float[A,B] y) {{ b = Mul (x, size)\n s = Sigmoid (x)\n {} }}"
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
    return model(TWO.format(nodes), values=PARTS)


@pytest.mark.parametrize("name", PARTED)
def test_small_numbers_beside_large_ones(name: str) -> None:
    right = built(PARTED[name])
    wrong = TWO.format(PARTED[name]).replace("s = Sigmoid (x)", "h = Sigmoid (x)\n s = Add (h, off)")
    result = verify(right, model(wrong, values=PARTS))
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
            for operands in ("<axis = 0> (b, row)", "<axis = 1> (b, x)", "<axis = 1> (b)", "<axis = 1> (b, s, x)")
        ),
    ],
)
def test_which_outputs_have_parts(nodes: str, places: list[int]) -> None:
    assert [each.output_axis for each in find_parted(ir.from_proto(built(nodes)))] == places


@pytest.mark.parametrize(("count", "found"), [(7, True), (8, False)])
def test_a_function_behind_so_many_nodes(count: int, found: bool) -> None:
    last = "".join(f" v{i + 1} = Identity (v{i})" for i in range(count - 1)) + f" y = Identity (v{count - 1})"
    one, two = (ir.from_proto(built(f"v0 = {each}{last}")) for each in ("Sigmoid (b)", "Concat <axis = 1> (b, s)"))
    assert [find_front(one.graph.outputs[0]) is not None, bool(find_parted(two))] == [found] * 2


def test_a_constant_part_decides_nothing_on_smaller_inputs() -> None:
    """exp (x) overflows at first; the size is the same for all inputs."""
    proto = model(
        """g (float[N,4] x) => (float[N,8] y) { a = Mul (x, size) e = Exp (a) d = Shape (x) f = Expand (row, d)
        y = Concat <axis = 1> (e, f) }""",
        values=PARTS,
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
