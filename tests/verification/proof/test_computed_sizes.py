"""Sizes that the graph computes, and bounds beyond the sizes that a region is evaluated at: equal at these is no proof."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from bnexport import verify
from bnexport.folding import fold
from tests.support.claims import prove_claims
from tests.support.onnx_text import batch_norm, model

NORM = "BatchNormalization ({}, p_s, p_b, p_m, p_v)"
SHAPE = "s = Shape ({})\n g = Gather <axis = 0> (s, at0)\n u = Unsqueeze (g, at1)\n t = Concat <axis = 0> (u, rest)\n"
RIGHT = {
    "a shape from the batch": f"z = Conv (x, w)\n n = {NORM.format('z')}\n {SHAPE.format('n')} y = Reshape (n, t)",
    "a slice to half of the width": f"z = Conv (x, w)\n s = Shape (x)\n e = Slice (s, at3, at4)\n h = Div (e, at2)\n"
    f" d = Slice (z, at1, h, at3)\n y = {NORM.format('d')}",
    "a slice to 100": f"z = Conv (x, w)\n d = Slice (z, at1, many, at3)\n y = {NORM.format('d')}",
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_fold_past_computed_sizes_is_proved(name: str) -> None:
    places = {
        "at0": np.asarray(0), "at1": np.asarray([0]), "at2": np.asarray([2]), "at3": np.asarray([3]), "at4": np.asarray([4]),
        "rest": np.asarray([-1]), "many": np.asarray([100]),
    }  # fmt: skip
    values = {key: value for key, value in places.items() if key in RIGHT[name]}
    source = model(
        f"g (float[N,6,H,W] x) => (float y) {{ {RIGHT[name]} }}",
        {"w": (8, 6, 1, 1), **batch_norm("p", 8)},
        values=values,
    )
    source.graph.output[0].type.tensor_type.ClearField("shape")
    folded = copy.deepcopy(source)
    for node in folded.graph.node:
        if node.op_type == "Conv":
            node.input[1:] = ["v", "b"]
        elif node.op_type == "BatchNormalization":
            node.op_type, node.input[1:] = "Identity", []
    for key, array in folded_into("w", source).items():
        folded.graph.initializer.append(onnx.numpy_helper.from_array(array, key))
    verdict = verify(source, folded, method="local")
    assert verdict.passed, verdict
    assert [proof.method for proof in verdict.sites] == ["proved"]


def folded_into(weight: str, source: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The weight v and the bias b of a Conv with the batch norm behind it."""
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in source.graph.initializer}
    factor = arrays["p_s"] / np.sqrt(arrays["p_v"] + np.float32(1e-5))
    return {"v": arrays[weight] * factor[:, None, None, None], "b": arrays["p_b"] - arrays["p_m"] * factor}


def test_a_report_does_not_vouch_for_other_sizes() -> None:
    """The other shape fits where the batch divides the area."""
    body = f"""g (float[N,6,6,6] x) => (float[A,B,C,D] y) {{ z = Conv (x, w)\n s = Shape (z)\n b = Slice (s, zero, one)
        c = Slice (s, at, two)\n t = Concat <axis = 0> (b, c, rest)\n r = Reshape (z, t)\n n = {NORM.format("r")}
        m = Reshape (n, s)\n y = {NORM.format("m")} }}"""
    numbers = {"zero": 0, "one": 1, "at": 1, "two": 2, "rest": -1}
    values = {name: np.asarray([number]) for name, number in numbers.items()}
    source = model(body, {"w": (8, 6, 1, 1), **batch_norm("p", 8)}, values=values)
    result = fold(source, verify=False)
    wrong = copy.deepcopy(result.model)
    stored = next(each for each in wrong.graph.initializer if each.name == "at")
    stored.CopyFrom(onnx.numpy_helper.from_array(np.asarray([0]), "at"))
    assert prove_claims(source, result.model, result.report).passed
    assert prove_claims(source, wrong, result.report).status == "failed"


def test_sizes_without_a_name_are_different_sizes() -> None:
    body = "c = Conv (x, w)\n s = Shape (c)\n h = Slice (s, two, three)\n t = Slice (c, zero, h, three)\n y = {}"
    values = {"two": np.asarray([2]), "three": np.asarray([3]), "zero": np.asarray([0])}
    shapes = {"w": (4, 4, 1, 1), **batch_norm("p", 4)}
    source = model(
        f"g (float[N,4,A,B] x) => (float[N,4,C,D] y) {{ {body.format(NORM.format('t'))} }}", shapes, values=values
    )
    wrong = model("g (float[N,4,A,B] x) => (float[N,4,C,D] y) { y = Conv (x, v, b) }", values=folded_into("w", source))
    for proto in (source, wrong):
        for value in (*proto.graph.input, *proto.graph.output):
            for dimension in value.type.tensor_type.shape.dim[2:]:
                dimension.dim_param = ""
    assert verify(source, wrong, method="local").status == "not_verified"


@pytest.mark.parametrize("version", [3, 8])
def test_an_initializer_that_is_an_input_of_a_body_is_no_constant(version: int) -> None:
    def loop(body: list[onnx.NodeProto], inner: list[onnx.TensorProto]) -> onnx.ModelProto:
        make, kinds = onnx.helper.make_tensor_value_info, onnx.TensorProto
        scalars = [make("i", kinds.INT64, []), make("c", kinds.BOOL, []), make("v", kinds.FLOAT, [1])]
        outputs = [make("d", kinds.BOOL, []), make("o", kinds.FLOAT, [1])]
        nodes = [*body, onnx.helper.make_node("Identity", ["c"], ["d"])]
        graph = onnx.helper.make_graph(nodes, "body", scalars, outputs, inner)
        node = onnx.helper.make_node("Loop", ["n", "t", "x"], ["y"], body=graph)
        stored = [onnx.numpy_helper.from_array(np.asarray(3), "n"), onnx.numpy_helper.from_array(np.asarray(True), "t")]
        listed = [make("n", kinds.INT64, []), make("t", kinds.BOOL, [])] if version < 4 else []
        inputs = [make("x", kinds.FLOAT, [1]), *listed]
        main = onnx.helper.make_graph([node], "g", inputs, [make("y", kinds.FLOAT, [1])], stored)
        return onnx.helper.make_model(main, opset_imports=[onnx.helper.make_opsetid("", 10)], ir_version=version)

    values = {
        name: onnx.numpy_helper.from_array(np.asarray([size], np.float32), name) for name, size in (("v", 3), ("k", 2))
    }
    source = loop([onnx.helper.make_node("Mul", ["v", "k"], ["o"])], list(values.values()))
    constant = onnx.numpy_helper.from_array(np.asarray([6], np.float32), "six")
    wrong = loop([onnx.helper.make_node("Constant", [], ["o"], value=constant)], [values["v"]])
    assert verify(source, wrong, method="local").status == "not_verified"
