"""Verifies the CUDA library against float64: every dtype and layout, odd sizes, large means, groups.

Inputs are random and new for every case; outputs are filled with NaN before, and lie between guards that must
not change; each result must come out with the same bits a second time. Bounds are those of
bnexport/tolerances.py. `device` may be "cpu" with the emulated library of the tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.gpu.layer import DTYPES, EPS, MOMENTUM, Calls, Layer
from bnexport import tolerances

GUARD = 64  # elements

SHAPES = [
    (65, 3), (256, 1024), (3, 65, 1, 1), (7, 3, 7, 7), (32, 65, 7, 7), (2, 3, 100, 100), (5, 8, 9, 9), (2, 1, 3, 3),
    (16, 64, 56, 56), (4, 3, 512, 512), (1, 2, 5, 4001), (300, 2, 2, 2), (64, 16, 14, 14), (8, 24, 33, 31),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    mean: float = 0.5
    offset: int = 0  # elements behind an aligned address
    in_place: bool = False


def guarded(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A NaN tensor of the case's shape and layout, and the memory around it."""
    count = int(np.prod(case.shape))
    memory = torch.full((count + 2 * GUARD + case.offset,), torch.nan, dtype=case.dtype, device=device)
    inside = memory[GUARD + case.offset : GUARD + case.offset + count]
    if case.channels_last:
        N, C, H, W = case.shape
        return inside.view(N, H, W, C).permute(0, 3, 1, 2), memory
    return inside.view(case.shape), memory


def check_guards(memory: torch.Tensor, case: Case, what: str) -> None:
    for part in (memory[: GUARD + case.offset], memory[memory.numel() - GUARD :]):
        if not bool(part.isnan().all()):
            raise AssertionError(f"{what}: written outside of the tensor: {case}")


def check(got: torch.Tensor, want: torch.Tensor, bound: tolerances.Tolerance, case: Case, what: str) -> None:
    got = got.double()
    error = (got - want).abs() - (bound.rtol * want.abs() + bound.atol)
    bad = ~(error <= 0)  # NaN is bad
    if bool(bad.any()):
        at = int(bad.flatten().nonzero()[0])
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} values off: got {got.flatten()[at].item()!r}, expected "
            f"{want.flatten()[at].item()!r} within {bound}: {case}"
        )


def along(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *(1,) * (x.dim() - 2))


def sums(values: torch.Tensor) -> torch.Tensor:
    return values.transpose(0, 1).flatten(1).sum(1)


@dataclasses.dataclass
class Expected:
    """The closed forms in float64 over the whole batch."""

    mean: torch.Tensor
    var: torch.Tensor
    count: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Expected:
        wide, count = x.double(), x.numel() // x.shape[1]
        mean = sums(wide) / count
        mean = mean + sums(wide - along(mean, x)) / count
        return cls(mean, sums((wide - along(mean, x)) ** 2) / count, count)


def check_forward(
    case: Case, x: torch.Tensor, y: torch.Tensor, layer: Layer, want: Expected, *, running: bool = True
) -> None:
    name = DTYPES[case.dtype]
    u_s = tolerances.UNIT_ROUNDOFF[tolerances.STATISTICS_TYPE[name]]
    invstd = 1 / (want.var + EPS).sqrt()
    condition = 1 + float((want.mean.abs() * invstd).max())
    weight, bias = layer.weight.double(), layer.bias.double()
    expected = (x.double() - along(want.mean, x)) * along(weight * invstd, x) + along(bias, x)
    check(y, expected, tolerances.forward(name, condition=condition, weight=float(weight.abs().max())), case, "y")
    std = float(want.var.sqrt().max())
    # The std of the smallest channel would be the exact scale; the largest is a bound for all.
    check(layer.saved_mean, want.mean, tolerances.statistic(name, scale=max(std, 1e-30)), case, "saved_mean")
    scale = condition if name == "float64" else 1.0  # means of parts meet in double
    check(layer.saved_invstd, invstd, tolerances.Tolerance(32 * u_s * scale, 0.0), case, "saved_invstd")
    if not running:
        return
    unbiased = want.var * (want.count / max(want.count - 1, 1))
    for got, old, new, what in (
        (layer.new_mean, layer.running_mean, want.mean, "running_mean"),
        (layer.new_var, layer.running_var, unbiased, "running_var"),
    ):
        updated = (1 - MOMENTUM) * old.double() + MOMENTUM * new
        largest = max(float(old.abs().max()), float(new.abs().max()), std)
        check(got, updated, tolerances.statistic(name, scale=largest), case, what)


