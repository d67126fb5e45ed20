"""Cases beside the grid of cases.py: fixed statistics, absent vectors, threads, very large tensors."""

from __future__ import annotations

import dataclasses
import threading

import torch

from benchmarks.gpu.cases import Case, Expected, along, check_backward, check_forward, guarded, verify
from benchmarks.gpu.layer import EPS, Calls, Layer
from benchmarks.gpu.report import NotRun

SHAPE = (4, 24, 15, 13)
THREADS = 4
SIDES = (14, 28, 56, 80, 112)
HUGE = (1024, 64, 182, 182)  # 2.17e9 elements
HUGE_BYTES = 30_000_000_000  # free memory that it needs in float16


def random_calls(dtype: torch.dtype, channels_last: bool, device: str) -> tuple[Case, Calls]:
    case = Case(SHAPE, dtype, channels_last)
    x, dy, y, dx = (guarded(case, device)[0] for _ in range(4))
    for tensor in (x, dy):
        tensor.copy_(torch.randn(SHAPE, device=device, dtype=torch.float64) + 0.5)
    return case, Calls(x, dy, y, dx, Layer.of(x))


def verify_fixed(dtype: torch.dtype, channels_last: bool, device: str) -> None:
    """Inference and its gradient: statistics are the running ones, which stay."""
    case, calls = random_calls(dtype, channels_last, device)
    (x, dy, y, dx), layer = calls.tensors, calls.layer
    calls.prepare(training=0)
    calls.forward()
    calls.backward()
    want = Expected(layer.running_mean.double(), layer.running_var.double(), 1)
    check_forward(case, x, y, layer, want)
    scale = layer.weight.double() / (layer.running_var.double() + EPS).sqrt()
    check_backward(case, x, dy, dx, layer, want, expected=along(scale, x) * dy.double())


def verify_absent(dtype: torch.dtype, channels_last: bool, device: str) -> None:
    """No weight, bias, running statistics or gradients of vectors."""
    case, calls = random_calls(dtype, channels_last, device)
    (x, dy, y, dx), layer = calls.tensors, calls.layer
    calls.common["weight"] = 0
    calls.forward_only |= dict.fromkeys(
        ("bias", "running_mean", "running_var", "running_mean_out", "running_var_out"), 0
    )
    calls.backward_only |= {"dweight": 0, "dbias": 0}
    layer.weight.fill_(1)
    layer.bias.fill_(0)
    calls.prepare()
    calls.forward()
    calls.backward()
    want = Expected.of(x)
    check_forward(case, x, y, layer, want, running=False)
    check_backward(case, x, dy, dx, layer, want, vectors=False)
    if not all(bool(vector.isnan().all()) for vector in (layer.new_mean, layer.new_var, layer.dweight, layer.dbias)):
        raise AssertionError("an absent vector was written")


def verify_streams() -> str:
    """Calls on two streams that each fill the device, at the same time: backward NCHW and forward NHWC."""
    shape, streams, kept = (256, 64, 56, 56), [torch.cuda.Stream() for _ in range(2)], []
    for stream, layout in zip(streams, (torch.contiguous_format, torch.channels_last), strict=True):
        x, dy = (torch.randn(shape, device="cuda").contiguous(memory_format=layout) for _ in range(2))
        with torch.cuda.stream(stream):
            kept.append(Calls(x, dy, torch.empty_like(x), torch.empty_like(x), Layer.of(x)))
            kept[-1].forward()
    torch.cuda.synchronize()
    for _ in range(200):
        for calls, stream, call in zip(kept, streams, (Calls.backward, Calls.forward), strict=True):
            with torch.cuda.stream(stream):
                call(calls)
    torch.cuda.synchronize()
    (x, dy, _, dx), (x2, _, y2, _) = kept[0].tensors, kept[1].tensors
    check_backward(Case(shape, x.dtype, False), x, dy, dx, kept[0].layer, Expected.of(x))
    check_forward(Case(shape, x.dtype, True), x2, y2, kept[1].layer, Expected.of(x2))
    return f"{len(streams)} x 200 calls"


def verify_threads() -> str:
    """Threads, each with a stream, at the same time."""
    errors: list[BaseException] = []
    start = threading.Barrier(THREADS)

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait(60)
                for turn in range(2 * len(SIDES)):
                    side = SIDES[(turn + index) % len(SIDES)]
                    verify(Case((8, 16, side, side), torch.float32, bool(turn % 2)), "cuda")
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return f"{THREADS} threads, {2 * len(SIDES)} cases each"


def verify_huge(channels_last: bool) -> str:
    """Offsets beyond 32 bits: the first, a middle and the last channel against float64."""
    free = torch.cuda.mem_get_info()[0]
    if free < HUGE_BYTES:
        raise NotRun(f"{free / 1e9:.0f} GB are free, it needs {HUGE_BYTES / 1e9:.0f}")
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x, dy = (
        torch.empty(HUGE, dtype=torch.float16, device="cuda", memory_format=layout).normal_(mean)
        for mean in (0.5, 0.25)
    )
    y, dx, layer = torch.empty_like(x), torch.empty_like(x), Layer.of(x)
    calls = Calls(x, dy, y, dx, layer)
    calls.forward()
    calls.backward()
    for c in (0, HUGE[1] // 2, HUGE[1] - 1):
        case = Case((HUGE[0], 1, *HUGE[2:]), x.dtype, channels_last)
        one_x, one_dy, one_y, one_dx = (tensor[:, c : c + 1].contiguous() for tensor in (x, dy, y, dx))
        fields = (getattr(layer, field.name)[c : c + 1] for field in dataclasses.fields(layer))
        one, want = Layer(*fields), Expected.of(one_x)
        check_forward(case, one_x, one_y, one, want)
        check_backward(case, one_x, one_dy, one_dx, one, want)
    return f"{x.numel()} elements"
