"""Section `nccl`: a communicator of the library's own on the real libnccl, and two processes on one device.

One rank proves the calls and the memory, not the exchange: that takes two devices.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.report import NotRun, Report, Row
from benchmarks.gpu.section import Options

COUNT = 4211  # numbers of a row


def run(report: Report, options: Options) -> None:
    with report.step("libnccl with one rank") as row:
        one_rank(options, row)
    with report.step("two processes on one device, against the joint batch") as row:
        two_processes(options, row, report.left())


def one_rank(options: Options, row: Row) -> None:
    """Gathers from itself, asks for the status, times the host's part and leaves."""
    if options.rehearse:
        raise NotRun("an emulated device has no NCCL")
    import torch

    from bnexport.native import nccl

    error = ctypes.create_string_buffer(512)
    torch.cuda.synchronize()
    joined = nccl.join(nccl.unique_id(), 1, 0, 30.0)
    values = torch.randn(COUNT, dtype=torch.float64, device="cuda")
    gathered = torch.full_like(values, float("nan"))
    gather = nccl.library().bnexport_nccl_all_gather
    arguments = (
        ctypes.c_void_p(joined.context), ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(gathered.data_ptr()),
        ctypes.c_int64(COUNT), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), error, ctypes.c_size_t(512),
    )  # fmt: skip
    times = []
    for _ in range(50):
        start = time.perf_counter()
        if gather(*arguments) != 0:
            raise AssertionError(error.value.decode())
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    joined.check()
    row.ok = torch.equal(values, gathered)
    joined.leave()
    row.value = f"NCCL {nccl.version()}, {sorted(times)[len(times) // 2] * 1e6:.1f} us of the host a gather"


MEMBER = """
import sys
import torch
import torch.distributed as dist
import bnexport
device, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
torch.manual_seed(0)
whole = torch.randn(7, 6, 9, 9, dtype=torch.float64)
part = (whole[:5] if rank == 0 else whole[5:]).float().to(device)
module = bnexport.SyncBatchNorm(6).to(device)
y = module(part.requires_grad_())
y.square().sum().backward()
plain = torch.nn.BatchNorm2d(6).double()
want = plain(whole.requires_grad_())
want.square().sum().backward()
rows = slice(0, 5) if rank == 0 else slice(5, 7)
for got, expected in ((y, want), (part.grad, whole.grad)):
    assert (got.double().cpu() - expected[rows]).abs().max() < 1e-4
assert (module.running_var.double().cpu() - plain.running_var).abs().max() < 1e-5
dist.destroy_process_group()
"""


def two_processes(options: Options, row: Row, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        members = [
            subprocess.Popen(
                [sys.executable, "-c", MEMBER, options.device, str(store), str(rank)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            outputs = [member.communicate(timeout=min(seconds - 5, 120))[0] for member in members]
        finally:
            for member in members:
                member.kill()
    wrong = [text[-300:] for member, text in zip(members, outputs, strict=True) if member.returncode != 0]
    row.ok, row.value = not wrong, " ".join(wrong) or "equal"
