"""Whatever a model or a feed can get wrong is an error that says what, where, got and expected."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.node_models import forward_feeds, forward_model, grad_model, run, session

ATTRIBUTES = [
    ({"eps": -1.0}, "attribute 'eps': got -1, expected a finite number >= 0"),
    ({"eps": float("nan")}, "attribute 'eps': got -?nan, expected a finite number"),
    ({"eps": float("inf")}, "attribute 'eps': got inf"),
    ({"momentum": 1.5}, r"attribute 'momentum': got 1.5, expected a number in \[0, 1\]"),
    ({"momentum": -0.5}, "attribute 'momentum': got -0.5"),
    ({"momentum": float("nan")}, "attribute 'momentum': got -?nan"),
    ({"momentum": 1}, "attribute 'momentum': got a value of another type, expected a single float"),
    ({"momentum": [0.5]}, "attribute 'momentum': got a value of another type"),
    ({"group": 3.0}, "attribute 'group': got a value of another type, expected a single string"),
    ({"group": [3]}, "attribute 'group': got a value of another type, expected a single string"),
    ({"group_size": 0}, "attribute 'group_size': got 0, expected a number of processes"),
    ({"group_size": -(2**62)}, "attribute 'group_size': got -4611686018427387904"),
    ({"group_size": 2**62}, "attribute 'group_size': got 4611686018427387904"),
    ({"training_mode": 2}, "attribute 'training_mode': got 2, expected 0 or 1"),
    ({"training_mode": -1}, "attribute 'training_mode': got -1"),
    ({"training_mode": 1.0}, "attribute 'training_mode': got a value of another type, expected a single int"),
    ({"stats_mode": "n"}, "attribute 'stats_mode': got 'n', expected one of 'exact', 'default', 'N'"),
    ({"stats_mode": ""}, "attribute 'stats_mode': got ''"),
]


@pytest.mark.parametrize(("attributes", "message"), ATTRIBUTES, ids=str)
def test_forward_attributes(attributes, message):
    with pytest.raises(Exception, match=f"MMCVSyncBatchNorm node 'bn1': {message}"):
        session(forward_model(**attributes))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"grad_reduction": "avg"}, "attribute 'grad_reduction': got 'avg', expected one of 'local', 'mean', 'sum'"),
        ({"training_mode": 7}, "attribute 'training_mode': got 7"),
        ({"stats_mode": "sum"}, "attribute 'stats_mode': got 'sum'"),
        ({"group_size": 0}, "attribute 'group_size': got 0"),
    ],
    ids=str,
)
def test_gradient_attributes(attributes, message):
    with pytest.raises(Exception, match=f"MMCVSyncBatchNormGrad node 'bn1': {message}"):
        session(grad_model(**attributes))


@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
@pytest.mark.parametrize("length", [1, 3, 5])
def test_statistics_of_another_length(name, length):
    feeds = forward_feeds(np.random.default_rng(0), (2, 4, 3, 3))
    feeds[name] = np.ones(length, np.float32)
    with pytest.raises(Exception, match=rf"bn1': input '{name}': got shape \({length},\), expected \(4,\)"):
        run(forward_model(), feeds)


@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
def test_rank_below_two(shape):
    feeds = {"input": np.ones(shape, np.float32)}
    with pytest.raises(Exception, match=r"bn1': input 'input': got shape \(.*\), expected rank 2 or more"):
        run(forward_model(inputs=("input",), outputs=("output",), ranks=len(shape)), feeds)


def test_statistic_of_rank_two():
    feeds = {"input": np.ones((2, 4, 3), np.float32), "": None}
    model = forward_model(inputs=("input", "", "", "weight"), outputs=("output",), ranks=3)
    import onnx

    proto = onnx.load_from_string(model)
    proto.graph.input[1].type.tensor_type.shape.dim.add()
    feeds["weight"] = np.ones((4, 1), np.float32)
    with pytest.raises(Exception, match=r"input 'weight': got shape \(4, 1\), expected \(4,\)"):
        run(proto.SerializeToString(), feeds)


@pytest.mark.parametrize("missing", ["running_mean", "running_var"])
def test_inference_without_running_statistics(missing):
    feeds = forward_feeds(np.random.default_rng(0), (2, 4, 3, 3))
    inputs = tuple(
        "" if name == missing else name for name in ("input", "running_mean", "running_var", "weight", "bias")
    )
    with pytest.raises(
        Exception, match=f"input '{missing}' is missing, expected running statistics because training_mode is 0"
    ):
        run(
            forward_model(inputs=inputs, outputs=("output",), training_mode=0),
            {k: v for k, v in feeds.items() if k != missing},
        )


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_running_output_without_its_input(name):
    feeds = forward_feeds(np.random.default_rng(0), (2, 4, 3, 3))
    outputs = (
        "output",
        name + "_out" if name == "running_mean" else "",
        name + "_out" if name == "running_var" else "",
    )
    inputs = tuple("" if other == name else other for other in ("input", "running_mean", "running_var"))
    with pytest.raises(Exception, match=f"output '{name}_out' is used but input '{name}' is missing"):
        run(forward_model(inputs=inputs, outputs=outputs), {k: v for k, v in feeds.items() if k in inputs})


def gradient_feeds():
    shape = (2, 4, 3, 3)
    statistics = {name: np.ones(4, np.float32) for name in ("weight", "saved_mean", "saved_invstd")}
    return {"grad_output": np.ones(shape, np.float32), "input": np.ones(shape, np.float32)} | statistics


def test_gradient_of_another_shape():
    feeds = gradient_feeds() | {"grad_output": np.ones((2, 4, 3, 2), np.float32)}
    with pytest.raises(
        Exception, match=r"input 'grad_output': got shape \(2, 4, 3, 2\), expected \(2, 4, 3, 3\), that of 'input'"
    ):
        run(grad_model(), feeds)


@pytest.mark.parametrize("name", ["weight", "saved_mean", "saved_invstd"])
def test_gradient_statistics_of_another_length(name):
    feeds = gradient_feeds() | {name: np.ones(3, np.float32)}
    with pytest.raises(Exception, match=rf"bn1': input '{name}': got shape \(3,\), expected \(4,\)"):
        run(grad_model(), feeds)


@pytest.mark.parametrize("index", [1, 2])
def test_gradient_output_that_does_not_exist(index):
    outputs = ["grad_input", "", "", "grad_weight", "grad_bias"]
    outputs[index] = "surplus"
    with pytest.raises(Exception, match=r"output 'unused_running_(mean|var)' is used, expected an empty name"):
        run(grad_model(outputs=outputs), gradient_feeds())


def test_integer_input_is_refused():
    import onnx

    proto = onnx.load_from_string(forward_model(inputs=("input",), outputs=("output",)))
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.elem_type = onnx.TensorProto.INT32
    with pytest.raises(Exception, match=r"MMCVSyncBatchNorm|INT|int32|Type"):
        run(proto.SerializeToString(), {"input": np.ones((2, 3), np.int32)})


def test_mixed_statistics_types_are_refused():
    import onnx

    proto = onnx.load_from_string(forward_model())
    proto.graph.input[3].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    feeds = forward_feeds(np.random.default_rng(0), (2, 4, 3, 3))
    feeds["weight"] = feeds["weight"].astype(np.float64)
    with pytest.raises(Exception, match=r"(?i)type"):
        run(proto.SerializeToString(), feeds)
