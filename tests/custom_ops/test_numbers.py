"""What every engine of batch norm computes: torch's operators on the kernels and on torch's own operations, the nodes in ONNX
Runtime, and the CUDA kernels on an emulated device. tests/cpp has the shapes of the CPU kernels, tests/sync_bn groups.
"""

import math
import multiprocessing
import os
import sys
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from benchmarks.gpu.calls import Calls
from bnexport.native import capi
from bnexport.sync_bn import kernels, operators
from tests.support import kernel_reference as reference
from tests.support.node_models import forward_model, grad_model, run, session
from tests.support.onnx_text import model

LOCAL = ("", 1, "exact", "local", 0)
ENGINES = ("kernels", "torch", "node", "cuda")
Tensor = torch.Tensor
# Attributes are float32 in a model.
EPS, MOMENTUM = float(np.float32(1e-5)), float(np.float32(0.1))
VECTORS = ("running_mean", "running_var", "weight", "bias")


def of_torch(x: Tensor, dy: Tensor, given: dict[str, Tensor], training: bool, eps: float) -> dict[str, Any]:
    vectors = [given.get(name) for name in VECTORS]
    y, *running, mean, invstd = operators.sync_batch_norm(x, *vectors, training, MOMENTUM, eps, *LOCAL)
    assert mean.dtype == invstd.dtype == torch.float64
    gradients = operators.sync_batch_norm_backward(
        dy, x, given.get("weight"), mean, invstd, training, [True] * 3, *LOCAL
    )
    assert y.dtype == x.dtype and y.stride() == gradients[0].stride() == torch.empty_like(x).stride()
    return dict(zip(RESULTS, (y, *running, mean, invstd, *gradients)))


def of_nodes(x: Tensor, dy: Tensor, given: dict[str, Tensor], training: bool, eps: float) -> dict[str, Any]:
    dtype = str(x.dtype).removeprefix("torch.")

    def array(tensor: Tensor) -> np.ndarray:
        return tensor.double().numpy().astype(reference.DTYPES[str(tensor.dtype).removeprefix("torch.")])

    feeds = {"input": array(x), "grad_output": array(dy), **{name: array(value) for name, value in given.items()}}
    inputs = ("input", *(name if name in given else "" for name in VECTORS))
    outputs = (
        "output",
        *(f"{name}_out" if name in given else "" for name in VECTORS[:2]),
        "saved_mean",
        "saved_invstd",
    )
    options = {"dtype": dtype, "ranks": x.dim(), "training_mode": int(training)}
    got = run(forward_model(inputs=inputs, outputs=outputs, eps=eps, **options), feeds)
    feeds |= {name: got[name] for name in outputs[3:]}
    inputs = ("grad_output", "input", "weight" if "weight" in given else "", *outputs[3:])
    gradients = run(grad_model(inputs=inputs, **options), feeds)
    return dict(zip(RESULTS, (*(got.get(name) for name in outputs), *gradients.values())))


def of_cuda(x: Tensor, dy: Tensor, given: dict[str, Tensor], training: bool, eps: float) -> dict[str, Any]:
    calls = Calls(x, torch.empty_like(x).copy_(dy))  # one layout for both
    absent = {name: 0 for name in VECTORS if name not in given}
    absent |= {f"{name}_out": 0 for name in VECTORS[:2] if name not in given}
    calls.at |= given
    empty = () if x.numel() else ("x", "dy", "y", "dx")  # torch has no address for them
    calls.sizes["S"] = math.prod(x.shape[2:])
    addresses = absent | dict.fromkeys(empty, torch.ones(1).data_ptr())
    calls.prepare(**addresses, eps=eps, momentum=MOMENTUM, training=int(training))
    calls.forward()
    calls.backward()
    names = ("y", *(f"{name}_out" for name in VECTORS[:2]), "saved_mean", "saved_invstd", "dx", "dweight", "dbias")
    return dict(zip(RESULTS, (None if name in absent else calls.at[name] for name in names)))


FORWARD = ("output", "running_mean", "running_var", "mean", "invstd")
BACKWARD = ("grad_input", "grad_weight", "grad_bias")
RESULTS = FORWARD + BACKWARD


