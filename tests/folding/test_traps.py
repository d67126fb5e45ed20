"""Folds of which more than the numbers is asked for: names, attributes, other outputs, what is written beside."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

import bnexport.errors
from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.folding.conv_bn import BN, X4, conv_bn
from tests.folding.corpus.case import MMCV
from tests.support.onnx_text import (
    assert_near,
    batch_norm,
    batch_norms,
    exact,
    fold_and_check,
    make_inputs,
    model,
    operators_of,
    parameters,
    run,
)


def test_training_mode_by_request() -> None:
    norm = "y, a, b = BatchNormalization <training_mode=1> (z, p_s, p_b, p_m, p_v)"
    result = fold(conv_bn(norm=norm, output="float[N,8,A,B] y, float[8] a, float[8] b"), training_to_inference=True)
    assert result.report.meaning_changed
    assert result.report.verification is not None
    assert result.report.verification.passed
    assert batch_norms(to_proto(result.model)) == 0
    inputs = make_inputs(conv_bn())
    expected = exact(conv_bn(), inputs)[0]
    y, mean, var = run(to_proto(result.model), inputs)
    assert_near(y, expected)
    values = parameters({"w": (8, 6, 1, 1), **batch_norm("p", 8)})
    np.testing.assert_array_equal(mean, values["p_m"])
    np.testing.assert_array_equal(var, values["p_v"])


def test_redefined_operator() -> None:
    proto = conv_bn()
    function = proto.functions.add(name="Conv", domain="")
    function.input.extend(["a", "b"])
    function.output.append("c")
    function.opset_import.add(domain="", version=17)
    function.node.add(op_type="Add", input=["a", "b"], output=["c"])
    with pytest.raises(bnexport.errors.UnsupportedModelError, match="redefines"):
        fold(proto)


def test_ir_3_lists_every_initializer() -> None:
    proto = conv_bn(ir_version=3, opset=9)
    folded, _ = fold_and_check(proto, oracle=False)
    listed = {value.name for value in folded.graph.input}
    assert listed == {"x", *(tensor.name for tensor in folded.graph.initializer)}
    assert len(folded.graph.initializer) == 2


def test_names_stay_unique() -> None:
    proto = conv_bn(
        "z = Conv (x, w)\n w_folded = Identity (x)",
        output="float[N,8,A,B] y, float[8,6,1,1] w, float[N,6,A,B] w_folded",
    )
    proto.graph.node[1].output[0] = proto.graph.output[2].name = "w.folded"
    folded, _ = fold_and_check(proto)
    names = [tensor.name for tensor in folded.graph.initializer] + [
        name for node in folded.graph.node for name in node.output
    ]
    assert len(names) == len(set(names))


def test_what_is_no_part_of_a_fold_comes_out_as_it_went_in() -> None:
    header = '<ir_version: 10, opset_import: ["": 17, "other": 3], producer_name: "somebody", doc_string: "notes">'
    norm = f"{BN}\n a = other.Thing <alpha: float = 0.5> (y)\n q = Abs (a)\n r = LeakyRelu <alpha=0.25> (q)"
    proto = conv_bn(norm=norm, header=header, output="float[N,8,A,B] r, float[N,8,A,B] y")
    del proto.graph.output[1]
    proto.metadata_props.add(key="author", value="them")
    proto.graph.metadata_props.add(key="part", value="first")
    proto.graph.doc_string = "a graph"
    for node, name in zip(proto.graph.node, ("conv", "norm", "thing", "abs", "leaky"), strict=True):
        node.name, node.doc_string = name, f"about {name}"
        node.metadata_props.add(key="line", value=name)
        if not node.domain:
            node.ClearField("domain")  # written as an empty field by the parser
    for name in ("y", "a", "q"):
        proto.graph.value_info.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ("N", 8, "A", "B"))
        )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(3.0), "nobody reads this"))
    folded = to_proto(fold(proto, verify=False, certificate=False).model)
    for field in ("ir_version", "producer_name", "doc_string", "opset_import", "metadata_props"):
        assert getattr(folded, field) == getattr(proto, field), field
    for field in ("name", "input", "output", "doc_string", "metadata_props"):
        assert getattr(folded.graph, field) == getattr(proto.graph, field), field
    assert list(folded.graph.node[2:]) == list(proto.graph.node[3:])
    thing = folded.graph.node[1]
    assert (thing.input[0], thing.attribute, thing.doc_string) == (
        folded.graph.node[0].output[0],
        proto.graph.node[2].attribute,
        "about thing",
    )
    conv = folded.graph.node[0]
    assert (conv.name, conv.doc_string, conv.metadata_props) == (
        "conv",
        "about conv",
        proto.graph.node[0].metadata_props,
    )
    assert {value.name for value in folded.graph.value_info} >= {"a", "q"}
    tensors = {tensor.name: tensor for tensor in folded.graph.initializer}
    assert tensors["nobody reads this"] == proto.graph.initializer[-1]


def test_a_part_that_is_an_output() -> None:
    """The parts are mapped on their own, so the other one keeps its values to the bit."""
    nodes = "t = Conv (x, w)\n z, u = Split <axis=1> (t)"
    proto = model(
        f"g ({X4}) => (float[N,4,A,B] y, float[N,4,A,B] u) {{ {nodes}\n {BN} }}",
        {"w": (8, 6, 1, 1), **batch_norm("p", 4)},
    )
    folded, _ = fold_and_check(proto)
    inputs = make_inputs(proto)
    np.testing.assert_array_equal(run(folded, inputs)[1], run(proto, inputs)[1])


def test_without_a_bias_an_add_stays() -> None:
    """Their outputs' rank is known to nobody, unless the file tells: then no Add can take the shift."""
    text = "g (float[2,6,9,9] x, float[2,18,7,7] o) => (float[2,8,7,7] y) { z = mmdeploy.MMCVDeformConv2d (x, o, w:8.6.3.3) "
    proto = model(f"{text} y = Norm (z, p:8) }}", header=MMCV)
    result = fold(proto, verify="local", standard_ops=False)
    assert operators_of(result) == ["MMCVDeformConv2d", "BatchNormalization"]
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("z", 1, [2, 8, 7, 7]))
    result = fold(proto, verify="local", standard_ops=False)
    assert operators_of(result) == ["MMCVDeformConv2d", "Add"]
    assert {proof.method for proof in result.report.verification.sites} == {"proved"}
