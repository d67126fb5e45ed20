"""Files that break a rule on which ONNX Runtime does not insist: mended, with a note."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

import bnexport
from bnexport.cli import main
from bnexport.errors import MalformedModelError, UnsafeModelError
from bnexport.folding import fold
from bnexport.model_io import Limits, from_proto, load, to_proto
from tests.support.onnx_text import assert_near, make_inputs, model, operators, run

NET = """g (float[N,3,H,W] x) => (float[N,4,A,B] y) { z = Conv (x, w:4.3.1.1) n = Norm (z, p:4) r = Relu (n) t = Tanh (n)
    y = Add (r, t) }"""
SORTED = ["Conv", "BatchNormalization", "Tanh", "Relu", "Add"]
UNSORTED = "the nodes were not in topological order; they were sorted"


def reordered(proto: onnx.ModelProto, order: list[int]) -> onnx.ModelProto:
    nodes = [proto.graph.node[index] for index in order]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [1, 0, 4, 2, 3], [0, 2, 1, 4, 3]])
def test_a_fold_of_unsorted_nodes(order: list[int]) -> None:
    proto = reordered(model(NET), order)
    result = fold(proto)
    assert result.report.folded and result.report.verification
    assert result.report.notes == (f"graph 'g': {UNSORTED}",)
    inputs = make_inputs(proto)
    assert_near(run(to_proto(result.model), inputs)[0], run(proto, inputs)[0])


def test_the_sort_is_stable() -> None:
    """Every topological order stays, not only the one that sorting would make."""
    proto = reordered(model(NET), [0, 1, 3, 2, 4])
    assert operators(to_proto(from_proto(proto))) == SORTED
    assert bnexport.inspect(proto).notes == ()
    assert operators(to_proto(from_proto(reordered(model(NET), [3, 1, 2, 0, 4])))) == SORTED


def test_large_graphs_in_any_order() -> None:
    count = 2000
    text = "\n".join(f"v{index + 1} = Add (v{index}, v{index // 2})" for index in range(count))
    proto = model(f"g (float[2] v0) => (float[2] v{count}) {{ {text} }}")
    expected = [node.output[0] for node in proto.graph.node]
    order = list(range(count))
    random.Random(0).shuffle(order)
    assert [node.output[0] for node in to_proto(from_proto(reordered(proto, order))).graph.node] == expected


BODY = """g (bool c, float[2] x) => (float[2] y) {
    y = If (c) <
        then_branch = then () => (float[2] o) { o = Relu (inner)  inner = Add (late, late) },
        else_branch = other () => (float[2] p) { p = Neg (late) }
    >
    late = Mul (x, x) }"""
CALL = """<ir_version: 8, opset_import: ["": 17, "local": 1]>
    g (float[2] x) => (float[2] y) { y = local.F (x) }
    <domain: "local", opset_import: ["": 17]> F (a) => (b) { b = Relu (inner)  inner = Mul (a, a) }"""


def test_bodies_and_what_they_read_from_outside() -> None:
    proto = model(BODY)
    notes = bnexport.inspect(proto).notes
    assert [note.split(":")[0] for note in notes] == ["graph 'then'", "graph 'g'"]
    sorted_proto = to_proto(from_proto(model(BODY)))
    assert operators(sorted_proto) == ["Mul", "If"]
    # ONNX Runtime sorts the main graph alone.
    for condition, expected in ((True, [2, 8]), (False, [-1, -4])):
        inputs = {"c": np.array(condition), "x": np.array([1, -2], np.float32)}
        np.testing.assert_array_equal(run(sorted_proto, inputs)[0], expected)


def test_functions() -> None:
    proto = onnx.parser.parse_model(CALL)
    assert bnexport.inspect(proto).notes == (f"function local:F: {UNSORTED}",)
    inputs = {"x": np.array([1, -2], np.float32)}
    np.testing.assert_array_equal(run(to_proto(from_proto(proto)), inputs)[0], [1, 4])


CYCLES = {
    "of two": ("a = Relu (b)\n b = Neg (a)\n y = Add (x, b)", "Relu 'a' -> Neg 'b' -> Relu 'a'"),
    "of one": ("y = Add (x, y)", "Add 'y' -> Add 'y'"),
    "behind others": ("y = Neg (c)\n c = Add (x, d)\n d = Abs (c)", "Add 'c' -> Abs 'd' -> Add 'c'"),
    "through a body": (
        "y = If (k) <then_branch = t () => (float[2] o) { o = Neg (y) }, else_branch = e () => (float[2] p) { p = Neg (x) }>",
        "If 'y' -> If 'y'",
    ),
}


@pytest.mark.parametrize("case", CYCLES)
def test_a_cycle_is_named(case: str) -> None:
    text, names = CYCLES[case]
    with pytest.raises(MalformedModelError, match=f"graph 'g': nodes that wait for each other cannot be run: {names}$"):
        from_proto(model(f"g (float[2] x, bool k) => (float[2] y) {{ {text} }}"))


BODIES = "then_branch = t () => (float[2] o) { o = Neg (x) }, else_branch = e () => (float[2] p) { p = Abs (x) }"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("y = Add (x, z)  z = Relu (gone)", "Relu '' reads 'gone', which nothing defines$"),
        # A name of a body is not seen outside.
        (f"y = Add (x, o)  z = If (k) <{BODIES}>", "reads 'o', which nothing defines"),
    ],
)
def test_a_name_that_nothing_defines(text: str, words: str) -> None:
    with pytest.raises(MalformedModelError, match=words):
        from_proto(model(f"g (float[2] x, bool k) => (float[2] y) {{ {text} }}"))


def test_the_last_of_several_initializers_counts() -> None:
    """As in ONNX Runtime, which warns of it."""
    proto = model(NET)
    proto.graph.initializer.insert(0, onnx.numpy_helper.from_array(np.zeros((4, 3, 1, 1), np.float32), "w"))
    result = fold(proto)
    assert result.report.folded
    assert result.report.notes == ("graph 'g': initializers of a repeated name were left out: 1",)
    inputs = make_inputs(proto)
    assert_near(run(to_proto(result.model), inputs)[0], run(proto, inputs)[0])


def test_training_info_is_left_out() -> None:
    proto = model(NET)
    proto.training_info.add()
    assert bnexport.inspect(proto).notes == ("the model carried training_info, which was left out",)
    assert not to_proto(from_proto(proto)).training_info


def test_depth_is_limited() -> None:
    proto = model(BODY)
    proto.graph.node.insert(0, onnx.helper.make_node("Neg", ["late"], ["unused"]))
    with pytest.raises(UnsafeModelError, match="nested deeper than 1"):
        from_proto(proto, limits=Limits(graph_depth=1))


def test_the_command_line_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    onnx.save(reordered(model(NET), [1, 0, 2, 3, 4]), tmp_path / "m.onnx")
    note = f"note: graph 'g': {UNSORTED}"
    assert main(["inspect", str(tmp_path / "m.onnx")]) == 0
    assert note in capfd.readouterr().err
    assert main(["fold", str(tmp_path / "m.onnx"), str(tmp_path / "f.onnx")]) == 0
    assert note in capfd.readouterr().err
    load(tmp_path / "f.onnx")
