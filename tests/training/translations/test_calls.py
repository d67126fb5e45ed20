"""Single operators in every form: convolution_backward; max, average and adaptive pooling; interpolation and padding."""

import itertools
import math
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from bnexport.training.translations.resampling import Interpolation, interpolate, interpolate_backward
from tests.training.translations.cases import CALL_BATCH as BATCH
from tests.training.translations.cases import Call, check_calls, graph

BACKWARD = torch.ops.aten.convolution_backward.default


def call(
    rank, channels, outputs, extents, kernel, stride=1, padding=0, dilation=1, groups=1, transposed=False,
    output_padding=0, mask=(True, True, True),
):  # fmt: skip
    """A convolution's gradient; numbers stand for all dimensions."""

    def spread(value):
        return list(value) if isinstance(value, tuple) else [value] * rank

    kernel, extents, stride, padding = map(spread, (kernel, extents, stride, padding))
    dilation, output_padding = spread(dilation), spread(output_padding)
    x = torch.randn(BATCH, channels, *extents)
    pair = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    weight = torch.randn(*pair, *kernel) / math.sqrt(math.prod(kernel) * pair[1])
    window = (stride, padding, dilation, transposed, output_padding, groups)
    grad = torch.randn_like(torch.ops.aten.convolution.default(x, weight, None, *window))
    arguments = (grad, x, weight, [outputs], *window, list(mask))
    name = f"{rank}d {channels}->{outputs} {extents} {kernel} {window} {mask}"
    return Call(name, BACKWARD, arguments, (0, 1))


WINDOWS = ((1, 2), (0, 1), (1, 2))  # strides, paddings, dilations
SWEEPS = {
    "dense": [
        (rank, channels, 5, (9, 8, 10)[:rank], kernel, *window)
        for rank, kernel, *window, channels in product((1, 2, 3), (1, 3, 4), (1, 2, 3), *WINDOWS[1:], (3, 9))
        if kernel > 1 or window[2] == 1
    ],
    "groups": [
        (rank, channels, outputs, (9, 8, 7)[:rank], kernel, *window, groups)
        for rank, kernel, *window, (channels, outputs, groups) in product(
            (1, 2, 3), (1, 3), *WINDOWS, ((6, 6, 6), (6, 12, 6), (6, 4, 2))
        )
    ],
    "transposed": [
        (rank, channels, outputs, (4, 5, 3)[:rank], kernel, *window, groups, True, output_padding)
        for rank, kernel, *window, output_padding, (channels, outputs, groups) in product(
            (1, 2, 3), (1, 2, 3), *WINDOWS, (0, 1), ((6, 9, 1), (9, 3, 1), (6, 4, 2), (6, 6, 6))
        )
        if output_padding < max(window[0], window[2]) and (kernel > 1 or window[1:] == [0, 1])
    ],
}


# The default run takes some of each sweep; coprime to the lengths of its loops, so that all values come up.
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sweep", SWEEPS)
def test_sweep(sweep, every):
    check_calls([call(*arguments) for arguments in SWEEPS[sweep][::every]])


MASKS = list(product((False, True), repeat=3))[1:]


def test_unequal_windows_and_masks():
    check_calls(
        [call(2, 9, 10, (7, 9), (3, 2), (2, 1), (1, 0), (1, 2), mask=mask) for mask in MASKS]
        + [call(2, 8, 8, (7, 9), (3, 5), (1, 2), (0, 2), groups=8, mask=mask) for mask in MASKS]
        + [call(2, 4, 6, (7, 9), 1, (2, 3), mask=mask) for mask in MASKS]
        + [call(2, 4, 6, (7, 9), 1, 1, 1), call(2, 64, 64, (3, 2), 1)]
        + [call(2, *channels, (12, 9), 9, padding=4) for channels in ((2, 3), (9, 9))]
        + [call(2, 9, 3, (5, 6), 3, padding=4)]
        + [call(2, 9, 9, *window, padding=4, groups=9) for window in (((12, 9), 9), ((5, 6), 3))]
        # Sums over many values.
        + [call(2, 8, 8, 96, 3, padding=1, groups=8), call(2, 8, 9, 96, 3, padding=1), call(2, 8, 9, 96, 1)]
    )


