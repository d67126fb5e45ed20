"""Each reason for which a rule refuses a map, in a graph that has nothing else wrong; and bounds just before they bind.

A row of refusals.txt asks for a map of 4 channels along axis 1: backward, on what makes `z`, or forward, on what reads `x`; or
it reads one of a node, as arithmetic (map) or a batch norm (norm).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context, Plan, Raw
from bnexport.folding.placing import Search
from bnexport.folding.rules import ALL, gather
from bnexport.folding.sites import read_batch_norm, read_elementwise
from bnexport.graph.nodes import Refused
from tests.support.contexts import context_of
from tests.support.onnx_text import array, batch_norm, fold_and_check, model

RULES = {op_type: rule for rule in ALL for op_type in rule.op_types}
MAPS = {
    "MAP": ChannelAffine(
        np.array([2.0, 3.0, -4.0, 5.0]), np.array([1.0, 0.0, 2.0, -1.0]), np.array([0.5, 1.0, 0.0, 3.0])
    ),
    "SCALE": ChannelAffine.scaling(np.array([2.0, 3.0, -4.0, 5.0])),
    "POSITIVE": ChannelAffine.scaling(np.array([2.0, 3.0, 4.0, 5.0])),
    "SHIFT": ChannelAffine.shifting(np.array([1.0, 0.0, 2.0, -1.0])),
    "TWICE": ChannelAffine.scaling(2 * np.ones(4)),
}
QUANTIZED = {"q": np.ones((4, 4, 1, 1), np.int8), "s": np.float32(1), "affine": MAPS["POSITIVE"]}


READERS: dict[str, Callable[[Context], Any]] = {
    "map": lambda context: read_elementwise(context.model.graph[0], 1, 4, context),
    "norm": lambda context: read_batch_norm(context.model.graph[0], context),
}


def attempt(
    direction: str,
    body: str,
    *,
    inputs: str = "float[N,4,H,W] x",
    affine: ChannelAffine = MAPS["MAP"],
    axis: int = 1,
    opset: int = 17,
    value: str = "",
    shapes: dict[str, tuple[int, ...]] | None = None,
    **more: Any,
) -> Any:
    body = f"{body}\n y = Relu (z)" if direction == "backward" and "y = " not in body else body
    arrays = {name: np.asarray(array) for name, array in more.items()}
    proto = model(f"g ({inputs}) => (float[N,4,H,W] y) {{ {body} }}", shapes, values=arrays, opset=opset)
    context = context_of(proto, opset)
    if direction in READERS:
        return READERS[direction](context)
    search = Search(Plan(context), RULES)
    graph = context.model.graph
    values = {it.name: it for it in (*graph.inputs, *(out for node in graph for out in node.outputs))}
    start = values[value or {"backward": "z", "forward": "x"}[direction]]
    getattr(search, direction)(start, axis, affine)
    return search


def option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if name in ("inputs", "value"):
        return name, value
    return name, MAPS[value] if name == "affine" else int(value) if name in ("axis", "opset") else array(value)


@pytest.mark.parametrize("row", (Path(__file__).parent / "refusals.txt").read_text().splitlines()[1:])
def test_refused_or_accepted(row: str) -> None:
    direction, code, said, nodes, *more = row.split(" | ")
    options = dict(option(each) for text in more for each in text.split("; "))
    if code == "accepted":
        plan = attempt(direction, nodes, **options).plan
        assert sorted(node.outputs[0].name or "" for node in plan.targets) == said.split()
        assert {name for _, name in plan.attributes} == ({"axis"} if "Dequantize" in nodes else set())
        return
    with pytest.raises(Refused, match=said) as caught:
        attempt(direction, nodes, **options)
    assert caught.value.code == code


def chain(start: int, count: int) -> str:
    """Identities from a<start> to a<start + count>."""
    return "\n".join(f"a{index + 1} = Identity (a{index})" for index in range(start, start + count))


@pytest.mark.parametrize(
    ("direction", "bodies", "targets", "message"),
    [
        # A Concat, operators and a Conv; the branch before them does not count. Below: nor does the reader before them.
        ("backward", [f"b = Conv (x, v)\n a0 = Conv (x, u)\n {chain(0, count)}\n z = Concat <axis=1> (b, a{count})"
            for count in (62, 63)], 2, "more than 64 operators away"),
        ("forward", [f"b = Conv (x, w)\n a1 = Identity (x)\n {chain(1, count)}\n y = Conv (a{count + 1}, w)"
            for count in (62, 63)], 2, "more than 64 operators away"),
        ("forward", ["\n".join(f"c{index} = Conv (x, w)" for index in range(count)) + "\n y = Sum (c0, c1)"
            for count in (256, 257)], 256, "more than 256 operators would change"),
    ],
)  # fmt: skip
def test_limits(direction: str, bodies: list[str], targets: int, message: str) -> None:
    shapes = {"w": (4, 4, 1, 1)} if direction == "forward" else dict.fromkeys("uv", (2, 4, 1, 1))
    assert len(attempt(direction, bodies[0], shapes=shapes).plan.targets) == targets
    with pytest.raises(Refused, match=message):
        attempt(direction, bodies[1], shapes=shapes)


UNARY = "AveragePool Flatten Gemm Identity Relu Transpose Squeeze Unsqueeze DepthToSpace Pad Resize Split Slice Concat"


@pytest.mark.parametrize("op_type", [*UNARY.split(), "Conv", "ConvTranspose", "MatMul", "Add", "ReduceMean", "Dropout"])
def test_attributes_that_are_not_known(op_type: str) -> None:
    inputs, shape = ("float[N,4] x", "4.4") if op_type in ("Gemm", "MatMul") else ("float[N,4,H,W] x", "4.4.1.1")
    weight = f", w:{shape}" if op_type not in UNARY or op_type == "Gemm" else ""
    with pytest.raises(Refused, match="has the attribute 'other'") as caught:
        attempt("backward", f"z = {op_type} <other=1> (x{weight})", inputs=inputs)
    assert caught.value.code == "unknown-attribute"


def test_a_zero_point_becomes_one_for_each_channel() -> None:
    """Scales do; ONNX asks for zero points of their shape."""
    body = "d = DequantizeLinear (q, s, o)\n z = Conv (x, d)"
    plan = attempt("backward", body, **QUANTIZED, o=np.int8(3)).plan
    (points,) = [edit for (node, index), edit in plan.edits.items() if (node.op_type, index) == ("DequantizeLinear", 2)]
    assert isinstance(points, Raw) and points.values.tolist() == [3] * 4 and points.values.dtype == np.int8


def test_a_table_beyond_the_bound_of_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound, changed in ((80, True), (79, False)):
        monkeypatch.setattr(gather, "ELEMENTS", bound)
        body = "z = Gather (t, x)"
        with contextlib.nullcontext() if changed else pytest.raises(Refused, match="too large to be shifted"):
            attempt("backward", body, inputs="int64[N] x", shapes={"t": (20, 4)})


@pytest.mark.parametrize(
    ("body", "products", "inputs"),
    [
        ("z = Gemm <alpha=0.5> (x, w:6.4)", 6 * 0.25, "float[N,6] x"),
        ("z = ConvTranspose <group=2> (x, w:6.2.1.3)", 9, "float[N,6,H,W] x"),
    ],
)
def test_products_that_an_output_adds_up(
    monkeypatch: pytest.MonkeyPatch, body: str, products: float, inputs: str
) -> None:
    """They bound the rounding error that hides what a weight loses."""
    seen = []
    monkeypatch.setattr(Plan, "scale", lambda *_, products, **__: seen.append(products))
    attempt("backward", body, inputs=inputs)
    assert seen == [products]


@pytest.mark.parametrize(("ir_version", "opset"), [(3, 8), (4, 9)])
def test_new_constants_are_inputs_before_ir_version_4_only(ir_version: int, opset: int) -> None:
    body = "g (float[N,4,H,W] x) => (float[N,4,A,B] y) { z = Conv (x, w)\n y = BatchNormalization (z, p_s, p_b, p_m, p_v) }"
    proto = model(body, {"w": (4, 4, 1, 1), **batch_norm("p", 4)}, ir_version=ir_version, opset=opset)
    folded, _ = fold_and_check(proto, oracle=False)  # onnx's reference has no BatchNormalization so old
    names = {tensor.name for tensor in folded.graph.initializer}
    assert len(names) == 2
    assert {value.name for value in folded.graph.input} == ({"x", *names} if ir_version == 3 else {"x"})


def test_new_constants_of_an_old_body_are_nodes() -> None:
    """Its initializers would have to be inputs, which a branch of an If has not."""
    body = """g (float[N,4,H,W] x, bool c) => (float[N,4,A,B] y) {
        y = If (c) <then_branch = t () => (float[N,4,H,W] a) { z = Conv (x, w) a = BatchNormalization (z, p_s, p_b, p_m, p_v) },
                    else_branch = e () => (float[N,4,H,W] b) { b = Relu (x) }> }"""
    proto = model(body, {"w": (4, 4, 1, 1), **batch_norm("p", 4)}, ir_version=3, opset=8)
    folded, _ = fold_and_check(proto, oracle=False)
    branch = folded.graph.node[0].attribute[0].g
    assert ([node.op_type for node in branch.node], len(branch.initializer)) == (["Constant", "Constant", "Conv"], 0)


def test_the_scale_of_a_quantized_weight_changes_once() -> None:
    body = "d = DequantizeLinear (q, s)\n z = Conv (x, d)"
    search = attempt("backward", body, **QUANTIZED)
    conv = search.context.model.graph[1]
    for later in (search.plan, Plan(search.context)):
        with pytest.raises(Refused, match="has been changed already"):
            later.scale(conv, 1, np.full((4, 1, 1, 1), 2.0), "weight")
        search.plan.commit()
