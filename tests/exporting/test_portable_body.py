"""The portable body in ONNX Runtime and in onnx.reference against the closed forms."""

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest

from bnexport import schema
from bnexport.exporting.finish import portable_body
from tests.support import kernel_reference
from tests.support.node_models import forward_feeds, forward_model

ENGINES = {
    "onnxruntime": lambda model: onnxruntime.InferenceSession(model.SerializeToString()),
    "onnx.reference": onnx.reference.ReferenceEvaluator,
}


def _feeds(shape, dtype="float32", mean=3.0):
    return forward_feeds(np.random.default_rng(0), shape, dtype, mean=mean)


def _run(feeds, dtype="float32", engine="onnxruntime", **attributes):
    attributes = {a.name: a.default for a in schema.SYNC_BATCH_NORM.attributes} | {"training_mode": 1} | attributes
    model = onnx.load_from_string(forward_model(dtype=dtype, ranks=feeds["input"].ndim, opset=18, **attributes))
    model.functions.append(portable_body(18))
    onnx.checker.check_model(model)
    return ENGINES[engine](model).run(None, feeds)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "shape", [(4, 3), (2, 3, 5), (2, 3, 4, 5), (2, 3, 2, 2, 2), (0, 3, 4), (2, 3, 0), (1, 3), (2, 0, 4)], ids=str
)
@pytest.mark.parametrize("training", [0, 1], ids=["eval", "train"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_against_the_closed_form(dtype, training, shape, engine):
    feeds = _feeds(shape, dtype)
    output, new_mean, new_var, mean, invstd = _run(feeds, dtype, engine, training_mode=training, momentum=0.25)
    vectors = [feeds[name] for name in ("weight", "bias", "running_mean", "running_var")]
    options = {"training": bool(training), "momentum": 0.25, "eps": float(np.float32(1e-5))}  # as an attribute of ONNX
    expected = kernel_reference.forward(feeds["input"], *vectors, **options)
    assert output.dtype == feeds["input"].dtype
    results = {"output": output, "running_mean": new_mean, "running_var": new_var, "mean": mean, "invstd": invstd}
    kernel_reference.check_forward(dtype, expected, vectors[0], vectors[2:], **results)


def test_large_mean():
    feeds = _feeds((8, 3, 32, 32), mean=1e5)
    expected = kernel_reference.forward(feeds["input"], feeds["weight"], feeds["bias"])
    kernel_reference.check_forward("float32", expected, feeds["weight"], output=_run(feeds)[0])


def test_constant_channel_without_eps():
    feeds = _feeds((4, 2, 3))
    feeds["input"][:] = 7
    np.testing.assert_array_equal(_run(feeds, eps=0.0)[0], np.broadcast_to(feeds["bias"][:, None], (4, 2, 3)))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_group_may_be_an_int(engine):
    """As MMCV's own exporter writes it; a body is for one process, whatever its group is called."""
    feeds = _feeds((2, 3, 4))
    for value, other in zip(_run(feeds, engine=engine, group=7), _run(feeds, engine=engine), strict=True):
        np.testing.assert_array_equal(value, other)
