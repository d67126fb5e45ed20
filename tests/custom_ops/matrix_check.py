"""What every version of ONNX Runtime must do with the library; see matrix.py.

Models are written with the environment's onnx; feeds are float32, float16 and float64, which every
version takes from NumPy. No pytest: old versions come with an old NumPy.
"""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime as ort

from bnexport.native.library import register
from bnexport.training import contract
from tests.support import kernel_reference as reference
from tests.support import training_nodes
from tests.support.node_models import forward_feeds, forward_model, grad_model, run, session


def check_forward() -> int:
    cases = 0
    for dtype in ("float32", "float16", "float64"):
        for domain in ("mmcv", ""):
            for training in (1, 0):
                feeds = forward_feeds(np.random.default_rng(cases), (4, 6, 9, 7), dtype)
                got = run(forward_model(dtype=dtype, domain=domain, training_mode=training), feeds)
                vectors = [feeds[name] for name in ("weight", "bias", "running_mean", "running_var")]
                eps, momentum = float(np.float32(1e-5)), float(np.float32(0.1))
                want = reference.forward(feeds["input"], *vectors, training=training, momentum=momentum, eps=eps)
                results = {name.removesuffix("_out").removeprefix("saved_"): value for name, value in got.items()}
                reference.check_forward(dtype, want, vectors[0], vectors[2:], **results)
                cases += 1
    return cases


def check_absent_inputs_and_outputs() -> int:
    """An empty input in the middle crashed while shapes were inferred, up to 1.23.2; absent outputs aborted, up to 1.27."""
    feeds = forward_feeds(np.random.default_rng(0), (2, 3, 4, 5))
    subsets = [
        (("input",), ("output",)),
        (("input", "", "", "weight", "bias"), ("output", "", "", "saved_mean", "saved_invstd")),
        (("input", "", "", "", "bias"), ("output", "", "", "", "saved_invstd")),
        (("input", "running_mean", "running_var"), ("output", "", "running_var_out")),
    ]
    for inputs, outputs in subsets:
        got = run(forward_model(inputs=inputs, outputs=outputs), feeds)
        assert set(got) == set(filter(None, outputs))
    return len(subsets)


def check_gradient() -> int:
    rng = np.random.default_rng(1)
    x, dy = rng.normal(size=(4, 3, 8, 8)).astype(np.float32), rng.normal(size=(4, 3, 8, 8)).astype(np.float32)
    weight = rng.normal(size=3).astype(np.float32)
    statistics = reference.forward(x)
    feeds = {
        "grad_output": dy, "input": x, "weight": weight,
        "saved_mean": statistics.mean.astype(np.float32), "saved_invstd": statistics.invstd.astype(np.float32),
    }  # fmt: skip
    want = reference.backward(dy, x, weight, feeds["saved_mean"], feeds["saved_invstd"])
    subsets = [("grad_input", "", "", "grad_weight", "grad_bias"), ("", "", "", "grad_weight"), ("grad_input",)]
    for outputs in subsets:
        got = run(grad_model(outputs=outputs), feeds)
        reference.check_backward("float32", want, weight, feeds["saved_mean"], feeds["saved_invstd"], dy, **got)
    return len(subsets)


def check_training_steps() -> int:
    """Kernels of a second library; without them the node says what to register. Kernels that are there stay."""
    x, dy = np.random.default_rng(4).normal(size=(2, 3, 5)).astype(np.float32)[None], np.ones((1, 2, 3, 5), np.float32)
    feeds = {"grad_output": dy, "input": x}
    made = training_nodes.model(contract.RELU_GRAD, feeds)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    register(options)
    try:
        ort.InferenceSession(made, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        assert "bnexport.register(session_options, training=True)" in str(error), str(error)
    else:
        raise AssertionError("a training step's graph must ask for its kernels")
    got = training_nodes.run(contract.RELU_GRAD, feeds)
    np.testing.assert_array_equal(got["grad_input"], dy * (x > 0))
    return 2


def check_errors() -> int:
    feeds = forward_feeds(np.random.default_rng(2), (2, 3, 4, 5))
    cases = [
        ({"eps": -1.0}, feeds, "attribute 'eps': got -1"),
        ({"momentum": 3}, feeds, "attribute 'momentum': got a value of another type"),
        ({"stats_mode": "foo"}, feeds, "attribute 'stats_mode': got 'foo'"),
        ({"group": "nowhere", "group_size": 2}, feeds, "bnexport.register_group"),
        ({}, feeds | {"weight": np.ones(7, np.float32)}, "input 'weight': got shape (7,), expected (3,)"),
    ]
    for attributes, bad, message in cases:
        try:
            run(session(forward_model(**attributes)), bad)
        except Exception as error:
            assert message in str(error), str(error)
            continue
        raise AssertionError(f"{attributes} must fail")
    return len(cases)


def check_threads() -> int:
    feeds = forward_feeds(np.random.default_rng(3), (8, 32, 28, 28))
    results = [run(session(forward_model(), threads=threads), feeds)["output"].tobytes() for threads in (1, 2, 4)]
    assert len(set(results)) == 1
    return 1


def main() -> None:
    cases = check_forward() + check_absent_inputs_and_outputs() + check_gradient() + check_errors() + check_threads()
    cases += check_training_steps()
    print(f"onnxruntime {ort.__version__}, numpy {np.__version__}: {cases} cases")


if __name__ == "__main__":
    sys.exit(main())
