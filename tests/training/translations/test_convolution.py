"""aten::convolution_backward in every form, and networks of convolutions."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from bnexport.training.translations.convolution import Geometry, WeightGradientForm, choose_weight_form
from tests.training.translations.calls import BATCH, Call, check_calls, graph
from tests.training.translations.cases import case, check

BACKWARD = torch.ops.aten.convolution_backward.default


def call(
    rank, channels, outputs, extents, kernel, stride=1, padding=0, dilation=1, groups=1, transposed=False,
    output_padding=0, mask=(True, True, True),
):  # fmt: skip
    """A convolution's gradient; numbers stand for all dimensions."""

    def spread(value):
        return list(value) if isinstance(value, tuple) else [value] * rank

    kernel, stride, padding, dilation, output_padding, extents = map(
        spread, (kernel, stride, padding, dilation, output_padding, extents)
    )
    x = torch.randn(BATCH, channels, *extents)
    pair = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    weight = torch.randn(*pair, *kernel) / math.sqrt(math.prod(kernel) * pair[1])
    window = (stride, padding, dilation, transposed, output_padding, groups)
    grad = torch.randn_like(torch.ops.aten.convolution.default(x, weight, None, *window))
    arguments = (grad, x, weight, [outputs], *window, list(mask))
    name = (
        f"{'transposed ' if transposed else ''}{rank}d {channels}->{outputs} {extents} k{kernel} s{stride} "
        f"p{padding} d{dilation} op{output_padding} g{groups} {mask}"
    )
    return Call(name, BACKWARD, arguments, (0, 1))


# The default run takes some of each sweep; coprime to the lengths of its loops, so that all values come up.
SWEEPS = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])


@SWEEPS
def test_dense(every):
    made = []
    for rank, kernel, stride, padding, dilation in itertools.product((1, 2, 3), (1, 3, 4), (1, 2, 3), (0, 1), (1, 2)):
        if kernel == 1 and dilation > 1:
            continue
        for channels in (3, 9):
            made.append((rank, channels, 5, (9, 8, 10)[:rank], kernel, stride, padding, dilation))
    check_calls([call(*arguments) for arguments in made[::every]])


@SWEEPS
def test_groups(every):
    made = []
    for rank, kernel, stride, padding, dilation in itertools.product((1, 2, 3), (1, 3), (1, 2), (0, 1), (1, 2)):
        window = (kernel, stride, padding, dilation)
        extents = (9, 8, 7)[:rank]
        made += [
            (rank, channels, outputs, extents, *window, groups)
            for channels, outputs, groups in ((6, 6, 6), (6, 12, 6), (6, 4, 2))
        ]
    check_calls([call(*arguments) for arguments in made[::every]])


@SWEEPS
def test_transposed(every):
    made = []
    for rank, kernel, stride, padding, dilation, output_padding in itertools.product(
        (1, 2, 3), (1, 2, 3), (1, 2), (0, 1), (1, 2), (0, 1)
    ):
        if output_padding >= max(stride, dilation) or kernel == 1 < dilation or (kernel == 1 and padding):
            continue
        for channels, outputs, groups in ((6, 9, 1), (9, 3, 1), (6, 4, 2), (6, 6, 6)):
            window = (kernel, stride, padding, dilation, groups, True, output_padding)
            made.append((rank, channels, outputs, (4, 5, 3)[:rank], *window))
    check_calls([call(*arguments) for arguments in made[::every]])


def test_unequal_windows_and_masks():
    masks = list(itertools.product((False, True), repeat=3))[1:]
    check_calls(
        [call(2, 9, 10, (7, 9), (3, 2), (2, 1), (1, 0), (1, 2), mask=mask) for mask in masks]
        + [call(2, 8, 8, (7, 9), (3, 5), (1, 2), (0, 2), groups=8, mask=mask) for mask in masks]
        + [call(2, 4, 6, (7, 9), 1, (2, 3), mask=mask) for mask in masks]
        + [
            call(2, 4, 6, (7, 9), 1, 1, 1),
            call(2, 64, 64, (3, 2), 1),
            call(2, 2, 3, (12, 9), 9, padding=4),
            call(2, 9, 9, (12, 9), 9, padding=4),
            call(2, 9, 9, (12, 9), 9, padding=4, groups=9),
            call(2, 9, 3, (5, 6), 3, padding=4),
            call(2, 9, 9, (5, 6), 3, padding=4, groups=9),
        ]
    )


