"""Interpolation and padding."""

import pytest
import torch
from torch.nn import functional as F

from bnexport.training.translations.resampling import Interpolation, interpolate, interpolate_backward
from tests.training.translations.calls import BATCH, Call, check_calls
from tests.training.translations.cases import case, check

SIZES = {1: (7,), 2: (5, 7), 3: (3, 4, 5)}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
LARGER = {1: [11], 2: [11, 8], 3: [5, 7, 6]}
SMALLER = {1: [4], 2: [3, 4], 3: [2, 3, 5]}


def resize(rank, size, mode, align_corners=False, antialias=False, scales=None):
    x = torch.randn(BATCH, 2, *SIZES[rank])
    arguments = (mode, align_corners, antialias, scales or [0.0] * rank)
    name = f"{rank}d to {size} {arguments}"
    return [
        Call(name, interpolate, (x, size, *arguments)),
        Call(f"{name}, gradient", interpolate_backward, (torch.randn(BATCH, 2, *size), list(SIZES[rank]), *arguments)),
    ]


def test_interpolate():
    calls = []
    for rank in (1, 2, 3):
        for size in (LARGER[rank], SMALLER[rank]):
            calls += resize(rank, size, "nearest") + resize(rank, size, "nearest-exact")
            calls += resize(rank, size, LINEAR[rank]) + resize(rank, size, LINEAR[rank], True)
        scaled = [int(1.6 * size) for size in SIZES[rank]]
        for mode in ("nearest", "nearest-exact", LINEAR[rank]):
            calls += resize(rank, scaled, mode, scales=[1.6] * rank)
    calls += resize(2, [9, 8], "bicubic") + resize(2, [9, 8], "bicubic", True) + resize(2, [3, 20], "bicubic")
    calls += resize(2, [3, 4], "bilinear", False, True) + resize(2, [3, 9], "bicubic", False, True)
    calls += resize(2, [1, 1], "bilinear") + resize(2, [5, 7], "bilinear", True)
    check_calls(calls)


def test_traced():
    def interpolated(name, shape, **options):
        return case(name, lambda x: F.interpolate(x, **options), ("N", 2, *shape))

    check(
        [
            interpolated("nearest", (5, 7), scale_factor=2),
            interpolated("nearest 1d", (7,), size=11),
            interpolated("bilinear", (5, 7), scale_factor=(1.6, 0.5), mode="bilinear"),
            interpolated("recomputed", (5, 7), scale_factor=1.6, mode="bilinear", recompute_scale_factor=True),
            interpolated("corners", (5, 7), size=(9, 12), mode="bilinear", align_corners=True),
            interpolated("antialias", (5, 7), size=3, mode="bicubic", antialias=True),
            interpolated("trilinear", (3, 4, 5), scale_factor=2.0, mode="trilinear"),
        ]
    )


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


@pytest.mark.parametrize(
    "options",
    [
        {"size": 4, "mode": "bilinear"},
        {"scale_factor": 2, "mode": "linear", "align_corners": True},
        {"mode": "area"},
        {},
    ],
)
def test_what_torch_refuses_it_refuses_itself(options):
    x = torch.randn(2, 3, 5, 6, 7) if options.get("mode") == "bilinear" else torch.randn(2, 3, 5, 6)
    with pytest.raises((ValueError, NotImplementedError)) as own:
        F.interpolate(x, **options)
    with Interpolation(), pytest.raises(own.type, match=str(own.value)[:20]):
        F.interpolate(x, **options)


def test_operators_are_registered_completely():
    x = torch.randn(2, 3, 5, 6, requires_grad=True)
    arguments = ("bilinear", False, False, [0.0, 0.0])
    torch.library.opcheck(interpolate, (x, [9, 8], *arguments))
    torch.library.opcheck(interpolate_backward, (torch.randn(2, 3, 9, 8), [5, 6], *arguments))


def pad_backward(mode, padding, *size):
    rank = len(size)
    x = torch.randn(BATCH, 2, *size)
    grad = torch.randn_like(F.pad(x, padding, mode=mode))
    name = {"replicate": "replication", "reflect": "reflection"}[mode]
    overload = getattr(torch.ops.aten, f"{name}_pad{rank}d_backward").default
    return Call(f"{mode} {padding}", overload, (grad, x, list(padding)), (0, 1))


@pytest.mark.parametrize("mode", ["replicate", "reflect"])
def test_padding_backward(mode):
    check_calls(
        [
            pad_backward(mode, (1, 2), 5),
            pad_backward(mode, (0, 3, 2, 1), 5, 6),
            pad_backward(mode, (-1, 3, 2, -2), 5, 6),
            pad_backward(mode, (1, 2, 0, 1, 2, 1), 3, 4, 5),
        ]
    )


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pad(everything):
    cases = [
        case("constant", lambda x: F.pad(x, (1, 2, 0, 3), value=0.5), ("N", 2, 5, 6)),
        case("negative", lambda x: F.pad(x, (-1, 2, 3, -2)), ("N", 2, 5, 6)),
        case("replicate", lambda x: F.pad(x, (1, 2, 0, 3), mode="replicate"), ("N", 2, 5, 6)),
        case("reflect", lambda x: F.pad(x, (1, 2, 0, 3), mode="reflect"), ("N", 2, 5, 6)),
        case("replicate, negative", lambda x: F.pad(x, (-1, 2, 3, -2), mode="replicate"), ("N", 2, 5, 6)),
        case("reflect, negative", lambda x: F.pad(x, (-1, 2, 3, -2), mode="reflect"), ("N", 2, 5, 6)),
    ]
    if everything:
        cases += [
            case("circular", lambda x: F.pad(x, (1, 2, 0, 3), mode="circular"), ("N", 2, 5, 6)),
            case("reflect1d", lambda x: F.pad(x, (1, 2), mode="reflect"), ("N", 2, 5)),
            case("reflect3d", lambda x: F.pad(x, (1, 2, 0, 1, 2, 1), mode="reflect"), ("N", 2, 3, 4, 5)),
            case("replicate3d", lambda x: F.pad(x, (1, 2, 0, 1, 2, 1), mode="replicate"), ("N", 2, 3, 4, 5)),
        ]
    check(cases)
