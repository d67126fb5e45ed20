"""Whatever a model or a feed can get wrong is an error that says what, where, got and expected; no crash."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bnexport import schema
from bnexport.native import capi
from bnexport.native.library import get_library_path
from bnexport.training import contract
from tests.support.node_models import FORWARD_INPUTS, GRAD_INPUTS, GRAD_OUTPUTS
from tests.support.training_nodes import model, run, session

WINDOW = {"strides": [1, 1], "pads": [1, 1], "dilations": [1, 1], "group": 1}
POOL = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1], "dilations": [1, 1]}
ADAM = {"one_minus_beta1": 0.1, "beta2": 0.9, "one_minus_beta2": 0.1, "eps": 1e-8, "weight_decay": 0.0}
SGD = {"momentum": 0.9, "weight_decay": 0.0, "nesterov": 0}


def ones(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(shape, dtype)


IMAGE, KERNEL = ones(2, 3, 8, 9), ones(4, 3, 3, 3)
GRADIENT = ones(2, 4, 8, 9)
UPDATES = [contract.ADAM_UPDATE, contract.SGD_UPDATE]
NAMES = [[value.name for value in operator.inputs] for operator in UPDATES]
# operator, inputs, attributes: each runs as it is.
VALID = {
    "MMCVSyncBatchNorm": (schema.SYNC_BATCH_NORM, {"input": ones(2, 4, 3, 3)} | dict.fromkeys(FORWARD_INPUTS[1:], ones(4)), {}),
    "MMCVSyncBatchNormGrad": (
        schema.SYNC_BATCH_NORM_GRAD,
        dict.fromkeys(GRAD_INPUTS[:2], ones(2, 4, 3, 3)) | dict.fromkeys(GRAD_INPUTS[2:], ones(4)),
        {"outputs": GRAD_OUTPUTS},
    ),
    "Conv": (contract.CONV, {"input": IMAGE, "weight": KERNEL, "bias": ones(4)}, WINDOW),
    "ConvInputGrad": (contract.CONV_INPUT_GRAD, {"grad_output": GRADIENT, "weight": KERNEL}, {**WINDOW, "input_shape": [8, 9]}),
    "ConvWeightGrad": (contract.CONV_WEIGHT_GRAD, {"grad_output": GRADIENT, "input": IMAGE}, {**WINDOW, "kernel_shape": [3, 3]}),
    "ReluGrad": (contract.RELU_GRAD, {"grad_output": IMAGE, "input": IMAGE}, {"low": 0.0}),
    "MaxPoolGrad": (contract.MAX_POOL_GRAD, {"grad_output": ones(2, 3, 4, 5), "input": IMAGE}, POOL),
    "AdamUpdate": (UPDATES[0], dict.fromkeys(NAMES[0][:5], ones(5)) | dict.fromkeys(NAMES[0][5:], ones()), ADAM),
    "SgdUpdate": (UPDATES[1], dict.fromkeys(NAMES[1][:3], ones(5)) | dict.fromkeys(NAMES[1][3:], ones()), SGD),
}  # fmt: skip


@pytest.mark.parametrize("name", VALID)
def test_as_they_are_they_run(name):
    operator, feeds, attributes = VALID[name]
    for values in run(operator, feeds, **attributes).values():
        assert np.isfinite(values).all()


ATTRIBUTES = [
    ("MMCVSyncBatchNorm", {"eps": -1.0}, "attribute 'eps': got -1, expected a finite number >= 0"),
    ("MMCVSyncBatchNorm", {"eps": float("nan")}, "attribute 'eps': got -?nan, expected a finite number"),
    ("MMCVSyncBatchNorm", {"eps": float("inf")}, "attribute 'eps': got inf"),
    ("MMCVSyncBatchNorm", {"momentum": 1.5}, r"attribute 'momentum': got 1.5, expected a number in \[0, 1\]"),
    ("MMCVSyncBatchNorm", {"momentum": -0.5}, "attribute 'momentum': got -0.5"),
    ("MMCVSyncBatchNorm", {"momentum": float("nan")}, "attribute 'momentum': got -?nan"),
    ("MMCVSyncBatchNorm", {"momentum": 1}, "attribute 'momentum': got a value of another type, expected a single float"),
    ("MMCVSyncBatchNorm", {"momentum": [0.5]}, "attribute 'momentum': got a value of another type"),
    ("MMCVSyncBatchNorm", {"group": 3.0}, "attribute 'group': got a value of another type, expected a single string"),
    ("MMCVSyncBatchNorm", {"group": [3]}, "attribute 'group': got a value of another type, expected a single string"),
    ("MMCVSyncBatchNorm", {"group_size": 0}, "attribute 'group_size': got 0, expected a number of processes"),
    ("MMCVSyncBatchNorm", {"group_size": -(2**62)}, "attribute 'group_size': got -4611686018427387904"),
    ("MMCVSyncBatchNorm", {"group_size": 2**62}, "attribute 'group_size': got 4611686018427387904"),
    ("MMCVSyncBatchNorm", {"training_mode": 2}, "attribute 'training_mode': got 2, expected 0 or 1"),
    ("MMCVSyncBatchNorm", {"training_mode": -1}, "attribute 'training_mode': got -1"),
    ("MMCVSyncBatchNorm", {"training_mode": 1.0}, "attribute 'training_mode': got a value of another type, expected a single int"),
    ("MMCVSyncBatchNorm", {"stats_mode": "n"}, "attribute 'stats_mode': got 'n', expected one of 'exact', 'default', 'N'"),
    ("MMCVSyncBatchNorm", {"stats_mode": ""}, "attribute 'stats_mode': got ''"),
    ("MMCVSyncBatchNormGrad", {"grad_reduction": "avg"}, "attribute 'grad_reduction': got 'avg', expected one of 'local', 'mean', 'sum'"),
    ("MMCVSyncBatchNormGrad", {"training_mode": 7}, "attribute 'training_mode': got 7"),
    ("MMCVSyncBatchNormGrad", {"stats_mode": "sum"}, "attribute 'stats_mode': got 'sum'"),
    ("MMCVSyncBatchNormGrad", {"group_size": 0}, "attribute 'group_size': got 0"),
    ("Conv", {"strides": None}, "attribute 'strides' is missing, expected a list of ints"),
    ("Conv", {"strides": [0, 1]}, r"attribute 'strides': got \(0, 1\), expected 1 to 3 numbers within \[1, 2\^31\)"),
    ("Conv", {"strides": [1, 1, 1, 1]}, r"attribute 'strides': got \(1, 1, 1, 1\), expected 1 to 3 numbers"),
    # ONNX Runtime reads a value of another type as an empty list.
    ("Conv", {"strides": 1}, r"attribute 'strides': got \(\), expected 1 to 3 numbers"),
    ("Conv", {"strides": [1.0, 1.0]}, r"attribute 'strides': got \(\), expected 1 to 3 numbers"),
    ("Conv", {"pads": [-1, 0]}, r"attribute 'pads': got \(-1, 0\), expected 2 numbers within \[0, 2\^31\)"),
    ("Conv", {"pads": [1]}, r"attribute 'pads': got \(1,\), expected 2 numbers"),
    ("Conv", {"dilations": [1, 2**31]}, r"attribute 'dilations': got \(1, 2147483648\)"),
    ("Conv", {"group": None}, "attribute 'group' is missing, expected a single int"),
    ("Conv", {"group": 0}, r"attribute 'group': got 0, expected a number within \[1, 2147483647\]"),
    ("Conv", {"group": [1]}, "attribute 'group': got a value of another type, expected a single int"),
    ("ConvInputGrad", {"input_shape": [8]}, r"attribute 'input_shape': got \(8,\), expected 2 numbers"),
    ("ConvInputGrad", {"input_shape": [0, 9]}, r"attribute 'input_shape': got \(0, 9\)"),
    ("ConvWeightGrad", {"kernel_shape": None}, "attribute 'kernel_shape' is missing"),
    ("ReluGrad", {"low": float("nan")}, "attribute 'low': got nan, expected a number"),
    ("ReluGrad", {"high": "6"}, "attribute 'high': got a value of another type, expected a single float"),
    ("MaxPoolGrad", {"strides": [2]}, r"attribute 'strides': got \(2,\), expected 2 numbers"),
    ("MaxPoolGrad", {"kernel_shape": [0, 3]}, r"attribute 'kernel_shape': got \(0, 3\)"),
    ("AdamUpdate", {"beta2": None}, "attribute 'beta2' is missing, expected a single float"),
    ("AdamUpdate", {"eps": float("nan")}, "attribute 'eps': got nan"),
    ("SgdUpdate", {"nesterov": 2}, r"attribute 'nesterov': got 2, expected a number within \[0, 1\]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), ATTRIBUTES, ids=str)
def test_attributes(name, changes, message):
    operator, feeds, attributes = VALID[name]
    with pytest.raises(Exception, match=f"{name} node 'node1': {message}"):
        session(model(operator, feeds, **{**attributes, **changes}))


# In a group, the name of which MMCV's exporter writes as a number.
UNKNOWN = {"group": -7, "group_size": 2}, r"'group': got '-7' with group_size 2, expected the name of a regist"
ALONE, RUNNING = {"outputs": ["output"]}, ("running_mean", "running_var")
NOT_RUNNING, DOUBLE = dict.fromkeys(FORWARD_INPUTS[1:]), ones(2, 3, 8, 9, dtype="float64")
SHAPES = [
    ("MMCVSyncBatchNorm", {}, *UNKNOWN),
    ("MMCVSyncBatchNormGrad", {}, *UNKNOWN),
    *(
        ("MMCVSyncBatchNorm", {name: ones(size)}, {}, rf"input '{name}': got shape \({size},\), expected \(4,\)")
        for name in FORWARD_INPUTS[1:]
        for size in (1, 3, 5)
    ),
    ("MMCVSyncBatchNorm", {"weight": ones(4, 1)}, {}, r"input 'weight': got shape \(4, 1\), expected \(4,\)"),
    ("MMCVSyncBatchNorm", {"input": ones(), **NOT_RUNNING}, ALONE, r"input 'input': got shape \(\), expected rank 2 or more"),
    ("MMCVSyncBatchNorm", {"input": ones(4), **NOT_RUNNING}, ALONE, r"input 'input': got shape \(4,\), expected rank 2 or more"),
    *(
        ("MMCVSyncBatchNorm", {name: None}, {**ALONE, "training_mode": 0},
         f"input '{name}' is missing, expected running statistics because training_mode is 0")
        for name in RUNNING
    ),
    ("MMCVSyncBatchNorm", {"running_mean": None}, {"outputs": ["output", "running_mean_out"]},
     "output 'running_mean_out' is used but input 'running_mean' is missing"),
    ("MMCVSyncBatchNorm", {"running_var": None}, {"outputs": ["output", "", "running_var_out"]},
     "output 'running_var_out' is used but input 'running_var' is missing"),
    ("MMCVSyncBatchNorm", {"input": np.ones((2, 3), np.int32), **NOT_RUNNING}, ALONE, "MMCVSyncBatchNorm|INT|int32|Type"),
    ("MMCVSyncBatchNorm", {"weight": ones(4, dtype="float64")}, {}, "(?i)type|no implementation|an implementation"),
    *(
        ("MMCVSyncBatchNormGrad", {name: ones(3)}, {}, rf"input '{name}': got shape \(3,\), expected \(4,\)")
        for name in GRAD_INPUTS[2:]
    ),
    ("MMCVSyncBatchNormGrad", {"grad_output": ones(2, 4, 3, 2)}, {},
     r"input 'grad_output': got shape \(2, 4, 3, 2\), expected \(2, 4, 3, 3\), that of 'input'"),
    *(
        ("MMCVSyncBatchNormGrad", {}, {"outputs": [*GRAD_OUTPUTS[:index], "surplus", *GRAD_OUTPUTS[index + 1 :]]},
         rf"output 'unused_{RUNNING[index - 1]}' is used, expected an empty name")
        for index in (1, 2)
    ),
    ("Conv", {"input": ones(2, 3, 8)}, {}, r"input 'input': got shape \(2, 3, 8\), expected rank 4"),
    ("Conv", {"weight": ones(4, 2, 3, 3)}, {}, r"'weight': got shape \(4, 2, 3, 3\), expected \(4, 3, 3, 3\)"),
    ("Conv", {"weight": ones(4, 3, 0, 3)}, {}, r"kernel \(0, 3\), expected sizes within"),
    ("Conv", {"weight": ones(0, 3, 3, 3)}, {}, "outputs 0, .* expected channels and outputs to be multiples"),
    ("Conv", {"bias": ones(3)}, {}, r"input 'bias': got shape \(3,\), expected \(4,\), one for each output"),
    ("Conv", {"bias": ones(4, 1)}, {}, r"input 'bias': got shape \(4, 1\)"),
    ("Conv", {}, {"group": 2}, "channels 3, outputs 4, .* expected channels and outputs to be multiples of the group 2"),
    ("Conv", {}, {"dilations": [9, 1]}, "expected a dilated kernel no larger than the padded extents"),
    ("Conv", {}, {"pads": [2**31 - 1] * 2, "dilations": [2**31 - 1] * 2}, r"expected fewer than 2\^60 padded values"),
    ("Conv", {}, {"pads": [2**31 - 1] * 2}, r"expected fewer than 2\^60 padded values"),
    ("Conv", {"weight": None}, {}, "Conv.*input 1 is marked single"),
    ("ConvInputGrad", {"grad_output": ones(2, 5, 8, 9)}, {}, r"'grad_output': got shape \(2, 5, 8, 9\), expected \(2, 4, 8, 9\)"),
    ("ConvInputGrad", {}, {"input_shape": [7, 9]}, r"'grad_output': got shape \(2, 4, 8, 9\), expected \(2, 4, 7, 9\)"),
    ("ConvInputGrad", {}, {"input_shape": [2**31 - 1] * 2}, r"expected fewer than 2\^60 padded values"),
    (
        "ConvInputGrad",
        {"grad_output": ones(2, 4, 3, 4)},
        {"strides": [2, 2], "dilations": [2, 2]},
        r"got strides \(2, 2\) and dilations \(2, 2\), expected 1 in one of the two",
    ),
    ("ConvWeightGrad", {"grad_output": ones(3, 4, 8, 9)}, {}, r"'grad_output': got shape \(3, 4, 8, 9\), expected \(2, 4, 8, 9\)"),
    ("ConvWeightGrad", {}, {"kernel_shape": [3, 5]}, r"'grad_output': got shape \(2, 4, 8, 9\), expected \(2, 4, 8, 7\)"),
    ("ConvWeightGrad", {"grad_output": ones(2, 4, 8)}, {}, "input 'grad_output': got shape .* expected rank 4"),
    ("ConvWeightGrad", {}, {"kernel_shape": [2**31 - 1] * 2, "pads": [2**30] * 2}, "expected"),
    ("ReluGrad", {"grad_output": ones(2, 3, 8)}, {}, r"'grad_output': got shape \(2, 3, 8\), expected \(2, 3, 8, 9\)"),
    ("MaxPoolGrad", {"input": ones(3, 8, 9)}, {}, r"'input': got shape \(3, 8, 9\), expected rank 4"),
    ("MaxPoolGrad", {"grad_output": ones(2, 3, 5, 6)}, {}, r"'grad_output': got shape \(2, 3, 5, 6\), expected that of the pooled"),
    ("MaxPoolGrad", {"grad_output": ones(2, 4, 4, 5)}, {}, "expected that of the pooled"),
    ("MaxPoolGrad", {}, {"dilations": [20, 1]}, "expected that of the pooled"),
    ("AdamUpdate", {"grad": ones(4)}, {}, r"input 'grad': got shape \(4,\), expected \(5,\), that of 'parameter'"),
    ("AdamUpdate", {"max_exp_avg_sq": ones(1)}, {}, r"input 'max_exp_avg_sq': got shape \(1,\)"),
    ("AdamUpdate", {"step_size": ones(1)}, {}, r"input 'step_size': got shape \(1,\), expected \(\), one number"),
    ("AdamUpdate", {"keep": ones(5)}, {}, r"input 'keep': got shape \(5,\), expected \(\)"),
    ("AdamUpdate", {"max_exp_avg_sq": None}, {}, "'new_max_exp_avg_sq' is used but 'max_exp_avg_sq' is missing"),
    ("SgdUpdate", {"momentum_buffer": ones(6)}, {}, r"input 'momentum_buffer': got shape \(6,\), expected \(5,\)"),
    ("SgdUpdate", {"momentum_buffer": None}, {}, "'new_momentum_buffer' is used but 'momentum_buffer' is missing"),
    ("SgdUpdate", {"lr": ones(0)}, {}, r"input 'lr': got shape \(0,\), expected \(\)"),
    # State that goes in comes out.
    *(
        (name, {}, {"outputs": [value.name for value in operator.outputs][:-1]},
         r"is used but 'new_\w+' is missing, expected both or neither")
        for name, operator in zip(("AdamUpdate", "SgdUpdate"), UPDATES)
    ),
    ("AdamUpdate", {}, {"outputs": ["new_parameter", "", "new_exp_avg_sq", "new_max_exp_avg_sq"]}, "new_exp_avg|AdamUpdate"),
    ("ReluGrad", {"grad_output": DOUBLE, "input": DOUBLE}, {}, "ReluGrad|double"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "inputs", "changes", "message"), SHAPES, ids=[f"{case[0]}-{index}" for index, case in enumerate(SHAPES)]
)
def test_shapes(name, inputs, changes, message):
    operator, feeds, attributes = VALID[name]
    feeds = {key: value for key, value in {**feeds, **inputs}.items() if value is not None}
    with pytest.raises(Exception, match=message) as raised:
        run(operator, feeds, **{**attributes, **changes})
    assert name in str(raised.value) or "ype" in str(raised.value)


@pytest.mark.cpp
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_other_instruction_sets(isa):
    """The operators' results, with less than this processor has."""
    if capi.instruction_set() == "baseline":
        pytest.skip("the processor has none to leave out")
    tests = Path(__file__).with_name("test_training_operators.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not threads", str(tests)],
        env=os.environ | {"BNEXPORT_ISA": isa, "BNEXPORT_LIBRARY": get_library_path()},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