def test_sums_over_many_values():
    check_calls([call(2, 8, 8, 96, 3, padding=1, groups=8), call(2, 8, 9, 96, 3, padding=1), call(2, 8, 9, 96, 1)])


@pytest.mark.parametrize(
    ("form", "geometry"),
    [
        (WeightGradientForm.TAPS, (64, 64, (8, 8), (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), 1)),
        (WeightGradientForm.CONVOLUTION, (3, 64, (64, 64), (32, 32), (7, 7), (2, 2), (3, 3), (1, 1), 1)),
        (WeightGradientForm.CONVOLUTION, (64, 64, (8, 8), (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), 32)),
        (WeightGradientForm.DEPTHWISE, (64, 64, (8, 8), (8, 8), (3, 3), (1, 1), (1, 1), (1, 1), 64)),
        (WeightGradientForm.CONVOLUTION, (64, 64, (32, 32), (32, 32), (31, 31), (1, 1), (15, 15), (1, 1), 64)),
        (WeightGradientForm.PRODUCTS, (24, 144, (24, 24), (24, 24), (1, 1), (1, 1), (0, 0), (1, 1), 1)),
        (WeightGradientForm.TAPS, (160, 960, (3, 3), (3, 3), (1, 1), (1, 1), (0, 0), (1, 1), 1)),
    ],
)
def test_choice(form, geometry):
    assert choose_weight_form(Geometry(*geometry)) is form


def test_cpu_kernels():
    """What they serve, and what keeps its standard form: three dimensions depthwise, transposed, stride with dilation."""
    windows = [(3, 1, 1, 1), (3, 2, 1, 1), (3, 1, 2, 2), (1, 1, 0, 1), (1, 2, 0, 1), (4, 3, 2, 1), (3, 2, 1, 2)]
    sizes = [(3, 8, 1), (16, 12, 1), (6, 6, 6), (6, 4, 2)]
    made = [
        call(rank, channels, outputs, (9, 8, 10)[:rank], *window, groups)
        for rank in (1, 2, 3)
        for window in windows
        for channels, outputs, groups in sizes
    ]
    masks = list(itertools.product((False, True), repeat=3))[1:]
    made += [call(2, 9, 10, (7, 9), (3, 2), (2, 1), (1, 0), (1, 2), mask=mask) for mask in masks]
    made += [call(2, 6, 4, (4, 5), 3, 2, 1, groups=2, transposed=True)]
    nodes = graph(made, with_cpu_kernels=True)[0].graph.node
    assert {"ConvInputGrad", "ConvWeightGrad", "ConvTranspose"} <= {node.op_type for node in nodes}
    check_calls(made, with_cpu_kernels=True)


def test_traced():
    """Through torch's exporter, forward and backward."""
    image = ("N", 4, 9, 8)
    check(
        [
            case("1d", lambda x, w, b: F.conv1d(x, w, b, 2, 1), ("N", 8, 9), (6, 8, 3), (6,)),
            case("2d", lambda x, w, b: F.conv2d(x, w, b, 2, 1, 2, 2), image, (6, 2, 3, 3), (6,)),
            case("3d", lambda x, w: F.conv3d(x, w, None, 2, 1), ("N", 2, 5, 4, 6), (3, 2, 3, 3, 3)),
            case("same", lambda x, w: F.conv2d(x, w, padding="same"), image, (3, 4, 3, 2)),
            case("transposed", lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 2), image, (4, 3, 3, 3), (6,)),
            case("transposed 1d", lambda x, w: F.conv_transpose1d(x, w, None, 3, 0, 2), ("N", 4, 5), (4, 3, 3)),
            case("frozen weight", lambda x, w, b: F.conv2d(x, w.detach(), b), image, (3, 4, 3, 3), (3,)),
            case("first layer", lambda x, w, b: F.conv2d(x.detach(), w, b), image, (3, 4, 3, 3), (3,)),
        ]
    )
