"""The forward operator inside ONNX Runtime against the float64 oracle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bnexport import tolerances
from tests.support import kernel_oracle as oracle
from tests.support.node_models import FORWARD_INPUTS, FORWARD_OUTPUTS, forward_feeds, forward_model, run, session

# Attributes are float32 in a model.
MOMENTUM, EPS = float(np.float32(0.1)), float(np.float32(1e-5))

SHAPES = [
    (1, 1),
    (7, 5),
    (3, 4, 1),
    (2, 3, 16),
    (5, 2, 17),
    (4, 3, 5, 7),
    (8, 16, 7, 7),
    (2, 64, 12, 12),
    (1, 2, 100, 100),
    (33, 3, 6, 6),
    (2, 3, 4, 5, 6),
    (300, 1, 2, 2),
    (2, 1, 1, 9000),
]


def check(got, feeds, want, dtype):
    condition = oracle.condition_of(feeds["input"], want.mean, want.invstd)
    weight = float(np.abs(oracle.wide(feeds["weight"])).max()) if "weight" in feeds else 1.0
    std = float(np.max(1 / np.maximum(want.invstd, 1e-30), initial=0.0))
    scale = max(
        1.0,
        std,
        float(np.max(np.abs(want.mean), initial=0.0)),
        float(np.max(np.abs(feeds.get("running_var", 1)), initial=0)),
    )
    statistic = tolerances.statistic(dtype, scale=scale)
    expected = {
        "output": (want.y, tolerances.forward(dtype, condition=condition, weight=weight)),
        "running_mean_out": (want.running_mean, statistic),
        "running_var_out": (want.running_var, statistic),
        "saved_mean": (want.mean, statistic),
        "saved_invstd": (want.invstd, tolerances.statistic(dtype, scale=0.0)),
    }
    for name, value in got.items():
        oracle.assert_within(value, *expected[name], name)


def reference(feeds, **options):
    options = {"momentum": MOMENTUM, "eps": EPS} | options
    return oracle.forward(
        [feeds["input"]],
        feeds.get("weight"),
        feeds.get("bias"),
        feeds.get("running_mean"),
        feeds.get("running_var"),
        **options,
    )[0]


@pytest.mark.parametrize("training", [1, 0], ids=["training", "inference"])
@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_all_shapes(dtype, training):
    sessions = {}
    for index, shape in enumerate(SHAPES):
        if len(shape) not in sessions:
            sessions[len(shape)] = session(forward_model(dtype=dtype, ranks=len(shape), training_mode=training))
        feeds = forward_feeds(np.random.default_rng(index), shape, dtype, mean=2.0)
        check(run(sessions[len(shape)], feeds), feeds, reference(feeds, training=training), dtype)


@pytest.mark.parametrize("stats_mode", ["exact", "default", "N"])
def test_modes_are_equal_in_one_process(stats_mode):
    feeds = forward_feeds(np.random.default_rng(1), (4, 3, 5, 5))
    check(run(forward_model(stats_mode=stats_mode), feeds), feeds, reference(feeds), "float32")


@pytest.mark.parametrize("domain", ["mmcv", ""])
@pytest.mark.parametrize("opset", [11, 17])
def test_domains_and_absent_attributes(domain, opset):
    feeds = forward_feeds(np.random.default_rng(2), (4, 3, 5, 5))
    check(run(forward_model(domain=domain, opset=opset), feeds), feeds, reference(feeds), "float32")


def test_every_subset_of_inputs_and_outputs():
    rng = np.random.default_rng(3)
    for present in itertools.product([True, False], repeat=4):
        inputs = ["input"] + [name if keep else "" for name, keep in zip(FORWARD_INPUTS[1:], present, strict=True)]
        for used in itertools.product([True, False], repeat=4):
            outputs = ["output"] + [name if keep else "" for name, keep in zip(FORWARD_OUTPUTS[1:], used, strict=True)]
            if (outputs[1] and not inputs[1]) or (outputs[2] and not inputs[2]):
                continue
            feeds = {k: v for k, v in forward_feeds(rng, (3, 2, 4, 4)).items() if k in inputs}
            got = run(forward_model(inputs=inputs, outputs=outputs), feeds)
            assert set(got) == set(filter(None, outputs))
            check(got, feeds, reference(feeds), "float32")


def test_trailing_inputs_and_outputs_left_out():
    feeds = forward_feeds(np.random.default_rng(4), (3, 2, 4, 4))
    for count in range(1, 6):
        inputs, outputs = FORWARD_INPUTS[:count], FORWARD_OUTPUTS[: min(count, 3)]
        kept = {name: feeds[name] for name in inputs}
        check(run(forward_model(inputs=inputs, outputs=outputs), kept), kept, reference(kept), "float32")


@pytest.mark.parametrize(("momentum", "eps"), [(0.0, 1e-5), (1.0, 0.0), (0.5, 1e-3), (0.1, 1.0)])
def test_momentum_and_eps(momentum, eps):
    feeds = forward_feeds(np.random.default_rng(5), (4, 3, 5, 5))
    got = run(forward_model(momentum=momentum, eps=eps), feeds)
    check(got, feeds, reference(feeds, momentum=float(np.float32(momentum)), eps=float(np.float32(eps))), "float32")


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4), (2, 0, 4, 4), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("training", [1, 0])
def test_zero_sized_tensors(shape, training):
    feeds = forward_feeds(np.random.default_rng(6), shape)
    got = run(forward_model(training_mode=training), feeds)
    assert got["output"].shape == shape
    np.testing.assert_array_equal(got["running_mean_out"], feeds["running_mean"])
    np.testing.assert_array_equal(got["running_var_out"], feeds["running_var"])
    if training:
        np.testing.assert_array_equal(got["saved_mean"], np.zeros(shape[1], np.float32))


def test_constant_channel_with_eps_zero_gives_the_bias():
    feeds = forward_feeds(np.random.default_rng(7), (4, 2, 8, 8))
    feeds["input"][:, 0] = 3.25
    got = run(forward_model(eps=0.0), feeds)
    assert got["saved_invstd"][0] == 0
    np.testing.assert_array_equal(got["output"][:, 0], np.full((4, 8, 8), feeds["bias"][0]))


def test_one_value_has_the_unbiased_factor_one():
    feeds = forward_feeds(np.random.default_rng(8), (1, 3, 1, 1))
    check(run(forward_model(), feeds), feeds, reference(feeds), "float32")


@pytest.mark.parametrize(
    ("mean", "std"), [(1e4, 1.0), (1e6, 1.0), (-3e3, 1e-3), (0.0, 1e-20), (0.0, 1e18), (1e25, 1e20)]
)
def test_large_means_and_extreme_scales(mean, std):
    """One-pass float32 sums give a negative variance here; squares leave the range of float32 in the last ones."""
    for shape in [(4, 3, 40, 40), (16, 6, 3, 3)]:
        feeds = forward_feeds(np.random.default_rng(9), shape, mean=mean, std=std)
        feeds["running_mean"][:] = 0
        feeds["running_var"][:] = 1
        want = reference(feeds, eps=0.0)
        got = run(forward_model(eps=0.0, outputs=("output", "", "", "saved_mean", "saved_invstd")), feeds)
        # The data is exact, so the kernel's error does not grow with the condition: it centres in two parts.
        bound = tolerances.forward("float32", condition=1.0, weight=float(np.abs(feeds["weight"]).max()))
        oracle.assert_within(got["output"], want.y, bound, f"output {shape}")
        oracle.assert_within(got["saved_invstd"], want.invstd, tolerances.Tolerance(1e-5, 0), "saved_invstd")


def test_outlier_in_the_first_position():
    feeds = forward_feeds(np.random.default_rng(10), (2, 3, 80, 80))
    feeds["input"][:, :, 0, 0] = 1e7
    check(run(forward_model(), feeds), feeds, reference(feeds), "float32")


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
    want = reference(feeds)
    got = run(forward_model(dtype="float16", outputs=("output",)), feeds)["output"]
    with np.errstate(over="ignore"):
        assert np.isinf(got[:, 0][np.abs(want.y[:, 0]) > 65520]).all()
        np.testing.assert_allclose(got[:, 1].astype(float), want.y[:, 1], rtol=0, atol=2.0**-25)


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_same_bits_for_any_number_of_threads(dtype):
    for shape in [(8, 32, 28, 28), (2, 3, 200, 200), (16, 300, 3, 3)]:
        feeds = forward_feeds(np.random.default_rng(13), shape, dtype)
        results = [run(session(forward_model(dtype=dtype), threads=threads), feeds) for threads in (1, 2, 3, 5)]
        for other in results[1:]:
            for name, value in results[0].items():
                assert value.tobytes() == other[name].tobytes(), f"{name} {shape}"


def test_inference_does_not_hide_a_negative_variance():
    feeds = forward_feeds(np.random.default_rng(14), (2, 2, 4, 4))
    feeds["running_var"][0] = -1
    got = run(forward_model(training_mode=0), feeds)
    assert np.isnan(got["output"][:, 0]).all() and np.isfinite(got["output"][:, 1]).all()
