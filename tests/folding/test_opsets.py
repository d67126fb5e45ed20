"""Operators as they were in each opset. Where nothing runs an old one, its successor is the reference."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.defs
import pytest

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.onnx_text import assert_near, batch_norm, exact, make_inputs, model, operators, run

NEWEST = onnx.defs.onnx_opset_version()
X4 = "float[N,6,H,W] x"
SHAPES = {"w": (8, 6, 1, 1), **batch_norm("p", 8)}
NORM = {
    1: "y = BatchNormalization <is_test=1, consumed_inputs=[0,0,0,1,1], spatial=1> (z, p_s, p_b, p_m, p_v)",
    6: "y = BatchNormalization <is_test=1, momentum=0.8> (z, p_s, p_b, p_m, p_v)",
    7: "y = BatchNormalization <spatial=1> (z, p_s, p_b, p_m, p_v)",
    9: "y = BatchNormalization <epsilon=0.001> (z, p_s, p_b, p_m, p_v)",
    14: "y = BatchNormalization <training_mode=0> (z, p_s, p_b, p_m, p_v)",
}


def graph(nodes: str, norm: str, output: str = "float[N,8,A,B] y", inputs: str = X4) -> str:
    return f"g ({inputs}) => ({output}) {{ {nodes}\n {norm} }}"


def as_newer(proto: onnx.ModelProto, opset: int = 17) -> onnx.ModelProto:
    """The same nodes under another opset: for operators whose meaning is the same in both."""
    newer = onnx.ModelProto()
    newer.CopyFrom(proto)
    newer.opset_import[0].version = opset
    return newer


@pytest.mark.parametrize("opset", [*range(1, 24), NEWEST])
def test_batch_norm_of_every_opset(opset: int) -> None:
    norm = NORM[max(version for version in NORM if version <= opset)]
    result = fold(model(graph("z = Conv (x, w)", norm), SHAPES, opset=opset), verify=False)
    folded = to_proto(result.model)
    assert operators(folded) == ["Conv"]
    assert folded.opset_import[0].version == opset
    plain = "y = BatchNormalization (z, p_s, p_b, p_m, p_v)" if opset not in range(9, 14) else NORM[9]
    reference = model(graph("z = Conv (x, w)", plain), SHAPES)
    inputs = make_inputs(reference)
    assert_near(run(as_newer(folded), inputs)[0], exact(reference, inputs)[0])


def test_the_other_name_of_the_standard_domain() -> None:
    proto = model(graph("z = Conv (x, w)", NORM[14]), SHAPES)
    proto.opset_import[0].domain = proto.graph.node[0].domain = proto.graph.node[1].domain = "ai.onnx"
    assert operators(to_proto(fold(proto, verify=False).model)) == ["Conv"]


# Before opset 7: the constant is the second operand and says from which axis on it broadcasts.
OLD_SUMS = {
    "axis": ("t = Mul <broadcast=1, axis=1> (z, k)\n y = Add <broadcast=1, axis=1> (t, l)", (8,)),
    "axis-and-ones": ("t = Mul <broadcast=1, axis=1> (z, k)\n y = Sub <broadcast=1, axis=1> (t, l)", (8, 1)),
    "from-the-right": ("t = Div <broadcast=1> (z, k)\n y = Add <broadcast=1> (t, l)", (8, 1, 1)),
    "with-a-batch-norm": (
        "n = BatchNormalization <is_test=1> (z, p_s, p_b, p_m, p_v)\n t = Mul <broadcast=1, axis=1> (n, k)\n"
        " y = Add <broadcast=1, axis=1> (t, l)",
        (8,),
    ),
}


@pytest.mark.parametrize("case", OLD_SUMS)
def test_broadcasting_by_attribute(case: str) -> None:
    nodes, shape = OLD_SUMS[case]
    shapes = {**SHAPES, "k": shape, "l": shape}
    words = set(nodes.replace(",", " ").replace("(", " ").replace(")", " ").split())
    shapes = {name: size for name, size in shapes.items() if name == "w" or name in words}
    proto = model(graph("z = Conv (x, w)", nodes), shapes, opset=6)
    folded = to_proto(fold(proto, verify=False).model)
    assert operators(folded) == ["Conv"]
    # The same in today's notation.
    newer = model(graph("z = Conv (x, w)", nodes), shapes)
    for node in newer.graph.node:
        if node.op_type != "Conv":
            del node.attribute[:]
    for tensor in newer.graph.initializer:
        if tensor.name in ("k", "l"):
            tensor.dims[:] = [8, 1, 1]
    inputs = make_inputs(newer)
    assert_near(run(as_newer(folded), inputs)[0], exact(newer, inputs)[0])


def test_broadcasting_by_attribute_along_another_axis() -> None:
    nodes = "t = Mul <broadcast=1, axis=2> (z, k)\n y = Add <broadcast=1, axis=2> (t, k)"
    proto = model(
        graph("z = Conv (x, w)", nodes, "float[2,8,8,3] y", "float[2,6,8,3] x"), {"w": (8, 6, 1, 1), "k": (8,)}, opset=6
    )
    assert not fold(proto, verify=False).report.folded


@pytest.mark.parametrize("size", [(8,), (2, 8)])
def test_gemm_that_broadcasts_by_attribute(size: tuple[int, ...]) -> None:
    norm = "y = BatchNormalization <is_test=1> (z, p_s, p_b, p_m, p_v)"
    text = graph(f"z = Gemm <broadcast={int(len(size) == 1)}> (x, w, c)", norm, "float[2,8] y", "float[2,6] x")
    shapes = {"w": (6, 8), "c": size, **batch_norm("p", 8)}
    folded = to_proto(fold(model(text, shapes, opset=6), verify=False).model)
    assert operators(folded) == ["Gemm"]
    newer = model(text.replace(f"<broadcast={int(len(size) == 1)}>", "").replace("<is_test=1>", ""), shapes)
    inputs = make_inputs(newer)
    for node in folded.graph.node:
        kept = [attribute for attribute in node.attribute if attribute.name != "broadcast"]
        del node.attribute[:]
        node.attribute.extend(kept)
    assert_near(run(as_newer(folded), inputs)[0], exact(newer, inputs)[0])


def test_old_pooling_counts_its_padding() -> None:
    """Before opset 7 an average was over the padding, too."""
    norm = "y = BatchNormalization <is_test=1> (z, p_s, p_b, p_m, p_v)"
    nodes = "t = Conv (x, w)\n z = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1]> (t)"
    result = fold(model(graph(nodes, norm), SHAPES, opset=6), verify=False)
    assert operators(to_proto(result.model)) == ["Conv", "AveragePool", "Add"]
    values = {name: np.zeros(8, np.float32) for name in ("p_b", "p_m")}
    shapes = {name: shape for name, shape in SHAPES.items() if name not in values}
    result = fold(model(graph(nodes, norm), shapes, values=values, opset=6), verify=False)
    assert operators(to_proto(result.model)) == ["Conv", "AveragePool"]