@pytest.fixture
def step(engine: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """A function of an input, its gradient and the vectors that returns all results of a step by name."""
    if engine == "cuda":
        request.getfixturevalue("emulated")
    monkeypatch.setattr(kernels, "backend", "torch" if engine == "torch" else "")
    assert engine != "kernels" or kernels.usable(torch.device("cpu"))
    call = {"node": of_nodes, "cuda": of_cuda}.get(engine, of_torch)
    return lambda x, dy, given=None, training=True, eps=EPS: call(x, dy, given or {}, training, eps)


def vectors(C: int, dtype: torch.dtype) -> dict[str, Tensor]:
    S = torch.float64 if dtype == torch.float64 else torch.float32
    made = {name: torch.randn(C, dtype=S) for name in VECTORS}
    return made | {"running_var": torch.rand(C, dtype=S) + 0.5}


def check(
    got: dict[str, Any], x: Tensor, dy: Tensor, given: dict[str, Tensor], training: bool = True, eps: float = EPS
) -> None:
    dtype, weight = str(x.dtype).removeprefix("torch."), given.get("weight")
    want = reference.forward(x, **given, training=training, momentum=MOMENTUM, eps=eps)
    old = [given[name] for name in VECTORS[:2] if name in given]
    present = {name: got[name] for name in FORWARD if got[name] is not None and getattr(want, name) is not None}
    assert len(present) == 3 + len(old)
    reference.check_forward(dtype, want, weight, old, **present)
    gradient = reference.backward(dy, x, weight, want.mean, want.invstd, training=training)
    results = {name: got[name] for name in BACKWARD}
    reference.check_backward(dtype, gradient, weight, want.mean, want.invstd, dy, **results)


def arranged(x: Tensor, layout: str) -> Tensor:
    if layout == "channels_last":
        order = (0, *range(2, x.dim()), 1)
        return x.permute(order).contiguous().permute(0, x.dim() - 1, *range(1, x.dim() - 1))
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return {"expanded": x[:1].expand(x.shape), "strided": torch.stack([x, x], dim=-1)[..., 0]}.get(layout, x)


LAYOUTS = ("contiguous", "channels_last", "transposed", "expanded", "strided")
SHAPES = ((6, 3), (4, 3, 7), (3, 5, 4, 6), (2, 3, 2, 3, 4))
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_type_and_layout(engine, step, dtype, training):
    layouts = {"node": LAYOUTS[:1], "cuda": LAYOUTS[:2]}.get(engine, LAYOUTS)
    for shape in SHAPES:
        for layout in layouts if len(shape) == 4 or engine != "cuda" else layouts[:1]:
            x, dy = arranged(torch.randn(shape).mul_(2).add_(1).to(dtype), layout), torch.randn(shape).to(dtype)
            given = vectors(shape[1], dtype)
            check(step(x, dy, given, training), x, dy, given, training)
    if training:
        check(step(x, dy), x, dy, {})


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0), (2, 0, 4), (0, 3)], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_without_values_statistics_stay(engine, step, shape):
    x, given = torch.randn(shape), vectors(shape[1], torch.float32)
    got = step(x, x, given)
    assert got["output"].shape == got["grad_input"].shape == shape
    for name in VECTORS[:2]:
        np.testing.assert_array_equal(got[name], given[name])
    for name in BACKWARD[1:]:
        np.testing.assert_array_equal(got[name], np.zeros(shape[1]))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_constant_channel_without_eps_gives_the_bias(engine, step):
    x, given = torch.full((4, 2, 3), 3.25), {"bias": torch.tensor([1.0, 2.0])}
    got = step(x, x, given, eps=0.0)
    np.testing.assert_array_equal(got["output"], given["bias"].view(1, 2, 1).expand(4, 2, 3))
    np.testing.assert_array_equal(got["invstd"], np.zeros(2))


@pytest.mark.parametrize("engine", ["node", "cuda"])  # torch refuses it
def test_one_value_has_the_unbiased_factor_one(engine, step):
    x, given = torch.randn(1, 3, 1, 1), vectors(3, torch.float32)
    check(step(x, x, given), x, x, given)


EXTREMES = ((1e2, 1.0), (1e4, 1.0), (-1e4, 1.0), (1e6, 1.0), (-3e3, 1e-3), (0.0, 1e-20), (0.0, 1e18), (1e25, 1e20))


