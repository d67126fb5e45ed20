"""Files of MMCV and MMDeploy: their operators become standard ones, their batch norms fold, and the result is verified."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest

import bnexport
from tests.support.onnx_text import model

NODES = """
    c = Conv <pads = [1, 1, 1, 1]> (x, a:4.3.3.3) n = Norm (c, p:4) r = Relu (n)
    o = Conv <pads = [1, 1, 1, 1]> (r, b:18.4.3.3) m = Conv <pads = [1, 1, 1, 1]> (r, d:9.4.3.3) g = Sigmoid (m)
    h = mmdeploy.MMCVModulatedDeformConv2d <padding = [1, 1], stride = [1, 1], groups = 1> (r, o, g, w:4.4.3.3)
    k = Norm (h, q:4) s = Softmax <axis = 1> (k)
    y = mmdeploy.grid_sampler <interpolation_mode = 0, padding_mode = 1, align_corners = 1> (s, grid)"""


def network(nodes: str = NODES) -> onnx.ModelProto:
    text = f"net (float[N,3,12,12] x, float[N,5,5,2] grid) => (float[N,4,5,5] y) {{ {nodes} }}"
    proto = model(text, header='<ir_version: 6, opset_import: ["" : 11, "mmdeploy" : 1]>')
    for node in proto.graph.node:
        node.name = f"node_{node.output[0]}"
    return proto


def kinds(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def test_a_file_of_mmdeploy_runs_anywhere(tmp_path: Path) -> None:
    before, target = network(), tmp_path / "out.onnx"
    before.graph.node[-1].metadata_props.add(key="source", value="head")
    result = bnexport.fold(before, target)
    report, verification = result.report, result.report.verification
    assert verification.status == "passed" and verification.reference == "original", verification.reason
    assert [site.method for site in verification.sites] == ["proved", "proved"]
    assert report.notes == (
        "operators of MMCV that became standard ones: 1 MMCVModulatedDeformConv2d, 1 grid_sampler",
        "the opset is 19 instead of 11, which they need",
    )
    after = onnx.load(target)
    assert [(each.domain, each.version) for each in after.opset_import] == [("", 19)]
    assert {"DeformConv", "GridSample"} <= set(kinds(after)) and "BatchNormalization" not in kinds(after)
    assert after.graph.node[-1].name == "node_y" and after.graph.node[-1].metadata_props[0].value == "head"
    onnxruntime.InferenceSession(target, providers=["CPUExecutionProvider"])
    assert bnexport.verify(before, target).status == "passed"
    again = bnexport.fold(target, tmp_path / "again.onnx")
    assert not again.report.changed and not again.report.notes


@pytest.mark.parametrize("wrong", ["padding", "mode", "weight"])
def test_a_wrong_form_is_refuted(tmp_path: Path, wrong: str) -> None:
    before = network()
    after = bnexport.fold(before).model
    for node in after.graph.node:
        for attribute in node.attribute:
            if (wrong, attribute.name) == ("mode", "padding_mode"):
                attribute.s = b"zeros"
            if (wrong, node.op_type, attribute.name) == ("padding", "DeformConv", "pads"):
                attribute.ints[:] = [0, 2, 2, 0]
    if wrong == "weight":
        node = next(node for node in after.graph.node if node.op_type == "DeformConv")
        tensor = next(each for each in after.graph.initializer if each.name == node.input[1])
        array = onnx.numpy_helper.to_array(tensor).copy()
        array[1, 2, 0, 0] *= 1.01
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    assert bnexport.verify(before, after).status == "failed"


def test_what_stays_is_named(tmp_path: Path) -> None:
    """The batch norms fold all the same, and are proved."""
    text = NODES.replace(
        "mmdeploy.grid_sampler <interpolation_mode = 0, padding_mode = 1, align_corners = 1>", "mmdeploy.Other"
    )
    with pytest.warns(bnexport.errors.NotVerifiedWarning):
        report = bnexport.fold(network(text), tmp_path / "out.onnx", verify="whole").report
    assert report.notes[-1] == "node_y stays: no standard operator computes Other"
    report = bnexport.fold(network(text)).report
    assert [site.method for site in report.verification.sites] == ["proved", "proved"]


def test_on_request_they_stay() -> None:
    after = bnexport.fold(network(), standard_ops=False, verify=False).model
    assert {"MMCVModulatedDeformConv2d", "grid_sampler"} <= set(kinds(after))
    assert [(each.domain, each.version) for each in after.opset_import] == [("", 11), ("mmdeploy", 1)]
    alone = bnexport.fold(network(), skip=["node_n", "node_k"]).report
    assert alone.changed and alone.verification.passed and not alone.folded
