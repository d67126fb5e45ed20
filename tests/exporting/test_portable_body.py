"""The portable body in ONNX Runtime and in onnx.reference against the closed forms."""

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest
from onnx import helper

from bnexport import schema
from bnexport.exporting.finish import portable_body
from tests.support import kernel_reference

TYPES = {"float32": (1, 1), "float16": (10, 1), "float64": (11, 11)}
OPERATOR = schema.SYNC_BATCH_NORM
NAMES = [value.name for value in OPERATOR.inputs]


def _model(dtype, rank, training, eps=1e-5, momentum=0.25, group=""):
    data, statistics = TYPES[dtype]
    attributes = {a.name: a.default for a in OPERATOR.attributes} | {
        "training_mode": training,
        "eps": eps,
        "momentum": momentum,
        "group": group,
    }
    node = helper.make_node(
        OPERATOR.name, NAMES, [v.name for v in OPERATOR.outputs], domain=OPERATOR.domain, **attributes
    )

    def info(value):
        return helper.make_tensor_value_info(
            value.name, data if value.type == "T" else statistics, [None] * (rank if value.type == "T" else 1)
        )

    graph = helper.make_graph([node], "g", [info(v) for v in OPERATOR.inputs], [info(v) for v in OPERATOR.outputs])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(OPERATOR.domain, OPERATOR.version)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[portable_body(18)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def _feeds(dtype, shape, seed=0, mean=3.0):
    generator = np.random.default_rng(seed)
    S = np.float64 if dtype == "float64" else np.float32
    C = shape[1]
    return {
        "input": (generator.standard_normal(shape) + mean).astype(dtype),
        "running_mean": generator.standard_normal(C).astype(S),
        "running_var": generator.uniform(0.5, 2, C).astype(S),
        "weight": generator.standard_normal(C).astype(S),
        "bias": generator.standard_normal(C).astype(S),
    }


@pytest.mark.parametrize("engine", ["onnxruntime", "onnx.reference"])
@pytest.mark.parametrize(
    "shape", [(4, 3), (2, 3, 5), (2, 3, 4, 5), (2, 3, 2, 2, 2), (0, 3, 4), (2, 3, 0), (1, 3), (2, 0, 4)], ids=str
)
@pytest.mark.parametrize("training", [0, 1], ids=["eval", "train"])
@pytest.mark.parametrize("dtype", TYPES)
def test_against_the_closed_form(dtype, training, shape, engine):
    feeds, model = _feeds(dtype, shape), _model(dtype, len(shape), training)
    if engine == "onnxruntime":
        got = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    else:
        got = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    output, new_mean, new_var, mean, invstd = got
    # The attributes are float32.
    eps, momentum = float(np.float32(1e-5)), 0.25
    vectors = [feeds[name] for name in ("weight", "bias", "running_mean", "running_var")]
    expected = kernel_reference.forward(feeds["input"], *vectors, training=bool(training), momentum=momentum, eps=eps)
    assert output.dtype == feeds["input"].dtype
    results = {"output": output, "running_mean": new_mean, "running_var": new_var, "mean": mean, "invstd": invstd}
    kernel_reference.check_forward(dtype, expected, vectors[0], vectors[2:], **results)


def test_large_mean():
    feeds = _feeds("float32", (8, 3, 32, 32), mean=1e5)
    got = onnxruntime.InferenceSession(_model("float32", 4, 1).SerializeToString()).run(None, feeds)
    expected = kernel_reference.forward(feeds["input"], feeds["weight"], feeds["bias"])
    kernel_reference.check_forward("float32", expected, feeds["weight"], output=got[0])


def test_constant_channel_without_eps():
    feeds = _feeds("float32", (4, 2, 3))
    feeds["input"][:] = 7
    got = onnxruntime.InferenceSession(_model("float32", 3, 1, eps=0.0).SerializeToString()).run(None, feeds)
    np.testing.assert_array_equal(got[0], np.broadcast_to(feeds["bias"][:, None], (4, 2, 3)))


@pytest.mark.parametrize("engine", ["onnxruntime", "onnx.reference"])
def test_the_group_may_be_an_int(engine):
    """As MMCV's own exporter writes it; a body is for one process, whatever its group is called."""
    feeds = _feeds("float32", (2, 3, 4))
    got, expected = (
        onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
        if engine == "onnxruntime"
        else onnx.reference.ReferenceEvaluator(model).run(None, feeds)
        for model in (_model("float32", 3, 1, group=7), _model("float32", 3, 1))
    )
    for value, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(value, other)
