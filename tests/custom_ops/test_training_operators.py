"""The operators of training steps against torch in float64: random shapes, and the same bits for any number of threads."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bnexport import tolerances
from bnexport.training import contract, optimizers
from tests.support.training_nodes import run

ATEN = torch.ops.aten
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 6.0, 1e-45]


def assert_within(got, expected, bound: tolerances.Tolerance, what: str) -> None:
    expected = np.asarray(expected)
    assert got.dtype == np.float32 and got.shape == expected.shape, f"{what}: {got.dtype} {got.shape} {expected.shape}"
    with np.errstate(invalid="ignore"):
        allowed = np.abs(got - expected) <= bound.rtol * np.abs(expected) + bound.atol
    wrong = ~(allowed | (got == expected) | (np.isnan(got) & np.isnan(expected)))
    assert not wrong.any(), f"{what}: {got[wrong][:3]}, expected {expected[wrong][:3]}, bound {bound}"


def draw_tensor(shape, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass(frozen=True)
class Convolution:
    """`sizes`: batch, outputs, channels, of which the last two are multiples of the group."""

    sizes: tuple[int, int, int]
    group: int
    extents: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def window(self) -> tuple:
        rank = len(self.kernel)
        return list(self.stride), list(self.padding), list(self.dilation), False, [0] * rank, self.group

    @property
    def attributes(self) -> dict:
        return {"strides": self.stride, "pads": self.padding, "dilations": self.dilation, "group": self.group}

    def tensors(self, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, weight, bias and the gradient by the output."""
        batch, outputs, channels = self.sizes
        x = draw_tensor((batch, channels, *self.extents), seed)
        weight = draw_tensor((outputs, channels // self.group, *self.kernel), seed + 1)
        y = ATEN.convolution(x, weight, None, *self.window)
        return x, weight, draw_tensor(outputs, seed + 2), draw_tensor((batch, *y.shape[1:]), seed + 3)


def check_convolution(shape: Convolution, seed: int) -> None:
    x, weight, bias, grad = shape.tensors(seed)
    wide = [tensor.double() for tensor in (x, weight, bias, grad)]
    magnitudes = [tensor.abs() for tensor in wide]

    def backward(x, weight, grad):
        mask = [True, True, False]
        return ATEN.convolution_backward(grad, x, weight, None, *shape.window, mask)[:2]

    def forward(x, weight, bias):
        return ATEN.convolution(x, weight, bias, *shape.window)

    expected = (forward(*wide[:3]), *backward(wide[0], wide[1], wide[3]))
    absolute = (forward(*magnitudes[:3]), *backward(magnitudes[0], magnitudes[1], magnitudes[3]))
    bounds = [
        tolerances.backward_sum("float32", absolute_sum=float(total.max()) if total.numel() else 0.0)
        for total in absolute
    ]
    for operator, feeds, more, exact, bound in (
        (contract.CONV, {"input": x, "weight": weight, "bias": bias}, {}, expected[0], bounds[0]),
        (contract.CONV_INPUT_GRAD, {"grad_output": grad, "weight": weight}, {"input_shape": shape.extents}, expected[1], bounds[1]),
        (contract.CONV_WEIGHT_GRAD, {"grad_output": grad, "input": x}, {"kernel_shape": shape.kernel}, expected[2], bounds[2]),
    ):  # fmt: skip
        attributes = shape.attributes | more
        first, *others = (run(operator, feeds, threads=threads, **attributes).values() for threads in (1, 2, 3))
        (got,) = first
        assert_within(got, exact, bound, operator.name)
        assert all(np.array_equal(got, other) for (other,) in others), operator.name


LARGE = {
    "3x3": Convolution((3, 40, 24), 1, (28, 28), (3, 3), (1, 1), (1, 1), (1, 1)),
    "3x3, stride 2": Convolution((2, 64, 32), 1, (29, 30), (3, 3), (2, 2), (1, 1), (1, 1)),
    "1x1": Convolution((2, 96, 80), 1, (14, 14), (1, 1), (1, 1), (0, 0), (1, 1)),
    "1x1, stride 2": Convolution((2, 64, 32), 1, (28, 28), (1, 1), (2, 2), (0, 0), (1, 1)),
    "7x7 of an image": Convolution((2, 64, 3), 1, (56, 56), (7, 7), (2, 2), (3, 3), (1, 1)),
    "depthwise": Convolution((2, 96, 96), 96, (28, 28), (3, 3), (1, 1), (1, 1), (1, 1)),
    "depthwise, stride 2": Convolution((2, 96, 96), 96, (28, 28), (5, 5), (2, 2), (2, 2), (1, 1)),
    "small planes": Convolution((3, 128, 160), 1, (4, 3), (3, 3), (1, 1), (1, 1), (1, 1)),
    "dilated": Convolution((2, 32, 48), 1, (24, 24), (3, 3), (1, 1), (2, 2), (2, 2)),
    "groups": Convolution((2, 64, 32), 4, (20, 20), (3, 3), (1, 1), (1, 1), (1, 1)),
    "1d": Convolution((3, 40, 24), 1, (500,), (9,), (2,), (4,), (1,)),
    "3d": Convolution((2, 40, 24), 1, (5, 9, 9), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "3d, 1x1x1, stride in depth": Convolution((2, 32, 8), 1, (5, 9, 9), (1, 1, 1), (2, 1, 1), (0, 0, 0), (1, 1, 1)),
    "3d, depthwise, one slice": Convolution((2, 32, 32), 32, (1, 9, 9), (1, 3, 3), (2, 1, 1), (0, 1, 1), (1, 1, 1)),
}


@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
def test_convolutions(shape):
    check_convolution(shape, 0)


def test_convolutions_of_an_empty_batch():
    x, weight, grad = (np.ones(shape, np.float32) for shape in ((0, 4, 5, 6), (8, 4, 3, 3), (0, 8, 5, 6)))
    attributes = {"strides": [1, 1], "pads": [1, 1], "dilations": [1, 1], "group": 1}
    got = run(contract.CONV, {"input": x, "weight": weight}, **attributes)["output"]
    assert got.shape == grad.shape
    feeds = {"grad_output": grad, "weight": weight}
    got = run(contract.CONV_INPUT_GRAD, feeds, **attributes, input_shape=[5, 6])["grad_input"]
    assert got.shape == x.shape
    got = run(contract.CONV_WEIGHT_GRAD, {"grad_output": grad, "input": x}, **attributes, kernel_shape=[3, 3])
    assert np.array_equal(got["grad_weight"], np.zeros_like(weight))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000, 40_000, 2_000_000])
@pytest.mark.parametrize("high", [None, 6.0])
def test_relu_gradient(count, high):
    x, grad = draw_tensor(count, 0) * 4, draw_tensor(count, 1)
    x[: len(SPECIAL)] = torch.tensor(SPECIAL)[:count]
    if high is None:
        expected = torch.where(x <= 0, 0.0, grad)
        assert torch.equal(expected, ATEN.threshold_backward(grad, x, 0))
    else:
        expected = torch.where((x <= 0) | (x >= high), 0.0, grad)
    for threads in (1, 2):
        got = run(contract.RELU_GRAD, {"grad_output": grad, "input": x}, threads=threads, high=high)["grad_input"]
        assert np.array_equal(got, expected.numpy())


def test_relu_gradient_between_other_ends():
    x, grad = torch.linspace(-3, 3, 97).reshape(1, 97, 1), draw_tensor((1, 97, 1), 0)
    got = run(contract.RELU_GRAD, {"grad_output": grad, "input": x}, low=-1.0, high=2.0)["grad_input"]
    assert np.array_equal(got, ATEN.hardtanh_backward(grad, x, -1.0, 2.0).numpy())


@st.composite
def pools(draw):
    pair = [draw(st.integers(1, 4)) for _ in range(2)]
    stride, dilation = ([draw(st.integers(1, high)) for _ in range(2)] for high in (4, 3))
    padding = [draw(st.integers(0, k // 2)) for k in pair]
    # Room for a whole kernel: a dilated window all of whose values are padding makes torch write elsewhere.
    extents = [d * (k - 1) + 1 + draw(st.integers(0, 20)) for k, d in zip(pair, dilation)]
    batch, channels = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["normal", "ties", "special"]))
    return (batch, channels, *extents), (pair, stride, padding, dilation, draw(st.booleans())), kind


def check_max_pool(shape, window, kind: str, seed: int = 0, threads: int = 2) -> np.ndarray:
    x = draw_tensor(shape, seed)
    if kind == "ties":
        x = x.round()
    if kind == "special":
        x.view(-1)[::5] = -math.inf
        x.view(-1)[::7] = math.nan
    y, indices = ATEN.max_pool2d_with_indices(x, *window)
    grad = draw_tensor(y.shape, seed + 1)
    exact = ATEN.max_pool2d_with_indices_backward(grad.double(), x.double(), *window, indices)
    absolute = ATEN.max_pool2d_with_indices_backward(grad.double().abs(), x.double(), *window, indices)
    kernel, stride, padding, dilation, _ = window
    attributes = {"kernel_shape": kernel, "strides": stride, "pads": padding, "dilations": dilation}
    got = run(contract.MAX_POOL_GRAD, {"grad_output": grad, "input": x}, threads=threads, **attributes)["grad_input"]
    total = float(absolute.max()) if absolute.numel() else 0.0
    assert_within(got, exact, tolerances.backward_sum("float32", absolute_sum=total), str((shape, window)))
    return got


@QUICK
@given(case=pools(), seed=st.integers(0, 1000))
def test_max_pool_gradient(case, seed):
    check_max_pool(*case, seed)


@pytest.mark.parametrize("extents", [(56, 56), (5, 700), (300, 3)], ids=str)
def test_max_pool_gradient_of_usual_sizes(extents):
    window = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    results = [check_max_pool((2, 16, *extents), window, "normal", threads=threads) for threads in (1, 2, 3)]
    assert all(np.array_equal(results[0], other) for other in results[1:])


ADAM = {
    "adam": {"weight_decay": 0.0},
    "adam, weight decay": {"weight_decay": 0.1},
    "adamw": {"weight_decay": 0.0, "keep": True},
    "amsgrad": {"weight_decay": 0.0, "keep": True, "amsgrad": True},
}
SHAPES = [(), (1,), (5, 3), (16,), (0, 4), (33, 7, 3, 3), (70_001,)]
LARGE_SHAPE = (1_500_000,)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", ADAM.values(), ids=ADAM)
def test_adam_update(shape, options):
    check_adam(shape, options)


def test_adam_update_past_the_caches():
    check_adam(LARGE_SHAPE, ADAM["amsgrad"])


def check_adam(shape, options):
    beta1, beta2, eps, decay = 0.9, 0.999, 1e-8, options["weight_decay"]
    feeds = {name: draw_tensor(shape, seed) for seed, name in enumerate(("parameter", "grad", "exp_avg"))}
    feeds["exp_avg_sq"] = draw_tensor(shape, 3) ** 2 * 0.01
    if options.get("amsgrad"):
        feeds["max_exp_avg_sq"] = draw_tensor(shape, 4) ** 2 * 0.01
    feeds |= {"step_size": torch.tensor(0.01), "bias_correction2_sqrt": torch.tensor(0.3)}
    if options.get("keep"):
        feeds["keep"] = torch.tensor(0.99)
    wide = {name: tensor.double() for name, tensor in feeds.items()}
    expected = optimizers.adam(
        *(wide.get(value.name) for value in contract.ADAM_UPDATE.inputs), beta1, beta2, eps, decay
    )  # fmt: skip
    attributes = {
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "eps": eps,
        "weight_decay": decay,
    }
    names = [value.name for value in contract.ADAM_UPDATE.outputs][: 4 if options.get("amsgrad") else 3]
    results = [run(contract.ADAM_UPDATE, feeds, names, threads, **attributes) for threads in (1, 2)]
    grad = wide["grad"] + decay * wide["parameter"]
    scales = {"new_exp_avg": wide["exp_avg"].abs() + grad.abs(), "new_parameter": wide["parameter"].abs()}
    scales["new_exp_avg_sq"] = scales["new_max_exp_avg_sq"] = wide["exp_avg_sq"] + grad**2
    for name, exact in zip(names, expected):
        scale = float(scales[name].max()) if exact.numel() else 0.0
        # An update is m / sqrt(v): its size is a scale of the parameter, too.
        if name == "new_parameter" and exact.numel():
            scale += float((exact - wide["parameter"]).abs().max())
        assert_within(results[0][name], exact, tolerances.statistic("float32", scale=scale), name)
        assert np.array_equal(results[0][name], results[1][name])


SGD = {
    "plain": {},
    "weight decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "share": 0.3, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", SGD.values(), ids=SGD)
def test_sgd_update(shape, options):
    check_sgd(shape, options)


def test_sgd_update_past_the_caches():
    check_sgd(LARGE_SHAPE, SGD["nesterov"])


def check_sgd(shape, options):
    momentum, decay, nesterov = options.get("momentum", 0.0), options.get("weight_decay", 0.0), "nesterov" in options
    feeds = {"parameter": draw_tensor(shape, 0), "grad": draw_tensor(shape, 1), "lr": torch.tensor(0.1)}
    if momentum:
        feeds["momentum_buffer"] = draw_tensor(shape, 2)
    if "share" in options:
        feeds["share"] = torch.tensor(options["share"])
    wide = {name: tensor.double() for name, tensor in feeds.items()}
    tensors = (wide.get(value.name) for value in contract.SGD_UPDATE.inputs)
    expected = optimizers.sgd(*tensors, momentum, decay, nesterov)
    names = [value.name for value in contract.SGD_UPDATE.outputs][: 2 if momentum else 1]
    attributes = {"momentum": momentum, "weight_decay": decay, "nesterov": int(nesterov)}
    results = [run(contract.SGD_UPDATE, feeds, names, threads, **attributes) for threads in (1, 2)]
    scale = sum(float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in wide.values())
    for name, exact in zip(names, expected):
        assert_within(results[0][name], exact, tolerances.statistic("float32", scale=scale), name)
        assert np.array_equal(results[0][name], results[1][name])


def test_nan_stays_in_amsgrads_maximum():
    count = 20
    feeds = {name: np.ones(count, np.float32) for name in ("parameter", "grad", "exp_avg", "exp_avg_sq")}
    feeds["max_exp_avg_sq"] = np.full(count, 2, np.float32)
    feeds["max_exp_avg_sq"][3] = np.nan
    feeds["exp_avg_sq"][18] = np.nan
    feeds |= {"step_size": np.float32(1), "bias_correction2_sqrt": np.float32(1)}
    numbers = {"one_minus_beta1": 0.1, "beta2": 0.9, "one_minus_beta2": 0.1, "eps": 0.0, "weight_decay": 0.0}
    got = run(contract.ADAM_UPDATE, feeds, **numbers)["new_max_exp_avg_sq"]
    assert np.flatnonzero(np.isnan(got)).tolist() == [3, 18] and (got[[0, 17, 19]] == 2).all()
