"""Values that are special, in the operators inside ONNX Runtime; test_fuzz has shapes, types, modes and absent tensors."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from bnexport import tolerances
from tests.support import kernel_oracle as oracle
from tests.support.node_models import ELEMENT_TYPES, forward_feeds, forward_model, grad_model, run, session

# Attributes are float32 in a model.
MOMENTUM, EPS = float(np.float32(0.1)), float(np.float32(1e-5))


def check(got, feeds, **options):
    """A forward's float32 results against the oracle."""
    vectors = (feeds[name] for name in ("weight", "bias", "running_mean", "running_var"))
    want = oracle.forward([feeds["input"]], *vectors, **{"momentum": MOMENTUM, "eps": EPS} | options)[0]
    condition = oracle.condition_of(feeds["input"], want.mean, want.invstd)
    weight = float(np.abs(feeds["weight"]).max())
    scale = max(1.0, float((1 / want.invstd).max()), float(np.abs(want.mean).max()), float(feeds["running_var"].max()))
    statistic = tolerances.statistic("float32", scale=scale)
    expected = {
        "output": (want.y, tolerances.forward("float32", condition=condition, weight=weight)),
        "running_mean_out": (want.running_mean, statistic),
        "running_var_out": (want.running_var, statistic),
        "saved_mean": (want.mean, statistic),
        "saved_invstd": (want.invstd, tolerances.statistic("float32", scale=0.0)),
    }
    for name, value in got.items():
        oracle.assert_within(value, *expected[name], name)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4), (2, 0, 4, 4), (0, 0, 0, 0)], ids=str)
def test_without_values_statistics_stay(shape):
    feeds = forward_feeds(np.random.default_rng(6), shape)
    for training in (1, 0):
        got = run(forward_model(training_mode=training), feeds)
        assert got["output"].shape == shape
        for name in ("running_mean", "running_var"):
            np.testing.assert_array_equal(got[f"{name}_out"], feeds[name])


def test_constant_channel_with_eps_zero_gives_the_bias():
    feeds = forward_feeds(np.random.default_rng(7), (4, 2, 8, 8))
    feeds["input"][:, 0] = 3.25
    got = run(forward_model(eps=0.0), feeds)
    assert got["saved_invstd"][0] == 0
    np.testing.assert_array_equal(got["output"][:, 0], np.full((4, 8, 8), feeds["bias"][0]))


def test_one_value_has_the_unbiased_factor_one():
    feeds = forward_feeds(np.random.default_rng(8), (1, 3, 1, 1))
    check(run(forward_model(), feeds), feeds)


@pytest.mark.parametrize(
    ("mean", "std"), [(1e4, 1.0), (1e6, 1.0), (-3e3, 1e-3), (0.0, 1e-20), (0.0, 1e18), (1e25, 1e20)]
)
def test_large_means_and_extreme_scales(mean, std):
    """One-pass float32 sums give a negative variance here; squares leave the range of float32 in the last ones."""
    for shape in [(4, 3, 40, 40), (16, 6, 3, 3)]:
        feeds = forward_feeds(np.random.default_rng(9), shape, mean=mean, std=std)
        want = oracle.forward([feeds["input"]], feeds["weight"], feeds["bias"], eps=0.0)[0]
        outputs = ("output", "", "", "saved_mean", "saved_invstd")
        got = run(forward_model(eps=0.0, outputs=outputs), feeds)
        # The data is exact, so the kernel's error does not grow with the condition: it centres in two parts.
        bound = tolerances.forward("float32", condition=1.0, weight=float(np.abs(feeds["weight"]).max()))
        oracle.assert_within(got["output"], want.y, bound, f"output {shape}")
        oracle.assert_within(got["saved_invstd"], want.invstd, tolerances.Tolerance(1e-5, 0), "saved_invstd")


def test_outlier_in_the_first_position():
    feeds = forward_feeds(np.random.default_rng(10), (2, 3, 80, 80))
    feeds["input"][:, :, 0, 0] = 1e7
    check(run(forward_model(), feeds), feeds)


def test_nan_and_infinity_stay_in_their_channel():
    feeds = forward_feeds(np.random.default_rng(11), (2, 4, 9, 9))
    clean = run(forward_model(), feeds)
    feeds["input"][0, 1, 3, 3] = np.nan
    feeds["input"][1, 2, 8, 8] = np.inf
    got = run(forward_model(), feeds)
    for channel in (0, 3):
        np.testing.assert_array_equal(got["output"][:, channel], clean["output"][:, channel])
    assert np.isnan(got["output"][:, 1]).all() and np.isnan(got["output"][:, 2]).all()
    assert np.isnan(got["saved_mean"][1]) and not np.isfinite(got["saved_mean"][2])


def test_half_precision_overflow_and_subnormals():
    feeds = forward_feeds(np.random.default_rng(12), (2, 2, 5, 5), "float16")
    feeds["weight"][:] = [1e6, 1e-7]
    feeds["bias"][:] = 0
    want = oracle.forward([feeds["input"]], feeds["weight"], feeds["bias"], eps=EPS)[0]
    got = run(forward_model(dtype="float16", outputs=("output",)), feeds)["output"]
    with np.errstate(over="ignore"):
        assert np.isinf(got[:, 0][np.abs(want.y[:, 0]) > 65520]).all()
        np.testing.assert_allclose(got[:, 1].astype(float), want.y[:, 1], rtol=0, atol=2.0**-25)


