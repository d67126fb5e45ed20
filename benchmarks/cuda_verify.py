"""Verifies the CUDA library against float64: every strategy, dtype and layout, odd sizes, large means, groups.

Inputs are random and new for every case; outputs are filled with NaN before, and lie between guards that must
not change; each result must come out with the same bits a second time. Bounds are those of
bnexport/tolerances.py. `device` may be "cpu" with the emulated library of the tests.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.cuda_layer import DTYPES, EPS, MOMENTUM, Calls, Layer
from bnexport import tolerances
from bnexport.errors import UsageError
from bnexport.runtime import cuda

GUARD = 64  # elements

WISHES = [("automatic", 0), ("split", 0), ("persistent", 0), *(("cluster", k) for k in (0, 1, 2, 4, 8, 16))]

SHAPES = [
    (1, 1), (65, 3), (256, 1024), (3, 65, 1, 1), (7, 3, 7, 7), (32, 65, 7, 7), (2, 3, 100, 100), (5, 8, 9, 9), (2, 1, 3, 3),
    (16, 64, 56, 56), (4, 3, 512, 512), (1, 2, 5, 4001), (300, 2, 2, 2), (64, 16, 14, 14), (8, 24, 33, 31),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    strategy: str = "automatic"
    cluster: int = 0
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


def check_forward(case: Case, x: torch.Tensor, y: torch.Tensor, layer: Layer, want: Expected) -> None:
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
    unbiased = want.var * (want.count / max(want.count - 1, 1))
    for got, old, new, what in (
        (layer.new_mean, layer.running_mean, want.mean, "running_mean"),
        (layer.new_var, layer.running_var, unbiased, "running_var"),
    ):
        updated = (1 - MOMENTUM) * old.double() + MOMENTUM * new
        largest = max(float(old.abs().max()), float(new.abs().max()), std)
        check(got, updated, tolerances.statistic(name, scale=largest), case, what)


def check_backward(
    case: Case, x: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, layer: Layer, want: Expected
) -> None:
    name = DTYPES[case.dtype]
    invstd = layer.saved_invstd
    condition = 1 + float((want.mean.abs() * invstd).max())
    hat, wide = (x.double() - along(want.mean, x)) * along(invstd, x), dy.double()
    dbias, dweight = sums(wide), sums(wide * hat)
    scale = layer.weight.double() * invstd
    expected = along(scale, x) * (wide - (along(dbias, x) + hat * along(dweight, x)) / want.count)
    largest = float(scale.abs().max()) * float(wide.abs().max())
    check(dx, expected, tolerances.backward_input(name, condition=condition, scale=largest), case, "dx")
    for got, exact, terms, what in (
        (layer.dbias, dbias, sums(wide.abs()), "dbias"),
        (layer.dweight, dweight, sums((wide * hat).abs()), "dweight"),
    ):
        bound = tolerances.backward_sum(name, condition=condition, absolute_sum=float(terms.max()))
        check(got, exact, bound, case, what)


def verify(case: Case, device: str) -> str | None:
    """Runs the case; the strategy that was used, or None where the wish cannot be granted. Raises AssertionError."""
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
    try:
        with cuda.prefer(case.strategy, case.cluster):
            calls = Calls(y if case.in_place else x, dx if case.in_place else dy, y, dx, layer)
            plan = cuda.plan(calls.forward_parameters)
            calls.forward()
            if case.in_place:  # the backward needs the input back
                calls.common["x"] = x.data_ptr()
                calls.prepare()
            calls.backward()
    except UsageError:
        if case.strategy == "automatic":
            raise
        return None
    want = Expected.of(x_before)
    check_guards(y_memory, case, "y")
    check_guards(dx_memory, case, "dx")
    check_forward(case, x_before, y, layer, want)
    check_backward(case, x_before, dy_before, dx, layer, want)
    if not case.in_place:
        first_y, first_dx = y.clone(), dx.clone()
        y.fill_(torch.nan)
        dx.fill_(torch.nan)
        with cuda.prefer(case.strategy, case.cluster):
            calls.forward()
            calls.backward()
        if not (torch.equal(first_y, y) and torch.equal(first_dx, dx)):
            raise AssertionError(f"the second run differs from the first: {case}")
        if not (torch.equal(x, x_before) and torch.equal(dy, dy_before)):
            raise AssertionError(f"an input was changed: {case}")
    return plan.strategy


def verify_group(dtype: torch.dtype, channels_last: bool, device: str) -> None:
    """Three uneven processes on one device, one of them without data: the same as their batches together."""
    batches, C = (5, 0, 2), 24
    full = Case((sum(batches), C, 15, 13), dtype, channels_last)
    whole, _ = guarded(full, device)
    dwhole, _ = guarded(full, device)
    whole.copy_(torch.randn(full.shape, device=device, dtype=torch.float64) + 0.5)
    dwhole.copy_(torch.randn(full.shape, device=device, dtype=torch.float64))
    want, layer = Expected.of(whole), Layer.of(whole)
    xs, dys = whole.split(batches), dwhole.split(batches)
    ys, dxs = torch.full_like(whole, torch.nan).split(batches), torch.full_like(whole, torch.nan).split(batches)
    ranks = [Calls(*tensors, layer) for tensors in zip(xs, dys, ys, dxs, strict=True)]
    # A part without data has no layout of its own.
    for rank in ranks:
        rank.common["layout"] = 1 if channels_last else 0
        rank.common["S"] = 15 * 13
        rank.prepare(group_size=len(batches))
    gathered = torch.stack([rank.row(backward=False) for rank in ranks])
    for rank in ranks:
        rank.prepare(group_size=len(batches), gathered=gathered.data_ptr())
        rank.forward()
    check_forward(full, whole, torch.cat(ys), layer, want)
    rows = [rank.row(backward=True) for rank in ranks]
    gathered = torch.stack(rows)
    for rank, row in zip(ranks, rows, strict=True):
        rank.prepare(
            group_size=len(batches), gathered=gathered.data_ptr(), local_moments=row.data_ptr(), grad_reduction=2
        )
        rank.backward()
    check_backward(full, whole, dwhole, torch.cat(dxs), layer, want)


def verify_graph(device: str) -> None:
    """Captured into a CUDA graph and replayed over new input."""
    for strategy, cluster in WISHES:
        case = Case((16, 64, 56, 56), torch.float16, False, strategy, cluster)
        x, dy = (torch.randn(case.shape, device=device).to(case.dtype) for _ in range(2))
        y, dx, layer = torch.empty_like(x), torch.empty_like(x), Layer.of(x)
        try:
            with cuda.prefer(strategy, cluster):
                calls = Calls(x, dy, y, dx, layer)
                calls.forward()
                calls.backward()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    calls.forward()
                    calls.backward()
        except UsageError:
            continue
        x.normal_()
        dy.normal_()
        y.fill_(torch.nan)
        dx.fill_(torch.nan)
        graph.replay()
        want = Expected.of(x)
        check_forward(case, x, y, layer, want)
        check_backward(case, x, dy, dx, layer, want)


def cases(shapes: list[tuple[int, ...]] | None = None) -> Iterator[Case]:
    for shape, dtype in itertools.product(SHAPES if shapes is None else shapes, DTYPES):
        for channels_last in (False, True) if len(shape) == 4 else (False,):
            for strategy, cluster in WISHES:
                yield Case(shape, dtype, channels_last, strategy, cluster)
            yield Case(shape, dtype, channels_last, offset=1)
            yield Case(shape, dtype, channels_last, in_place=True)
    for channels_last, (strategy, cluster) in itertools.product((False, True), WISHES):
        for mean in (1e4, -1e4):
            yield Case((4, 3, 30, 30), torch.float32, channels_last, strategy, cluster, mean=mean)
            if not shapes:
                yield Case((16, 8, 112, 112), torch.float32, channels_last, strategy, cluster, mean=mean)


def verify_all(device: str = "cuda", shapes: list[tuple[int, ...]] | None = None) -> dict[str, int]:
    """How often each strategy was verified. Raises AssertionError."""
    counts: dict[str, int] = {}
    torch.manual_seed(1)
    for case in cases(shapes):
        if case.shape[0] * int(np.prod(case.shape[2:], dtype=np.int64)) < 2:
            continue  # one value a channel: the variance is 0
        used = verify(case, device)
        if used is not None:
            counts[used] = counts.get(used, 0) + 1
    for dtype, channels_last in itertools.product(DTYPES, (False, True)):
        verify_group(dtype, channels_last, device)
    if device == "cuda":
        verify_graph(device)
    return counts