def test_cpu_kernels():
    """What they serve, and what keeps its standard form: three dimensions depthwise, transposed, stride with dilation."""
    windows = [(3, 1, 1, 1), (3, 2, 1, 1), (3, 1, 2, 2), (1, 1, 0, 1), (1, 2, 0, 1), (4, 3, 2, 1), (3, 2, 1, 2)]
    sizes = [(3, 8, 1), (16, 12, 1), (6, 6, 6), (6, 4, 2)]
    made = [
        call(rank, channels, outputs, (9, 8, 10)[:rank], *window, groups)
        for rank, window, (channels, outputs, groups) in product((1, 2, 3), windows, sizes)
    ]
    made += [call(2, 9, 10, (7, 9), (3, 2), (2, 1), (1, 0), (1, 2), mask=mask) for mask in MASKS]
    made += [call(2, 6, 4, (4, 5), 3, 2, 1, groups=2, transposed=True)]
    nodes = graph(made, with_cpu_kernels=True)[0].graph.node
    assert {"ConvInputGrad", "ConvWeightGrad", "ConvTranspose"} <= {node.op_type for node in nodes}
    check_calls(made, with_cpu_kernels=True)


POOLED = {2: (9, 8), 3: (5, 6, 7)}
EVERY_FIFTH = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])


def overload(name, rank):
    return getattr(torch.ops.aten, name.format(rank)).default


def max_pool(x, *window):
    """The forward, and the backward of its indices, of a window: kernel, stride, padding, dilation, ceil_mode."""
    rank, name = x.dim() - 2, f"max_pool{x.dim() - 2}d {window}"
    forward = overload("max_pool{}d_with_indices", rank)
    y, indices = forward(x, *window)
    backward = overload("max_pool{}d_with_indices_backward", rank)
    return [
        Call(name, forward, (x, *window)),
        Call(f"{name}, gradient", backward, (torch.randn_like(y), x, *window, indices), (0, 1, len(window) + 2)),
    ]


def avg_pool(x, *window):
    """kernel, stride, padding, ceil_mode, count_include_pad, divisor_override."""
    rank, name = x.dim() - 2, f"avg_pool{x.dim() - 2}d {window}"
    forward, backward = overload("avg_pool{}d", rank), overload("avg_pool{}d_backward", rank)
    grad = torch.randn_like(forward(x, *window))
    return [Call(name, forward, (x, *window)), Call(f"{name}, gradient", backward, (grad, x, *window), (0, 1))]


@EVERY_FIFTH
def test_max_pool(every):
    calls = []
    for rank, kernel, stride, padding, dilation, ceil_mode in itertools.product(
        (2, 3), (1, 2, 3, 4), (1, 2, 3), (0, 1), (1, 2, 3), (False, True)
    ):
        if 2 * padding > kernel or dilation * (kernel - 1) >= min(POOLED[rank]) + 2 * padding:
            continue
        x = torch.randn(BATCH, 3, *POOLED[rank])
        calls += max_pool(x, *([number] * rank for number in (kernel, stride, padding, dilation)), ceil_mode)
    check_calls(calls[::every])


@pytest.mark.parametrize("with_cpu_kernels", [False, True])
def test_max_pool_of_other_windows(with_cpu_kernels):
    """Unequal ones, equal maxima of which the first is taken, and three dimensions."""
    x, equal = torch.randn(BATCH, 3, 11, 10), torch.randint(0, 3, (BATCH, 4, 9, 8)).float()
    calls = [
        *max_pool(x, [3, 2], [1, 2], [1, 0], [1, 3], False),
        *max_pool(x, [2, 3], [3, 2], [0, 1], [3, 1], True),
        *max_pool(x, [2, 4], [2, 3], [1, 2], [4, 2], True),
        *max_pool(x, [1, 3], [], [0, 1], [1, 1], True),
        *max_pool(equal, [3, 3], [2, 2], [1, 1], [1, 1], False),
        *max_pool(equal, [2, 2], [3, 3], [1, 1], [3, 3], True),
        *max_pool(torch.randn(BATCH, 3, 5, 6, 7), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False),
    ]
    check_calls(calls, with_cpu_kernels)


@EVERY_FIFTH
def test_avg_pool(every):
    windows = ((2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 0), (4, 3, 2), (3, 4, 1))
    calls = []
    for rank, window, *rest in itertools.product((2, 3), windows, (False, True), (False, True), (None, 5)):
        calls += avg_pool(torch.randn(BATCH, 3, *POOLED[rank]), *([number] * rank for number in window), *rest)
    check_calls(calls[::every])


def test_avg_pool_of_unequal_windows():
    x = torch.randn(BATCH, 3, 11, 10)
    calls = avg_pool(x, [3, 2], [2, 3], [1, 0], True, True, None)
    check_calls([*calls, Call("stride left out", overload("avg_pool{}d", 2), (x, [3, 2]))])


