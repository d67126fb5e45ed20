"""Whatever a model or a feed can get wrong is an error that says what, where, got and expected."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.support.node_models import (
    FORWARD_INPUTS,
    GRAD_INPUTS,
    GRAD_OUTPUTS,
    forward_feeds,
    forward_model,
    grad_model,
    run,
    session,
)

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


def ones(*shape):
    return np.ones(shape, np.float32)


FORWARD = forward_feeds(np.random.default_rng(0), (2, 4, 3, 3))
BACKWARD = {"grad_output": ones(2, 4, 3, 3), "input": ones(2, 4, 3, 3)} | dict.fromkeys(GRAD_INPUTS[2:], ones(4))


def forward_without(name, outputs):
    return forward_model(inputs=["" if other == name else other for other in FORWARD_INPUTS], **outputs)


RUNNING = ("running_mean", "running_var")
# A model, and what it is fed.
RUNS = [
    *(
        (forward_model(), FORWARD | {name: ones(length)}, rf"input '{name}': got shape \({length},\), expected \(4,\)")
        for name in FORWARD_INPUTS[1:]
        for length in (1, 3, 5)
    ),
    *(
        (grad_model(), BACKWARD | {name: ones(3)}, rf"input '{name}': got shape \(3,\), expected \(4,\)")
        for name in GRAD_INPUTS[2:]
    ),
    (
        grad_model(),
        BACKWARD | {"grad_output": ones(2, 4, 3, 2)},
        r"input 'grad_output': got shape \(2, 4, 3, 2\), expected \(2, 4, 3, 3\), that of 'input'",
    ),
    *(
        (
            forward_model(inputs=("input",), outputs=("output",), ranks=len(shape)),
            {"input": ones(*shape)},
            r"input 'input': got shape \(.*\), expected rank 2 or more",
        )
        for shape in ((), (4,))
    ),
    *(
        (
            forward_without(name, {"outputs": ("output",), "training_mode": 0}),
            FORWARD,
            f"input '{name}' is missing, expected running statistics because training_mode is 0",
        )
        for name in RUNNING
    ),
    *(
        (
            forward_without(name, {"outputs": ("output", *(f"{it}_out" if it == name else "" for it in RUNNING))}),
            FORWARD,
            f"output '{name}_out' is used but input '{name}' is missing",
        )
        for name in RUNNING
    ),
    *(
        (
            grad_model(outputs=[*GRAD_OUTPUTS[:index], "surplus", *GRAD_OUTPUTS[index + 1 :]]),
            BACKWARD,
            r"output 'unused_running_(mean|var)' is used, expected an empty name",
        )
        for index in (1, 2)
    ),
]


@pytest.mark.parametrize(("model", "feeds", "message"), RUNS, ids=[str(index) for index in range(len(RUNS))])
def test_runs(model, feeds, message):
    made = session(model)
    with pytest.raises(Exception, match=f"bn1': {message}"):
        run(made, {value.name: feeds[value.name] for value in made.get_inputs()})


def test_statistic_of_rank_two():
    proto = onnx.load_from_string(forward_model(inputs=("input", "", "", "weight"), outputs=("output",), ranks=3))
    proto.graph.input[1].type.tensor_type.shape.dim.add()
    with pytest.raises(Exception, match=r"input 'weight': got shape \(4, 1\), expected \(4,\)"):
        run(proto.SerializeToString(), {"input": ones(2, 4, 3), "weight": ones(4, 1)})


def test_integer_input_is_refused():
    proto = onnx.load_from_string(forward_model(inputs=("input",), outputs=("output",)))
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.elem_type = onnx.TensorProto.INT32
    with pytest.raises(Exception, match=r"MMCVSyncBatchNorm|INT|int32|Type"):
        run(proto.SerializeToString(), {"input": np.ones((2, 3), np.int32)})


def test_mixed_statistics_types_are_refused():
    proto = onnx.load_from_string(forward_model())
    proto.graph.input[3].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    feeds = forward_feeds(np.random.default_rng(0), (2, 4, 3, 3))
    feeds["weight"] = feeds["weight"].astype(np.float64)
    with pytest.raises(Exception, match=r"(?i)type"):
        run(proto.SerializeToString(), feeds)