def check_backward(
    case: Case,
    x: torch.Tensor,
    dy: torch.Tensor,
    dx: torch.Tensor,
    layer: Layer,
    want: Expected,
    *,
    expected: torch.Tensor | None = None,
    vectors: bool = True,
) -> None:
    """expected: of dx, where it is not that of a batch by itself. vectors: dweight and dbias were asked for."""
    name = DTYPES[case.dtype]
    invstd = layer.saved_invstd
    condition = 1 + float((want.mean.abs() * invstd).max())
    hat, wide = (x.double() - along(want.mean, x)) * along(invstd, x), dy.double()
    dbias, dweight = sums(wide), sums(wide * hat)
    scale = layer.weight.double() * invstd
    if expected is None:
        expected = along(scale, x) * (wide - (along(dbias, x) + hat * along(dweight, x)) / want.count)
    largest = float(scale.abs().max()) * float(wide.abs().max())
    check(dx, expected, tolerances.backward_input(name, condition=condition, scale=largest), case, "dx")
    if not vectors:
        return
    for got, exact, terms, what in (
        (layer.dbias, dbias, sums(wide.abs()), "dbias"),
        (layer.dweight, dweight, sums((wide * hat).abs()), "dweight"),
    ):
        bound = tolerances.backward_sum(name, condition=condition, absolute_sum=float(terms.max()))
        check(got, exact, bound, case, what)


def verify(case: Case, device: str) -> None:
    """Runs both directions of a case twice. Raises AssertionError when a result is wrong."""
    x, _ = guarded(case, device)
    dy, _ = guarded(case, device)
    y, y_memory = guarded(case, device)
    dx, dx_memory = guarded(case, device)
    x.copy_(torch.randn(case.shape, device=device, dtype=torch.float64) + case.mean)
    dy.copy_(torch.randn(case.shape, device=device, dtype=torch.float64) + 0.25)
    x_before, dy_before = x.clone(), dy.clone()
    layer = Layer.of(x)
    if case.in_place:
        y.copy_(x)
        dx.copy_(dy)
    calls = Calls(y if case.in_place else x, dx if case.in_place else dy, y, dx, layer)
    calls.forward()
    if case.in_place:  # the backward needs its input back
        calls.common["x"] = x.data_ptr()
        calls.prepare()
    calls.backward()
    check_guards(y_memory, case, "y")
    check_guards(dx_memory, case, "dx")
    want = Expected.of(x_before)
    check_forward(case, x_before, y, layer, want)
    check_backward(case, x_before, dy_before, dx, layer, want)
    if case.in_place:
        return
    first_y, first_dx = y.clone(), dx.clone()
    y.fill_(torch.nan)
    dx.fill_(torch.nan)
    calls.forward()
    calls.backward()
    if not (torch.equal(first_y, y) and torch.equal(first_dx, dx)):
        raise AssertionError(f"a second run gives other bits: {case}")
    if not (torch.equal(x, x_before) and torch.equal(dy, dy_before)):
        raise AssertionError(f"an input was changed: {case}")


def verify_graph(channels_last: bool) -> None:
    """Captures both directions into a CUDA graph and replays it over new input."""
    case = Case((16, 64, 56, 56), torch.float16, channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x, dy = (torch.randn(case.shape, device="cuda").to(case.dtype).contiguous(memory_format=layout) for _ in range(2))
    y, dx, layer = torch.empty_like(x), torch.empty_like(x), Layer.of(x)
    calls = Calls(x, dy, y, dx, layer)
    calls.forward()
    calls.backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.forward()
        calls.backward()
    for _ in range(2):
        x.normal_()
        dy.normal_()
        y.fill_(torch.nan)
        dx.fill_(torch.nan)
        graph.replay()
        want = Expected.of(x)
        check_forward(case, x, y, layer, want)
        check_backward(case, x, dy, dx, layer, want)


def cases_of(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> Iterator[Case]:
    """Aligned, unaligned, in place, and large means: 30 and 1000 standard deviations, 10,000 in float32."""
    yield Case(shape, dtype, channels_last)
    yield Case(shape, dtype, channels_last, offset=1)
    yield Case(shape, dtype, channels_last, in_place=True)
    for mean in (30.0, -1000.0) if dtype != torch.float32 else (1e4, -1e4):
        yield Case(shape, dtype, channels_last, mean=mean)
