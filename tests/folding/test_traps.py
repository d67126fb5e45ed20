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

CONV, NORM = "z = Conv (x, w:8.6.1.1)", "y = Norm (z, p:8)"
Y = "float[N,8,A,B] y"


def conv_bn(nodes: str = f"{CONV} {NORM}", output: str = Y, **options: str) -> onnx.ModelProto:
    return model(f"g (float[N,6,H,W] x) => ({output}) {{ {nodes} }}", **options)


def test_training_mode_by_request() -> None:
    training = f"{CONV} y, a, b = Norm <training_mode=1> (z, p:8)"
    result = fold(conv_bn(training, f"{Y}, float[8] a, float[8] b"), training_to_inference=True)
    assert result.report.meaning_changed
    assert result.report.verification.passed
    assert batch_norms(result.model) == 0
    inputs, values = make_inputs(conv_bn()), parameters(batch_norm("p", 8))
    y, mean, var = run(result.model, inputs)
    assert_near(y, exact(conv_bn(), inputs)[0])
    np.testing.assert_array_equal(mean, values["p_m"])
    np.testing.assert_array_equal(var, values["p_v"])


def test_redefined_operator() -> None:
    proto = conv_bn()
    function = '<opset_import: ["": 17], domain: ""> Conv (a, b) => (c) { c = Add (a, b) }'
    proto.functions.append(onnx.parser.parse_function(function))
    with pytest.raises(bnexport.errors.UnsupportedModelError, match="redefines"):
        fold(proto)


def test_names_stay_unique() -> None:
    outputs = f"{Y}, float[8,6,1,1] w, float[N,6,A,B] w_folded"
    proto = conv_bn(f"{CONV} w_folded = Identity (x) {NORM}", outputs)
    proto.graph.node[1].output[0] = proto.graph.output[2].name = "w.folded"
    graph = fold_and_check(proto)[0].graph
    names = [*(tensor.name for tensor in graph.initializer), *(name for node in graph.node for name in node.output)]
    assert len(names) == len(set(names))


def test_what_is_no_part_of_a_fold_comes_out_as_it_went_in() -> None:
    header = '<ir_version: 10, opset_import: ["": 17, "other": 3], producer_name: "somebody", doc_string: "notes">'
    more = "a = other.Thing <alpha: float = 0.5> (y) q = Abs (a) r = LeakyRelu <alpha=0.25> (q)"
    proto = conv_bn(f"{CONV} {NORM} {more}", "float[N,8,A,B] r", header=header)
    proto.metadata_props.add(key="author", value="them")
    proto.graph.metadata_props.add(key="part", value="first")
    proto.graph.doc_string = "a graph"
    for node, name in zip(proto.graph.node, ("conv", "norm", "thing", "abs", "leaky"), strict=True):
        node.name, node.doc_string = name, f"about {name}"
        node.metadata_props.add(key="line", value=name)
        if not node.domain:
            node.ClearField("domain")  # written as an empty field by the parser
    for name in ("y", "a", "q"):
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, 1, ("N", 8, "A", "B")))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(3.0), "nobody reads this"))
    folded = to_proto(fold(proto, verify=False, certificate=False).model)
    for field in ("ir_version", "producer_name", "doc_string", "opset_import", "metadata_props"):
        assert getattr(folded, field) == getattr(proto, field), field
    for field in ("name", "input", "output", "doc_string", "metadata_props"):
        assert getattr(folded.graph, field) == getattr(proto.graph, field), field
    conv, thing, *others = folded.graph.node
    assert others == list(proto.graph.node[3:])
    for got, source in ((conv, proto.graph.node[0]), (thing, proto.graph.node[2])):
        for field in ("name", "attribute", "doc_string", "metadata_props"):
            assert getattr(got, field) == getattr(source, field), field
    assert thing.input[0] == conv.output[0]
    assert {value.name for value in folded.graph.value_info} >= {"a", "q"}
    assert proto.graph.initializer[-1] in list(folded.graph.initializer)


def test_a_part_that_is_an_output() -> None:
    """The parts are mapped on their own, so the other one keeps its values to the bit."""
    nodes = "t = Conv (x, w:8.6.1.1) z, u = Split <axis=1> (t) y = Norm (z, p:4)"
    proto = conv_bn(nodes, "float[N,4,A,B] y, float[N,4,A,B] u")
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
