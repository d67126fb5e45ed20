"""The operators of training steps against torch in float64: random shapes, and the same bits for any number of threads."""

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

    def step(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """The output, and with the gradient by it those by x and by the weight."""
        rest = self.stride, self.padding, self.dilation, False, [0] * len(self.kernel), self.group
        made = [ATEN.convolution(x, weight, bias, *rest)]
        return (
            made
            if grad is None
            else made + [*ATEN.convolution_backward(grad, x, weight, None, *rest, [True, True, False])][:2]
        )


def check_convolution(shape: Convolution) -> None:
    batch, outputs, channels = shape.sizes
    sizes = (batch, channels, *shape.extents), (outputs, channels // shape.group, *shape.kernel), (outputs,)
    x, weight, bias = (draw_tensor(size, seed) for seed, size in enumerate(sizes))
    grad = draw_tensor(shape.step(x, weight, bias, None)[0].shape, 3)
    wide = [tensor.double() for tensor in (x, weight, bias, grad)]
    expected, absolute = shape.step(*wide), shape.step(*(tensor.abs() for tensor in wide))
    attributes = {"strides": shape.stride, "pads": shape.padding, "dilations": shape.dilation, "group": shape.group}
    calls = (
        (contract.CONV, {"input": x, "weight": weight, "bias": bias}, {}),
        (contract.CONV_INPUT_GRAD, {"grad_output": grad, "weight": weight}, {"input_shape": shape.extents}),
        (contract.CONV_WEIGHT_GRAD, {"grad_output": grad, "input": x}, {"kernel_shape": shape.kernel}),
    )
    for (operator, feeds, more), exact, total in zip(calls, expected, absolute):
        results = (run(operator, feeds, threads=threads, **attributes, **more).values() for threads in (1, 2, 3))
        first, *others = (got for (got,) in results)
        bound = tolerances.backward_sum("float32", absolute_sum=float(total.max()) if total.numel() else 0.0)
        assert_within(first, exact, bound, operator.name)
        assert all(np.array_equal(first, other) for other in others), operator.name


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
    "empty batch": Convolution((0, 8, 4), 1, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1)),
    "3d, depthwise, one slice": Convolution((2, 32, 32), 32, (1, 9, 9), (1, 3, 3), (2, 1, 1), (0, 1, 1), (1, 1, 1)),
}


@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
def test_convolutions(shape):
    check_convolution(shape)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000, 40_000, 2_000_000])
@pytest.mark.parametrize("ends", [{}, {"high": 6.0}, {"low": -1.0, "high": 2.0}], ids=str)
def test_relu_gradient(count, ends):
    x, grad = draw_tensor(count, 0) * 4, draw_tensor(count, 1)
    x[: len(SPECIAL)] = torch.tensor(SPECIAL)[:count]
    expected = torch.where((x <= ends.get("low", 0.0)) | (x >= ends.get("high", math.inf)), 0.0, grad)
    if not ends:
        expected = torch.where(x <= 0, 0.0, grad)
        assert torch.equal(expected, ATEN.threshold_backward(grad, x, 0))
    for threads in (1, 2):
        got = run(contract.RELU_GRAD, {"grad_output": grad, "input": x}, threads=threads, **ends)["grad_input"]
        assert np.array_equal(got, expected.numpy())


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


BETAS, EPS = (0.9, 0.999), 1e-8
# The operator, its attributes by name in the order of the rule's arguments, scalar inputs, and state that is absent.
UPDATES = {
    "adam": (contract.ADAM_UPDATE, {"weight_decay": 0.0}, {}, ("max_exp_avg_sq",)),
    "adam, weight decay": (contract.ADAM_UPDATE, {"weight_decay": 0.1}, {}, ("max_exp_avg_sq",)),
    "adamw": (contract.ADAM_UPDATE, {"weight_decay": 0.0}, {"keep": 0.99}, ("max_exp_avg_sq",)),
    "amsgrad": (contract.ADAM_UPDATE, {"weight_decay": 0.0}, {"keep": 0.99}, ()),
    "sgd": (contract.SGD_UPDATE, {"momentum": 0.0, "weight_decay": 0.0}, {}, ("momentum_buffer",)),
    "sgd, weight decay": (contract.SGD_UPDATE, {"momentum": 0.0, "weight_decay": 0.1}, {}, ("momentum_buffer",)),
    "momentum": (contract.SGD_UPDATE, {"momentum": 0.9, "weight_decay": 0.0}, {}, ()),
    "dampening": (contract.SGD_UPDATE, {"momentum": 0.9, "weight_decay": 0.1}, {"share": 0.3}, ()),
    "nesterov": (contract.SGD_UPDATE, {"momentum": 0.9, "weight_decay": 0.0, "nesterov": 1}, {}, ()),
}
SHAPES = [(), (1,), (5, 3), (16,), (0, 4), (33, 7, 3, 3), (70_001,)]
LARGE_SHAPE = (1_500_000,)


@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, shape) for name in UPDATES for shape in SHAPES), ("amsgrad", LARGE_SHAPE), ("nesterov", LARGE_SHAPE)],
    ids=str,
)
def test_updates(name, shape):
    operator, numbers, scalars, absent = UPDATES[name]
    feeds = {}
    for seed, value in enumerate(operator.inputs):
        if value.shape == "(*)" and value.name not in absent:
            drawn = draw_tensor(shape, seed)
            feeds[value.name] = drawn**2 * 0.01 if value.name.endswith("_sq") else drawn
    is_adam = operator is contract.ADAM_UPDATE
    given = {"step_size": 0.01, "bias_correction2_sqrt": 0.3} if is_adam else {"lr": 0.1}
    feeds |= {key: torch.tensor(number) for key, number in {**given, **scalars}.items()}
    wide = {key: tensor.double() for key, tensor in feeds.items()}
    arguments = [wide.get(value.name) for value in operator.inputs]
    if is_adam:
        expected = optimizers.adam(*arguments, *BETAS, EPS, numbers["weight_decay"])
        betas = {"one_minus_beta1": 1 - BETAS[0], "beta2": BETAS[1], "one_minus_beta2": 1 - BETAS[1], "eps": EPS}
        numbers = numbers | betas
    else:
        numbers = {"nesterov": 0, **numbers}
        expected = optimizers.sgd(*arguments, numbers["momentum"], numbers["weight_decay"], bool(numbers["nesterov"]))
    names = [value.name for value in operator.outputs if value.name.removeprefix("new_") in feeds]
    first, second = (run(operator, feeds, names, threads, **numbers) for threads in (1, 2))
    scale = sum(float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in wide.values())
    for key, exact in zip(names, expected):
        # An update is m / sqrt(v): its size is a scale of the parameter, too.
        update = float((exact - wide["parameter"]).abs().max()) if key == "new_parameter" and exact.numel() else 0.0
        assert_within(first[key], exact, tolerances.statistic("float32", scale=scale + update), key)
        assert np.array_equal(first[key], second[key])


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
