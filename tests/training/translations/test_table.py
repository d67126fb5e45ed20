"""The table itself: what it holds, what its nodes say, and what it refuses."""

import onnx_ir as ir
import pytest
import torch
from onnxscript import evaluator, opset18
from torch.onnx._internal.exporter._building import OpRecorder

from bnexport import schema
from bnexport.errors import UnsupportedModelError
from bnexport.sync_bn import operators
from bnexport.training import contract
from bnexport.training.translations import decompositions, translation_table

ATEN = torch.ops.aten
GROUP = ("pair", 2, "N", "mean", 7)


def value(*shape):
    return ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))


def record(overload, *arguments, standard_ops_only=False, with_cpu_kernels=False):
    """The nodes that a translation makes, and what it returns."""
    recorder = OpRecorder(opset18, {})
    with evaluator.default_as(recorder):
        outputs = translation_table(standard_ops_only, with_cpu_kernels)[overload](*arguments)
    return recorder.nodes, outputs


def test_what_is_translated_is_not_decomposed():
    assert not set(translation_table()) & set(decompositions())
    assert not set(translation_table(with_cpu_kernels=True)) & set(decompositions())
    assert set(translation_table(True)) == set(translation_table(False))


def test_the_only_custom_nodes_are_ours():
    vectors = [value(4) for _ in range(4)]
    arguments = (value("batch", 4, 3, 3), *vectors, True, 0.1, 1e-5)
    target = ATEN._native_batch_norm_legit_functional.default
    nodes, _ = record(target, *arguments)
    assert [(node.domain, node.op_type) for node in nodes] == [(schema.DOMAIN, schema.SYNC_BATCH_NORM.name)]
    nodes, _ = record(target, *arguments, standard_ops_only=True)
    assert {node.domain for node in nodes} == {""}


def test_a_number_may_depend_on_the_batch():
    """torch.onnx takes numbers alone."""
    rows = ir.Value(name="rows", shape=ir.Shape(()), type=ir.TensorType(ir.DataType.INT64))
    nodes, _ = record(ATEN.div.Scalar, value("batch", 4), rows)
    assert [node.op_type for node in nodes] == ["CastLike", "Div"]


def test_nodes_carry_the_group():
    image, vector = value("batch", 4, 3, 3), value(4)
    (forward, *_), outputs = record(operators.sync_batch_norm, image, *[vector] * 4, True, 0.3, 1e-3, *GROUP)
    tensors = image, image, vector, value(4), value(4)
    backward = record(operators.sync_batch_norm_backward, *tensors, True, [True] * 3, *GROUP)[0][0]
    for node in (forward, backward):
        found = {name: node.attributes[name].value for name in ("group", "group_size", "stats_mode", "training_mode")}
        assert found == {"group": "pair", "group_size": 2, "stats_mode": "N", "training_mode": 1}
    assert backward.attributes["grad_reduction"].as_string() == "mean"
    assert forward.attributes["momentum"].as_float() == pytest.approx(0.3)
    assert set(forward.attributes) == {attribute.name for attribute in schema.SYNC_BATCH_NORM.attributes}
    assert set(backward.attributes) == {attribute.name for attribute in schema.SYNC_BATCH_NORM_GRAD.attributes}
    assert len(outputs) == 5


def test_saved_statistics_reach_the_gradient_without_casts():
    image, vector = value("batch", 4, 3, 3), value(4)
    nodes, outputs = record(operators.sync_batch_norm, image, vector, vector, vector, vector, True, 0.3, 1e-3, *GROUP)
    saved = outputs[3:]
    for output in saved:
        # As torch's exporter does with what an operator returns.
        output.dtype = ir.DataType.DOUBLE
    backward, _ = record(operators.sync_batch_norm_backward, image, image, vector, *saved, True, [True] * 3, *GROUP)
    assert [node.op_type for node in backward] == [schema.SYNC_BATCH_NORM_GRAD.name]
    assert list(backward[0].inputs[3:]) == list(nodes[0].outputs[3:])


