"""The gradient operator inside ONNX Runtime against the float64 closed forms."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import helper

from bnexport import tolerances
from tests.support import kernel_oracle as oracle
from tests.support.node_models import ELEMENT_TYPES, grad_model, run, session

SHAPES = [
    (6, 5),
    (3, 4, 1),
    (2, 3, 16),
    (4, 3, 5, 7),
    (8, 16, 7, 7),
    (1, 2, 100, 100),
    (2, 3, 4, 5, 6),
    (200, 2, 2, 2),
    (1, 1, 1, 9000),
]


def make_feeds(rng, shape, dtype="float32", mean=0.5):
    S = oracle.statistics_dtype(dtype)
    x = (rng.normal(size=shape) + mean).astype(oracle.DTYPES[dtype])
    statistics = oracle.forward([x])[0]
    return {
        "grad_output": (rng.normal(size=shape) + 0.25).astype(oracle.DTYPES[dtype]),
        "input": x,
        "weight": rng.normal(size=shape[1]).astype(S),
        "saved_mean": statistics.mean.astype(S),
        "saved_invstd": statistics.invstd.astype(S),
    }


def check(got, feeds, dtype, **options):
    weight = feeds.get("weight")
    mean, invstd = oracle.wide(feeds["saved_mean"]), oracle.wide(feeds["saved_invstd"])
    want = oracle.backward([feeds["grad_output"]], [feeds["input"]], weight, mean, invstd, **options)[0]
    condition = oracle.condition_of(feeds["input"], mean, invstd)
    w = np.ones_like(invstd) if weight is None else oracle.wide(weight)
    scale = float(np.max(np.abs(w * invstd), initial=0) * np.max(np.abs(oracle.wide(feeds["grad_output"])), initial=0))
    bounds = {
        "grad_input": (want.dx, tolerances.backward_input(dtype, condition=condition, scale=scale)),
        "grad_weight": (
            want.dweight,
            tolerances.backward_sum(
                dtype, condition=condition, absolute_sum=float(want.absolute_dweight.max(initial=0))
            ),
        ),
        "grad_bias": (
            want.dbias,
            tolerances.backward_sum(dtype, condition=condition, absolute_sum=float(want.absolute_dbias.max(initial=0))),
        ),
    }
    for name, value in got.items():
        oracle.assert_within(value, *bounds[name], name)


@pytest.mark.parametrize("training", [1, 0], ids=["batch statistics", "fixed statistics"])
@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_all_shapes(dtype, training):
    sessions = {}
    for index, shape in enumerate(SHAPES):
        if len(shape) not in sessions:
            sessions[len(shape)] = session(grad_model(dtype=dtype, ranks=len(shape), training_mode=training))
        feeds = make_feeds(np.random.default_rng(index), shape, dtype)
        check(run(sessions[len(shape)], feeds), feeds, dtype, training=training)


@pytest.mark.parametrize("reduction", ["local", "mean", "sum"])
@pytest.mark.parametrize("stats_mode", ["exact", "default", "N"])
def test_modes_are_equal_in_one_process(stats_mode, reduction):
    feeds = make_feeds(np.random.default_rng(1), (4, 3, 5, 5))
    check(run(grad_model(stats_mode=stats_mode, grad_reduction=reduction), feeds), feeds, "float32")


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("training", [1, 0])
def test_every_subset_of_outputs(training, with_weight):
    feeds = make_feeds(np.random.default_rng(2), (3, 4, 5, 6))
    inputs = ("grad_output", "input", "weight" if with_weight else "", "saved_mean", "saved_invstd")
    feeds = {k: v for k, v in feeds.items() if k in inputs}
    for used in itertools.product([True, False], repeat=3):
        if not any(used):
            continue
        names = [
            name if keep else "" for name, keep in zip(("grad_input", "grad_weight", "grad_bias"), used, strict=True)
        ]
        outputs = (names[0], "", "", names[1], names[2])
        got = run(grad_model(inputs=inputs, outputs=outputs, training_mode=training), feeds)
        assert set(got) == set(filter(None, names))
        check(got, feeds, "float32", training=training)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4), (2, 0, 4, 4)], ids=str)
def test_zero_sized_tensors(shape):
    feeds = {
        "grad_output": np.zeros(shape, np.float32),
        "input": np.zeros(shape, np.float32),
        "weight": np.ones(shape[1], np.float32),
        "saved_mean": np.zeros(shape[1], np.float32),
        "saved_invstd": np.ones(shape[1], np.float32),
    }
    got = run(grad_model(), feeds)
    assert got["grad_input"].shape == shape
    np.testing.assert_array_equal(got["grad_weight"], np.zeros(shape[1], np.float32))


@pytest.mark.parametrize("mean", [1e3, 1e6])
def test_large_means(mean):
    feeds = make_feeds(np.random.default_rng(3), (4, 3, 30, 30), mean=mean)
    check(run(grad_model(), feeds), feeds, "float32")


def test_fixed_statistics_do_not_read_the_input():
    feeds = make_feeds(np.random.default_rng(4), (2, 3, 5, 5))
    feeds["input"][:] = np.inf
    got = run(grad_model(training_mode=0, outputs=("grad_input",)), feeds)["grad_input"]
    want = (feeds["weight"] * feeds["saved_invstd"]).reshape(1, 3, 1, 1) * feeds["grad_output"]
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_same_bits_for_any_number_of_threads(dtype):
    for shape in [(8, 32, 28, 28), (2, 3, 200, 200), (16, 300, 3, 3)]:
        feeds = make_feeds(np.random.default_rng(5), shape, dtype)
        results = [run(session(grad_model(dtype=dtype), threads=threads), feeds) for threads in (1, 2, 3, 5)]
        for other in results[1:]:
            for name, value in results[0].items():
                assert value.tobytes() == other[name].tobytes(), f"{name} {shape}"


def test_in_a_plain_training_graph():
    """Forward, a squared loss, the gradient node and one step of SGD in one ordinary ONNX graph."""
    rng = np.random.default_rng(6)
    x = rng.normal(size=(4, 3, 6, 6)).astype(np.float32)
    target = rng.normal(size=x.shape).astype(np.float32)
    weight, bias = rng.normal(size=3).astype(np.float32), rng.normal(size=3).astype(np.float32)
    F = ELEMENT_TYPES["float32"]
    nodes = [
        helper.make_node(
            "MMCVSyncBatchNorm", ["x", "", "", "w", "b"], ["y", "", "", "mean", "invstd"], name="bn", domain="mmcv"
        ),
        helper.make_node("Sub", ["y", "t"], ["dy"]),
        helper.make_node(
            "MMCVSyncBatchNormGrad",
            ["dy", "x", "w", "mean", "invstd"],
            ["dx", "", "", "dw", "db"],
            name="bn_grad",
            domain="mmcv",
        ),
        helper.make_node("Mul", ["dw", "rate"], ["step"]),
        helper.make_node("Sub", ["w", "step"], ["w.new"]),
    ]
    values = {"x": x, "t": target, "w": weight, "b": bias, "rate": np.array(0.01, np.float32)}
    graph = helper.make_graph(
        nodes,
        "training_step",
        [helper.make_tensor_value_info(name, F, value.shape) for name, value in values.items()],
        [helper.make_tensor_value_info("w.new", F, weight.shape), helper.make_tensor_value_info("dx", F, x.shape)],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("mmcv", 1)], ir_version=8
    )
    onnx.checker.check_model(model)
    got = run(model.SerializeToString(), values)
    forward = oracle.forward([x], weight, bias, eps=float(np.float32(1e-5)))[0]
    dy = forward.y - target
    want = oracle.backward([dy], [x], weight, forward.mean, forward.invstd)[0]
    np.testing.assert_allclose(got["w.new"], weight - 0.01 * want.dweight, rtol=1e-5)
    np.testing.assert_allclose(got["dx"], want.dx, rtol=1e-4, atol=1e-5)
