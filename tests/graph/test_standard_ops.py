"""Operators of MMCV and MMDeploy as standard ones, run in ONNX Runtime, against their definitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from bnexport import schema
from bnexport.graph import standard_ops
from bnexport.graph.onnx_reference import MendedEvaluator

NUMBERS = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return NUMBERS.standard_normal(shape).astype(np.float32)


def model(
    op_type: str, inputs: Mapping[str, np.ndarray], attributes: Mapping[str, Any], **options: Any
) -> onnx.ModelProto:
    domain, opset, value = options.get("domain", "mmcv"), options.get("opset", 20), helper.make_tensor_value_info
    node = helper.make_node(op_type, [*inputs], ["y"], name="op", domain=domain, **attributes)
    kinds = {name: helper.np_dtype_to_tensor_dtype(each.dtype) for name, each in inputs.items() if name}
    given = [value(name, kind, options.get("shape", inputs[name].shape)) for name, kind in kinds.items()]
    integers = op_type == "NonMaxSuppression"
    y = value("y", *((TensorProto.INT64, [None]) if integers else (TensorProto.FLOAT, [None] * 4)))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(domain, 1)]
    return helper.make_model(helper.make_graph([node], "g", given, [y]), opset_imports=imports, ir_version=9)


def check(op_type: str, inputs: Mapping[str, np.ndarray], attributes: Mapping[str, Any], **options: Any) -> np.ndarray:
    """Compare the standard form in ONNX Runtime with the definition in float64; nothing of the other domain is left."""
    before = model(op_type, inputs, attributes, **options)
    feeds = {name: each for name, each in inputs.items() if name}
    wide = {name: each.astype(np.float64) for name, each in feeds.items()}
    (expected,) = MendedEvaluator(before).run(None, wide)
    changed = ir.from_proto(before)
    assert [each.reason for each in standard_ops.standardise(changed)] == [None]
    proto = ir.to_proto(changed)
    assert {each.domain for each in proto.opset_import} == {""}
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, feeds)
    atol = options.get("atol", 2e-6) * np.abs(expected).max()
    np.testing.assert_allclose(y, expected, rtol=0, atol=atol)
    return expected


# stride, padding, dilation, groups, groups of offsets, kernel, reach of the offsets
CONVOLUTIONS = [
    ([1, 1], [1, 1], [1, 1], 1, 1, (3, 3), 1.5),
    ([2, 1], [1, 0], [1, 1], 1, 2, (3, 1), 0.5),
    ([1, 2], [2, 2], [2, 1], 2, 2, (2, 3), 6.0),
    ([1, 1], [0, 0], [1, 1], 4, 4, (1, 1), 3.0),
]


@pytest.mark.parametrize("domain", schema.MMCV_DOMAINS)
@pytest.mark.parametrize("op_type", ["MMCVModulatedDeformConv2d", "no bias", "MMCVDeformConv2d"])
@pytest.mark.parametrize("form", CONVOLUTIONS)
def test_deformable_convolutions(op_type: str, form: Any, domain: str) -> None:
    stride, padding, dilation, groups, deform_groups, kernel, reach = form
    x, weight = normal(2, 4, 7, 8), normal(8, 4 // groups, *kernel)
    sides = [
        (size + 2 * pad - d * (k - 1) - 1) // s + 1
        for size, k, pad, d, s in zip((7, 8), kernel, padding, dilation, stride)
    ]
    positions = deform_groups * kernel[0] * kernel[1]
    offset, mask = reach * normal(2, 2 * positions, *sides), NUMBERS.random((2, positions, *sides), np.float32)
    inputs = {"x": x, "offset": offset, "mask": mask, "w": weight, "b": normal(8)}
    if op_type == "no bias":
        op_type = "MMCVModulatedDeformConv2d"
        del inputs["b"]
    elif op_type == "MMCVDeformConv2d":
        inputs = {"x": x, "offset": offset, "w": weight}
    sizes = {"stride": stride, "padding": padding, "dilation": dilation}
    check(op_type, inputs, {**sizes, "groups": groups, "deform_groups": deform_groups}, domain=domain)


@pytest.mark.parametrize("opset", [16, 20])
@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("padding", range(3))
@pytest.mark.parametrize("mode", range(3))
def test_grid_sampler(mode: int, padding: int, align_corners: int, opset: int) -> None:
    x, grid = normal(2, 3, 5, 7), 0.8 * normal(2, 4, 6, 2)
    expected = torch.grid_sampler(
        torch.tensor(x).double(), torch.tensor(grid).double(), mode, padding, bool(align_corners)
    )
    attributes = {"interpolation_mode": mode, "padding_mode": padding, "align_corners": align_corners}
    found = check("grid_sampler", {"x": x, "grid": grid}, attributes, domain="mmdeploy", opset=opset, atol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("sampling_ratio", [0, 2])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_roi_align(aligned: int, sampling_ratio: int, scale: float) -> None:
    x = normal(3, 2, 9, 11)
    corners = np.sort(NUMBERS.random((6, 2, 2)) * 12 - 1, axis=1).reshape(6, 4) / scale
    rois = np.concatenate([[[0], [2], [1], [1], [0], [2]], corners], 1).astype(np.float32)
    attributes = {"output_height": 3, "output_width": 2, "spatial_scale": scale, "mode": "avg"}
    attributes |= {"sampling_ratio": sampling_ratio, "aligned": aligned}
    check("MMCVRoiAlign", {"x": x, "rois": rois}, attributes)


@pytest.mark.parametrize("offset", [0, 1])
def test_non_max_suppression(offset: int) -> None:
    corners = np.sort((NUMBERS.random((40, 2, 2)) * 30).round(1), axis=1).reshape(40, 4).astype(np.float32)
    scores = NUMBERS.permutation(40).astype(np.float32) / 40
    attributes = {"iou_threshold": 0.3, "offset": offset}
    expected = check("NonMaxSuppression", {"boxes": corners, "scores": scores}, attributes, atol=0)
    assert 1 < len(expected) < 40


@pytest.mark.parametrize("mode", range(4))
def test_corner_pool(mode: int) -> None:
    x = normal(2, 3, 5, 7)
    check("MMCVCornerPool", {"x": x}, {"mode": mode}, atol=0)


X = normal(1, 2, 4, 4)
PLAIN = {"x": X, "o": normal(1, 2, 4, 4), "w": normal(2, 2, 1, 1)}
VOLUMES = {"x": normal(1, 1, 2, 2, 2), "grid": normal(1, 2, 2, 2, 3)}
BOXES = {"x": X, "rois": normal(1, 5)}
LARGEST = {
    **dict.fromkeys(("output_height", "output_width", "spatial_scale", "sampling_ratio", "aligned"), 1),
    "mode": "max",
}
REFUSED: dict[str, tuple[str, Mapping[str, np.ndarray], Mapping[str, Any], Mapping[str, Any], str]] = {
    "operator": ("NMSRotated", {"x": X}, {}, {}, "no standard operator computes NMSRotated"),
    "attribute": ("MMCVDeformConv2d", PLAIN, {"modes": 1}, {}, "'modes', which is not known"),
    "integers": ("MMCVCornerPool", {"x": np.ones((1, 1, 2, 2), np.int64)}, {"mode": 0}, {}, "of INT64 values"),
    "three strides": ("MMCVDeformConv2d", PLAIN, {"stride": [1, 1, 1]}, {}, "3 values in stride"),
    "bias": ("MMCVDeformConv2d", PLAIN, {"bias": 1}, {}, "no input for one"),
    "no mask": ("MMCVModulatedDeformConv2d", {"x": X, "o": PLAIN["o"], "": X, "w": PLAIN["w"]}, {}, {}, "lacks input 2"),
    "mode": ("grid_sampler", {"x": X, "grid": X}, {"interpolation_mode": 3}, {}, "interpolation_mode=3"),
    "volumes": ("grid_sampler", VOLUMES, {}, {"opset": 19}, "rank 5"),
    "volumes of opset 20": ("grid_sampler", VOLUMES, {}, {"opset": 20}, ""),
    "no mode": ("MMCVRoiAlign", BOXES, {"aligned": 1}, {}, "lacks output_height"),
    "largest value": ("MMCVRoiAlign", BOXES, LARGEST, {}, "takes the maximum of interpolated values"),
    "unknown size": ("MMCVCornerPool", {"x": X}, {"mode": 0}, {"shape": (1, 2, "h", 4)}, "axis 2, whose size is not known"),
    "along channels": ("MMCVCornerPool", {"x": X}, {"mode": -1}, {}, "mode=-1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_is_named(name: str) -> None:
    op_type, inputs, attributes, options, reason = REFUSED[name]
    before = model(op_type, inputs, attributes, **options)
    changed = ir.from_proto(before)
    (found,) = standard_ops.standardise(changed)
    assert (found.name, found.op_type) == ("op", op_type) and reason in str(found.reason)
    assert bool(found.reason) == bool(reason) == (ir.to_proto(changed).graph.node[:] == before.graph.node[:])
    if name == "largest value":  # nor does the definition take the mean
        with pytest.raises(NotImplementedError):
            MendedEvaluator(before).run(None, dict(inputs))


MODEL = """<ir_version: 7, opset_import: ["" : 11, "mmdeploy" : 1]>
    net (float[N, 4, 8, 8] x, float[N, 18, 8, 8] o, float[N, 9, 8, 8] m) => (float[N, 1, 8, 8] y)
    <float[1, 4, 3, 3] w, float[1] b> { h = mmdeploy.MMCVModulatedDeformConv2d <padding = [1, 1]> (x, o, m, w, b)
        s = Softmax <axis = 1> (h) q = Squeeze <axes = [1]> (s) y = Unsqueeze <axes = [1]> (q) }"""


def test_the_opset_is_raised() -> None:
    proto = onnx.parser.parse_model(MODEL)
    weights = {"w": normal(1, 4, 3, 3), "b": normal(1)}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in weights.items())
    feeds = {"x": normal(2, 4, 8, 8), "o": normal(2, 18, 8, 8), "m": normal(2, 9, 8, 8)}
    (expected,) = MendedEvaluator(proto).run(None, {name: each.astype(np.float64) for name, each in feeds.items()})
    changed = ir.from_proto(proto)
    assert [each.reason for each in standard_ops.standardise(changed)] == [None]
    new = ir.to_proto(changed)
    assert [(each.domain, each.version) for each in new.opset_import] == [("", 19)]
    assert [each.name for each in new.graph.input] == ["x", "o", "m"]
    session = onnxruntime.InferenceSession(new.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, feeds)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6)
    function = '<opset_import: ["" : 11], domain: "f"> f (a) => (b) { b = Relu (a) }'
    proto.functions.append(onnx.parser.parse_function(function))
    (found,) = standard_ops.standardise(ir.from_proto(proto))
    assert "onnx.version_converter converts no model with functions" in str(found.reason)
    assert not standard_ops.has_foreign(ir.from_proto(model("MMCVSyncBatchNorm", {"x": X}, {})))