@pytest.mark.parametrize(("mean", "std"), EXTREMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_large_means_and_extreme_scales(engine, step, mean, std):
    """One-pass float32 sums give a negative variance here; squares leave the range of float32 in the last ones."""
    for shape in ((4, 3, 40, 40), (16, 6, 3, 3), (3, 4, 700)):
        x, dy = (torch.randn(shape, dtype=torch.float64) * std + mean).float(), torch.randn(shape)
        given = {name: value for name, value in vectors(shape[1], torch.float32).items() if name in VECTORS[2:]}
        got, want = step(x, dy, given, eps=0.0), reference.forward(x, **given, eps=0.0)
        # The data is exact, so the error does not grow with the condition: all centre in two parts.
        reference.check_forward("float32", want, given["weight"], condition=1.0, output=got["output"])
        np.testing.assert_allclose(got["invstd"], want.invstd, rtol=1e-5)
        if std == 1:
            check(got, x, dy, given, eps=0.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_outlier_in_the_first_position(engine, step):
    for shape in ((2, 3, 80, 80), (3, 4, 700), (70, 3)):
        x, dy, given = torch.randn(shape), torch.randn(shape), vectors(shape[1], torch.float32)
        x.view(*shape[:2], -1)[:, :, 0] = 1e7
        check(step(x, dy, given), x, dy, given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_nan_and_infinity_stay_in_their_channel(engine, step, dtype):
    for shape in ((2, 4, 9, 9), (40, 4), (3, 4, 901)):
        x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        clean = step(x, dy)
        # Next to sound channels: a vector may hold values of both.
        x.view(*shape[:2], -1)[0, 1, 0], x.view(*shape[:2], -1)[1, 2, -1] = torch.nan, torch.inf
        got = step(x, dy)
        for name in ("output", "grad_input"):
            one, other = (reference.wide(it[name]) for it in (got, clean))
            # Where a vector of CUDA's columns has a bad value, all of its channels are summed in another way.
            np.testing.assert_allclose(one[:, [0, 3]], other[:, [0, 3]], rtol=1e-5 if engine == "cuda" else 0, atol=0)
            assert np.isnan(one[:, 1:3]).all()
        mean = reference.wide(got["mean"])
        assert np.isnan(mean[1]) and not np.isfinite(mean[2])


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)  # the oracle itself is in double
@pytest.mark.parametrize("engine", ["kernels", "node"])
def test_columns_of_every_kind_side_by_side(engine, step, dtype):
    """Constant, huge, tiny and far from zero, with a bad pivot, infinite or NaN: each as if it were alone."""
    kinds = [(0.0, 0.0), (7.0, 0.0), (0.0, 1.0), (300.0, 1.0)]
    kinds += [] if dtype == torch.float16 else [(0.0, 1e20), (0.0, 1e-20), (-1e4, 1e3)]
    eps = 0.25
    for rows, C in ((700, 53), (90, 200), (5, 3)):
        mean, std = torch.tensor([kinds[c % len(kinds)] for c in range(C)], dtype=torch.float64).T
        values = torch.randn(rows, C, dtype=torch.float64)
        values[0] = 5  # the pivot
        x, dy = (values * std + mean).to(dtype), torch.randn(rows, C).to(dtype)
        got, with_nan = step(x, dy, eps=eps), x.clone()
        for c in range(C):
            want = reference.forward(x[:, c : c + 1], eps=eps)
            output = reference.wide(got["output"])[:, c : c + 1].astype(
                reference.DTYPES[str(dtype).removeprefix("torch.")]
            )
            reference.check_forward(str(dtype).removeprefix("torch."), want, output=output)
        with_nan[rows // 2, 1], with_nan[rows - 1, C - 1] = torch.nan, torch.inf
        other, sound = step(with_nan, dy, eps=eps), [c for c in range(C) if c not in (1, C - 1)]
        assert np.isnan(reference.wide(other["output"])[:, [1, C - 1]]).all()
        for name in ("output", "grad_input"):
            np.testing.assert_array_equal(reference.wide(other[name])[:, sound], reference.wide(got[name])[:, sound])


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("engine", ["kernels", "node"])
def test_a_parameter_that_is_nan_stays_nan(engine, step, training):
    """Whatever its bits are: rounding to bfloat16 must not carry them into the sign."""
    for shape in ((3, 5, 40), (40, 70, 1)):
        x, C = torch.ones(shape, dtype=torch.bfloat16), shape[1]
        given = {
            "weight": torch.ones(C),
            "bias": torch.zeros(C),
            "running_mean": torch.zeros(C),
            "running_var": torch.ones(C),
        }
        given["weight"].view(torch.int32)[1], given["bias"].view(torch.int32)[2] = 0x7FFFFFFF, -1
        y = reference.wide(step(x, x, given, training)["output"])
        assert np.isnan(y[:, 1:3]).all() and np.isfinite(y[:, [0, 3, 4]]).all()


@pytest.fixture
def threads():
    """Set the number of threads of torch, which the kernels take."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def results_of(x: Tensor, dy: Tensor) -> list[bytes]:
    return [value.numpy().tobytes() for value in of_torch(x, dy, {}, True, EPS).values() if value is not None]


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_same_bits_for_any_number_of_threads_and_any_strategy(threads, layout):
    """The number of threads changes the strategy (groups of channels or two passes), never a bit; nor does the group path."""
    for shape in [(8, 24, 28, 28), (2, 3, 200, 200), (16, 300, 3, 3), (4, 600, 7, 7), (70, 2, 33), (300, 1100, 1)]:
        x, dy = arranged(torch.randn(shape), layout), arranged(torch.randn(shape), layout)
        threads(1)
        first = results_of(x, dy)
        for count in (2, 3, 8, 64):
            threads(count)
            assert results_of(x, dy) == first, (shape, count)
        layer = kernels.kernels_for(x)
        row = layer.forward_row(x, "exact")
        rows = torch.stack([row, torch.zeros_like(row)])  # a second, empty process
        assert layer.forward(x, (None,) * 4, True, MOMENTUM, EPS, "exact", rows)[0].numpy().tobytes() == first[0]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_without_threads_that_are_lent_the_caller_does_it_alone(threads):
    x = torch.randn(4, 16, 40, 40)
    threads(2)
    want, before = results_of(x, x), len(os.listdir("/proc/self/task"))
    capi.lend_openmp(0)
    try:
        threads(64)
        assert results_of(x, x) == want
    finally:
        capi.lend_openmp(kernels._openmp_parallel())
    assert len(os.listdir("/proc/self/task")) <= before  # one of an earlier test may end meanwhile


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork(threads):
    x = torch.randn(4, 16, 40, 40)
    threads(2)
    want = results_of(x, x)  # the parent's threads exist now
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(results_of(x, x)), daemon=True)
    child.start()
    assert queue.get(timeout=300) == want
    child.join(timeout=300)
    assert child.exitcode == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_half_precision_overflow_and_subnormals(engine, step):
    x = torch.randn(2, 2, 5, 5).half()
    given = {"weight": torch.tensor([1e6, 1e-7]), "bias": torch.zeros(2)}
    got, want = reference.wide(step(x, x, given)["output"]), reference.forward(x, **given).output
    assert np.isinf(got[:, 0][np.abs(want[:, 0]) > 65520]).all()
    np.testing.assert_allclose(got[:, 1], want[:, 1], rtol=0, atol=2.0**-25)


@pytest.mark.parametrize("engine", ENGINES)
def test_inference_does_not_hide_a_negative_variance(engine, step):
    x, given = torch.randn(2, 2, 4, 4), vectors(2, torch.float32)
    given["running_var"][0] = -1
    got = reference.wide(step(x, x, given, training=False)["output"])
    assert np.isnan(got[:, 0]).all() and np.isfinite(got[:, 1]).all()


@pytest.mark.parametrize("dtype", list(reference.DTYPES))
def test_same_bits_for_any_number_of_threads_of_onnx_runtime(dtype):
    rng, S = np.random.default_rng(13), reference.statistics_dtype(dtype)
    for shape in ((8, 32, 28, 28), (2, 3, 200, 200), (16, 300, 3, 3)):
        x, dy = (rng.normal(size=shape).astype(reference.DTYPES[dtype]) for _ in range(2))
        feeds = {
            "input": x,
            "grad_output": dy,
            **dict.fromkeys((*VECTORS, "saved_mean", "saved_invstd"), np.ones(shape[1], S)),
        }
        for made in (forward_model(dtype=dtype), grad_model(dtype=dtype)):
            first, *others = (run(session(made, threads=threads), feeds) for threads in (1, 2, 3, 5))
            for name, value in first.items():
                assert all(value.tobytes() == other[name].tobytes() for other in others), f"{name} {shape}"


STEP = """
step (float[4,3,6,6] x, float[4,3,6,6] t) => (float[3] new, float[4,3,6,6] dx) {
    [bn] y, m_, v_, mean, invstd = mmcv.MMCVSyncBatchNorm (x, , , w, b)
    dy = Sub (y, t)
    [g] dx, m, v, dw, db = mmcv.MMCVSyncBatchNormGrad (dy, x, w, mean, invstd)
    step = Mul (dw, rate)
    new = Sub (w, step)
}
"""


def test_in_a_plain_training_graph():
    """Forward, a squared loss, the gradient node and one step of SGD in one ordinary ONNX graph."""
    rng = np.random.default_rng(6)
    x, target = rng.normal(size=(2, 4, 3, 6, 6)).astype(np.float32)
    weight, bias = rng.normal(size=(2, 3)).astype(np.float32)
    values = {"w": weight, "b": bias, "rate": np.array(0.01, np.float32)}
    made = model(STEP, values=values, header='<ir_version: 8, opset_import: ["": 17, "mmcv": 1]>')
    for node in made.graph.node:  # the text has no empty names of outputs
        node.output[:] = ["" if name in ("m_", "v_", "m", "v") else name for name in node.output]
    onnx.checker.check_model(made)
    got = run(made.SerializeToString(), {"x": x, "t": target})
    want = reference.forward(x, weight, bias, eps=EPS)
    gradient = reference.backward(want.output - target, x, weight, want.mean, want.invstd)
    np.testing.assert_allclose(got["new"], weight - 0.01 * gradient.grad_weight, rtol=1e-5)
    np.testing.assert_allclose(got["dx"], gradient.grad_input, rtol=1e-4, atol=1e-5)