def test_adaptive_pool():
    calls = []
    for rank, size in itertools.product((2, 3), (1, 3, 4, 12)):
        x, out = torch.randn(BATCH, 2, *POOLED[rank]), [size + 1] + [size] * (rank - 1)
        y, indices = overload("adaptive_max_pool{}d", rank)(x, out)
        grad = torch.randn_like(y)
        for name, arguments, batched in (
            ("_adaptive_avg_pool{}d", (x, out), (0,)),
            ("_adaptive_avg_pool{}d_backward", (grad, x), (0, 1)),
            ("adaptive_max_pool{}d", (x, out), (0,)),
            ("adaptive_max_pool{}d_backward", (grad, x, indices), (0, 1, 2)),
        ):
            calls.append(Call(f"{name} of {rank}, {out}", overload(name, rank), arguments, batched))
    check_calls(calls)


RESIZED = {1: (7,), 2: (5, 7), 3: (3, 4, 5)}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
OTHER_SIZES = {1: ([11], [4]), 2: ([11, 8], [3, 4]), 3: ([5, 7, 6], [2, 3, 5])}


def resize(rank, size, mode, align_corners=False, antialias=False, scales=None):
    x = torch.randn(BATCH, 2, *RESIZED[rank])
    arguments = (mode, align_corners, antialias, scales or [0.0] * rank)
    name = f"{rank}d to {size} {arguments}"
    return [
        Call(name, interpolate, (x, size, *arguments)),
        Call(
            f"{name}, gradient", interpolate_backward, (torch.randn(BATCH, 2, *size), list(RESIZED[rank]), *arguments)
        ),
    ]


def test_interpolate():
    calls = []
    for rank in (1, 2, 3):
        for size in OTHER_SIZES[rank]:
            calls += resize(rank, size, "nearest") + resize(rank, size, "nearest-exact")
            calls += resize(rank, size, LINEAR[rank]) + resize(rank, size, LINEAR[rank], True)
        scaled = [int(1.6 * size) for size in RESIZED[rank]]
        for mode in ("nearest", "nearest-exact", LINEAR[rank]):
            calls += resize(rank, scaled, mode, scales=[1.6] * rank)
    calls += resize(2, [9, 8], "bicubic") + resize(2, [9, 8], "bicubic", True) + resize(2, [3, 20], "bicubic")
    calls += resize(2, [3, 4], "bilinear", False, True) + resize(2, [3, 9], "bicubic", False, True)
    calls += resize(2, [1, 1], "bilinear") + resize(2, [5, 7], "bilinear", True)
    check_calls(calls)


@pytest.mark.parametrize("options", [{"scale_factor": 2}, {"size": 9, "mode": "bicubic", "align_corners": True}])
def test_mode_changes_no_result(options):
    x = torch.randn(2, 3, 5, 6, requires_grad=True)
    expected = F.interpolate(x, **options)
    grad = torch.randn_like(expected)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    with Interpolation():
        y = F.interpolate(x, **options)
    assert torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], expected_grad)


def test_what_torch_refuses_it_refuses_itself():
    image, volume = torch.randn(2, 3, 5, 6), torch.randn(2, 3, 5, 6, 7)
    for x, options in (
        (volume, {"size": 4, "mode": "bilinear"}),
        (image, {"scale_factor": 2, "mode": "linear", "align_corners": True}),
        (image, {"mode": "area"}),
        (image, {}),
    ):
        with pytest.raises((ValueError, NotImplementedError)) as own:
            F.interpolate(x, **options)
        with Interpolation(), pytest.raises(own.type, match=str(own.value)[:20]):
            F.interpolate(x, **options)


def test_operators_are_registered_completely():
    x = torch.randn(2, 3, 5, 6, requires_grad=True)
    arguments = ("bilinear", False, False, [0.0, 0.0])
    torch.library.opcheck(interpolate, (x, [9, 8], *arguments))
    torch.library.opcheck(interpolate_backward, (torch.randn(2, 3, 9, 8), [5, 6], *arguments))


@pytest.mark.parametrize("mode", ["replicate", "reflect"])
def test_padding_backward(mode):
    calls = []
    for padding, size in (
        ((1, 2), (5,)),
        ((0, 3, 2, 1), (5, 6)),
        ((-1, 3, 2, -2), (5, 6)),
        ((1, 2, 0, 1, 2, 1), (3, 4, 5)),
    ):
        x, name = torch.randn(BATCH, 2, *size), {"replicate": "replication", "reflect": "reflection"}[mode]
        overload = getattr(torch.ops.aten, f"{name}_pad{len(size)}d_backward").default
        arguments = (torch.randn_like(F.pad(x, padding, mode=mode)), x, list(padding))
        calls.append(Call(f"{mode} {padding}", overload, arguments, (0, 1)))
    check_calls(calls)