def test_inference_does_not_hide_a_negative_variance():
    feeds = forward_feeds(np.random.default_rng(14), (2, 2, 4, 4))
    feeds["running_var"][0] = -1
    got = run(forward_model(training_mode=0), feeds)
    assert np.isnan(got["output"][:, 0]).all() and np.isfinite(got["output"][:, 1]).all()


def gradient_feeds(rng, shape, dtype="float32", mean=0.5):
    S = oracle.statistics_dtype(dtype)
    x, dy = ((rng.normal(size=shape) + mean).astype(oracle.DTYPES[dtype]) for mean in (mean, 0.25))
    statistics = oracle.forward([x])[0]
    saved = {"saved_mean": statistics.mean.astype(S), "saved_invstd": statistics.invstd.astype(S)}
    return {"grad_output": dy, "input": x, "weight": rng.normal(size=shape[1]).astype(S), **saved}


@pytest.mark.parametrize("mean", [1e3, 1e6])
def test_gradient_with_large_means(mean):
    feeds = gradient_feeds(np.random.default_rng(3), (4, 3, 30, 30), mean=mean)
    got, (w, mean_, invstd) = (
        run(grad_model(), feeds),
        (oracle.wide(feeds[n]) for n in ("weight", "saved_mean", "saved_invstd")),
    )
    want = oracle.backward([feeds["grad_output"]], [feeds["input"]], w, mean_, invstd)[0]
    condition = oracle.condition_of(feeds["input"], mean_, invstd)
    scale = float(np.abs(w * invstd).max() * np.abs(feeds["grad_output"]).max())
    bound = tolerances.backward_input("float32", condition=condition, scale=scale)
    oracle.assert_within(got["grad_input"], want.dx, bound, "grad_input")
    bound = tolerances.backward_sum("float32", condition=condition, absolute_sum=float(want.absolute_dweight.max()))
    oracle.assert_within(got["grad_weight"], want.dweight, bound, "grad_weight")


def test_fixed_statistics_do_not_read_the_input():
    feeds = gradient_feeds(np.random.default_rng(4), (2, 3, 5, 5))
    feeds["input"][:] = np.inf
    got = run(grad_model(training_mode=0, outputs=("grad_input",)), feeds)["grad_input"]
    want = (feeds["weight"] * feeds["saved_invstd"]).reshape(1, 3, 1, 1) * feeds["grad_output"]
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_same_bits_for_any_number_of_threads(dtype):
    for shape in [(8, 32, 28, 28), (2, 3, 200, 200), (16, 300, 3, 3)]:
        rng = np.random.default_rng(13)
        for model, feeds in (
            (forward_model(dtype=dtype), forward_feeds(rng, shape, dtype)),
            (grad_model(dtype=dtype), gradient_feeds(rng, shape, dtype)),
        ):
            results = [run(session(model, threads=threads), feeds) for threads in (1, 2, 3, 5)]
            for name, value in results[0].items():
                assert all(value.tobytes() == other[name].tobytes() for other in results[1:]), f"{name} {shape}"


def test_in_a_plain_training_graph():
    """Forward, a squared loss, the gradient node and one step of SGD in one ordinary ONNX graph."""
    rng = np.random.default_rng(6)
    x, target = rng.normal(size=(2, 4, 3, 6, 6)).astype(np.float32)
    weight, bias = rng.normal(size=(2, 3)).astype(np.float32)
    forward, backward = (["x", "", "", "w", "b"], ["y", "", "", "mean", "invstd"]), ["dx", "", "", "dw", "db"]
    nodes = [
        helper.make_node("MMCVSyncBatchNorm", *forward, name="bn", domain="mmcv"),
        helper.make_node("Sub", ["y", "t"], ["dy"]),
        helper.make_node(
            "MMCVSyncBatchNormGrad", ["dy", "x", "w", "mean", "invstd"], backward, name="g", domain="mmcv"
        ),
        helper.make_node("Mul", ["dw", "rate"], ["step"]),
        helper.make_node("Sub", ["w", "step"], ["w.new"]),
    ]
    values = {"x": x, "t": target, "w": weight, "b": bias, "rate": np.array(0.01, np.float32)}

    def info(name, value):
        return helper.make_tensor_value_info(name, ELEMENT_TYPES["float32"], value.shape)

    ends = [info(name, value) for name, value in values.items()], [info("w.new", weight), info("dx", x)]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mmcv", 1)]
    model = helper.make_model(helper.make_graph(nodes, "step", *ends), opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model)
    got = run(model.SerializeToString(), values)
    want = oracle.forward([x], weight, bias, eps=EPS)[0]
    gradient = oracle.backward([want.y - target], [x], weight, want.mean, want.invstd)[0]
    np.testing.assert_allclose(got["w.new"], weight - 0.01 * gradient.dweight, rtol=1e-5)
    np.testing.assert_allclose(got["dx"], gradient.dx, rtol=1e-4, atol=1e-5)