IMAGE = ("batch", 3, 9, 8)
KERNEL = (6, 3, 3, 3)
WINDOW = ([2], [1], [1], False, [0], 1)
# operator, shapes of its tensors, further arguments, the node in our domain or None for standard operators.
CPU_KERNELS = [
    (ATEN.convolution.default, (IMAGE, KERNEL, (6,)), WINDOW, "Conv"),
    (ATEN.convolution.default, (IMAGE[:3], KERNEL[:3], (6,)), WINDOW, "Conv"),
    (ATEN.convolution.default, ((*IMAGE, 7), (*KERNEL, 3), (6,)), WINDOW, "Conv"),
    (ATEN.convolution.default, ((*IMAGE, 7), (3, 1, 3, 3, 3), (3,)), (*WINDOW[:-1], 3), None),
    (ATEN.convolution.default, (IMAGE, (3, 6, 3, 3), (6,)), ([2], [1], [1], True, [0], 1), None),
    (ATEN.threshold_backward.default, (IMAGE, IMAGE), (0,), "ReluGrad"),
    (ATEN.hardtanh_backward.default, (IMAGE, IMAGE), (0, 6), "ReluGrad"),
]


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16])
@pytest.mark.parametrize(("overload", "shapes", "rest", "name"), CPU_KERNELS)
def test_cpu_kernels_are_for_float32(overload, shapes, rest, name, dtype):
    tensors = [value(*shape) for shape in shapes]
    for tensor in tensors:
        tensor.dtype = dtype
    nodes, _ = record(overload, *tensors, *rest, with_cpu_kernels=True)
    served = name is not None and dtype == ir.DataType.FLOAT
    assert nodes and [node.op_type for node in nodes if node.domain == contract.DOMAIN] == ([name] if served else [])


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, True), (True, True, True)])
def test_gradients_that_nobody_needs_have_no_name(mask):
    image, vector = value("batch", 4, 3, 3), value(4)
    tensors = image, image, vector, value(4), value(4)
    nodes, _ = record(operators.sync_batch_norm_backward, *tensors, True, list(mask), *GROUP)
    named = [output.name != "" for output in nodes[0].outputs]
    assert named == [mask[0], False, False, mask[1], mask[2]]


def test_standard_operators_cannot_communicate():
    vectors = [value(4) for _ in range(4)]
    with pytest.raises(UnsupportedModelError, match="'pair' of 2 processes, expected 1"):
        tensors = value("batch", 4, 3, 3), *vectors
        record(operators.sync_batch_norm, *tensors, True, 0.1, 1e-5, *GROUP, standard_ops_only=True)


WIDE = ("batch", 3, "height", 8)
CONVOLUTION = (value(*WIDE), value(*WIDE), value(3, 3, 3, 3), [3], [1], [1], [1], False, [0], 1, [True] * 3)
DYNAMIC = [
    (ATEN.convolution_backward.default, CONVOLUTION),
    (ATEN.max_pool2d_with_indices.default, (value(*WIDE), [3], [2], [1], [1], True)),
    (ATEN.avg_pool2d.default, (value(*WIDE), [3], [2], [1], True)),
    (ATEN.avg_pool2d_backward.default, (value(*WIDE), value(*WIDE), [3], [2], [1], False, True)),
    (ATEN._adaptive_avg_pool2d.default, (value(*WIDE), [2, 2])),
    (ATEN._adaptive_avg_pool2d_backward.default, (value("batch", 3, 2, 2), value(*WIDE))),
    (ATEN.adaptive_max_pool2d.default, (value(*WIDE), [2, 2])),
    (ATEN.replication_pad2d_backward.default, (value(*WIDE), value(*WIDE), [1, 1, 1, 1])),
]


@pytest.mark.parametrize(("overload", "arguments"), DYNAMIC, ids=[str(overload) for overload, _ in DYNAMIC])
def test_dynamic_sizes_are_refused_where_a_form_needs_them(overload, arguments):
    name = str(overload).removeprefix("aten.").removesuffix(".default")
    message = rf"^aten::{name}: got .*batch, 3, height, 8.* expected static sizes"
    with pytest.raises(UnsupportedModelError, match=message):
        record(overload, *arguments)


def test_dynamic_sizes_are_enough_for_plain_pooling():
    for overload, kind in ((ATEN.max_pool2d_with_indices.default, "MaxPool"), (ATEN.avg_pool2d.default, "AveragePool")):
        assert record(overload, value(*WIDE), [3], [2], [1])[0][0].op_type == kind
