"""The CUDA kernels on a GPU: built if needed, verified against float64, then measured against PyTorch and a copy.

    python benchmarks/bench_cuda.py [--verify-only] [--profile] [--sweep] [--no-sanitizer] [--output FOLDER]

Needs an NVIDIA GPU, torch, NumPy, nvcc and CMake; nothing else, no network. Times are medians of CUDA graph
replays that go round a set of inputs larger than L2, so that no run finds its input in the cache; outputs are
distinct, too. The floor is the least traffic (forward: read x, write y; backward: read x and dy, write dx) at the
bandwidth of a large device copy measured in the same run.

Writes FOLDER/bench_cuda-<gpu>.json, and a .png where matplotlib is installed. Exit codes: 0; 1 when a result is
wrong; 4 when there is no device or no compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# (N, C, H, W): the five of the performance notes, 16 MB and up in float16 but for the last; then small ones.
SHAPES = [(32, 256, 56, 56), (16, 64, 112, 112), (2, 512, 128, 256), (8, 2048, 16, 32), (256, 64, 56, 56)]
SMALL = [(8, 64, 56, 56), (32, 512, 7, 7), (8, 256, 14, 14), (2, 64, 28, 28), (1, 32, 16, 16)]
LARGEST_BATCH = 40  # calls in one graph
ROUNDS = 15


def fail(message: str) -> int:
    print(f"bench_cuda: {message}", file=sys.stderr)
    return 4


def build(capability: tuple[int, int]) -> None:
    """Builds the library for this device alone, unless BNEXPORT_CUDA_LIBRARY names one."""
    if os.environ.get("BNEXPORT_CUDA_LIBRARY"):
        return
    target = f"{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")
    folder = ROOT / "build" / f"cuda-{target}"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(folder), *generator, "-DBNEXPORT_CUDA=ON", f"-DBNEXPORT_CUDA_ARCHITECTURES={target}"],
        ["cmake", "--build", str(folder), "--target", "bnexport_ops_cuda"],
    ):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    os.environ["BNEXPORT_CUDA_LIBRARY"] = str(folder / "libbnexport_ops_cuda.so")


def time_graph(calls: list[Callable[[], Any]]) -> float:
    """Median microseconds of one of `calls`, which are captured in turn."""
    import torch

    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    count = max(len(calls), LARGEST_BATCH // len(calls) * len(calls))
    with torch.cuda.graph(graph):
        for i in range(count):
            kept.append(calls[i % len(calls)]())  # alive, so that outputs do not share memory
            if len(kept) > len(calls):
                kept.pop(0)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(ROUNDS):
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / count)
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """Bytes per microsecond, read and written, of a copy of 1 GiB."""
    import torch

    source = torch.empty(1 << 28, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / time_graph([lambda: target.copy_(source)])


def input_sets(shape: tuple[int, ...], dtype: Any, channels_last: bool, l2: int) -> list[tuple[Any, ...]]:
    """x, dy, y, dx, layer; so many that together they are three times the cache, at most 64."""
    import torch

    from benchmarks.cuda_layer import Layer

    layout = torch.channels_last if channels_last else torch.contiguous_format
    sets, used = [], 0
    while (used < 3 * l2 or len(sets) < 2) and len(sets) < 64:
        x, dy = (torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=layout) for _ in range(2))
        sets.append((x, dy, torch.empty_like(x), torch.empty_like(x), Layer.of(x)))
        used += 2 * x.numel() * x.element_size()
    return sets


def measure(
    shape: tuple[int, ...], dtype: Any, channels_last: bool, bandwidth: float, l2: int, sweep: bool
) -> dict[str, Any]:
    import torch

    from benchmarks.cuda_layer import Calls
    from benchmarks.cuda_peers import PEERS
    from benchmarks.cuda_verify import WISHES
    from bnexport.errors import UsageError
    from bnexport.runtime import cuda

    sets = input_sets(shape, dtype, channels_last, l2)
    x = sets[0][0]
    size = x.numel() * x.element_size()
    row: dict[str, Any] = {
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "layout": "channels_last" if channels_last else "contiguous",
        "bytes": size,
        "floor_us": {"forward": 2 * size / bandwidth, "backward": 3 * size / bandwidth},
        "us": {"forward": {}, "backward": {}},
    }
    forward, backward = row["us"]["forward"], row["us"]["backward"]
    wishes = WISHES if sweep else [("automatic", 0), ("split", 0)]
    for strategy, cluster in wishes:
        try:
            with cuda.prefer(strategy, cluster):
                calls = [Calls(*one) for one in sets]
                name = "ours" if strategy == "automatic" else strategy + (f" {cluster}" if cluster else "")
                if strategy == "automatic":
                    plans = {
                        "forward": cuda.plan(calls[0].forward_parameters),
                        "backward": cuda.plan(calls[0].backward_parameters),
                    }
                    row["plan"] = {
                        k: f"{p.strategy} {p.cluster}x{p.threads}, {p.blocks} blocks" for k, p in plans.items()
                    }
                forward[name] = time_graph([c.forward for c in calls])
                backward[name] = time_graph([c.backward for c in calls])
        except UsageError:
            continue  # not for this tensor; the backward may need more memory than the forward
    for name, peer in PEERS.items():
        try:
            pairs = [peer(one[0], one[1], one[4]) for one in sets]
            forward[name], backward[name] = time_graph([p[0] for p in pairs]), time_graph([p[1] for p in pairs])
        except RuntimeError as error:
            row.setdefault("not_measured", {})[name] = str(error).splitlines()[0]
    forward["copy"] = time_graph([lambda s=s: s[2].copy_(s[0]) for s in sets])
    torch.cuda.empty_cache()
    return row


def host_time() -> float:
    """Microseconds that a forward call takes on the host."""
    import torch

    from benchmarks.cuda_layer import Calls

    calls = Calls(*input_sets((2, 64, 28, 28), torch.float16, False, 0)[0])
    for _ in range(100):
        calls.forward()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(500):
        calls.forward()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / 500 * 1e6


def best_peer(times: dict[str, float]) -> float:
    return min((times[name] for name in ("torch", "cudnn", "sync") if name in times), default=float("nan"))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| shape | type | layout | MB | fwd us | % of floor | best peer / ours | bwd us | % of floor | best peer / ours | plan |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        cells = []
        for direction in ("forward", "backward"):
            times = row["us"][direction]
            ours = times["ours"]
            cells += [f"{ours:.1f}", f"{100 * row['floor_us'][direction] / ours:.0f}", f"{best_peer(times) / ours:.2f}"]
        shape = " x ".join(map(str, row["shape"]))
        plan = f"{row['plan']['forward'].split(',')[0]} / {row['plan']['backward'].split(',')[0]}"
        lines.append(
            f"| {shape} | {row['dtype']} | {row['layout']} | {row['bytes'] / 1e6:.1f} | {' | '.join(cells)} | {plan} |"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(12, 9), sharex=True)
    names = ["ours", "split", "sync", "torch", "cudnn"]
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        for i, name in enumerate(names):
            heights = [100 * r["floor_us"][direction] / r["us"][direction].get(name, float("inf")) for r in rows]
            axis.bar([k + (i - 2) * 0.16 for k in range(len(rows))], heights, 0.16, label=name)
        axis.set_ylabel(f"{direction}: % of copy bandwidth")
        axis.axhline(100, color="black", linewidth=0.5)
    axes[0].legend(ncol=len(names))
    axes[0].set_title(title)
    labels = [
        "x".join(map(str, r["shape"])) + f"\n{r['dtype']}, {'NHWC' if r['layout'] == 'channels_last' else 'NCHW'}"
        for r in rows
    ]
    axes[1].set_xticks(range(len(rows)), labels, rotation=60, ha="right", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def child(*command: str, timeout: float) -> tuple[int, str]:
    """Runs this script again under a tool."""
    try:
        done = subprocess.run(
            [*command, sys.executable, __file__, "--child"],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, "timed out"
    return done.returncode, done.stdout + done.stderr


def sanitize() -> dict[str, str]:
    """compute-sanitizer over a small set of verified cases. A tool that cannot run here is no error of the kernels."""
    if shutil.which("compute-sanitizer") is None:
        return {"compute-sanitizer": "not installed"}
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # so that each tensor has its own bounds
    results = {}
    for tool in ("memcheck", "racecheck"):
        code, output = child(
            "compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9", timeout=100
        )
        results[tool] = {0: "ok", 9: "errors"}.get(code, "could not run")
        if code != 0:
            print(f"{tool}: {results[tool]}\n{output[-2000:]}")
    del os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"]
    return results


def profile() -> int:
    """Hardware counters of the kernels on the first shapes, from ncu."""
    if shutil.which("ncu") is None:
        return fail("--profile needs ncu (Nsight Compute) on PATH")
    metrics = ",".join((
        "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_sector_hit_rate.pct",
        "sm__warps_active.avg.pct_of_peak_sustained_active", "smsp__issue_active.avg.pct",
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "launch__occupancy_limit_registers",
    ))  # fmt: skip
    code, output = child(
        "ncu", "--clock-control", "none", "--kernel-name", "regex:^(row|column|cluster|persistent|forward|backward)_",
        "--metrics", metrics, timeout=400,
    )  # fmt: skip
    print(output)
    return 0 if code == 0 else 4


def run_child() -> int:
    """A small part of everything, for tools that slow a program down a hundredfold."""
    import torch

    from benchmarks import cuda_verify as verify

    for shape in ((5, 8, 9, 9), (8, 16, 32, 32), (3, 3, 7, 7)):
        for channels_last in (False, True):
            for strategy, cluster in verify.WISHES:
                verify.verify(verify.Case(shape, torch.float16, channels_last, strategy, cluster), "cuda")
    verify.verify(verify.Case((32, 64, 56, 56), torch.float32, False), "cuda")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verify-only", action="store_true", help="no timing")
    parser.add_argument("--profile", action="store_true", help="hardware counters from ncu, and no timing")
    parser.add_argument("--sweep", action="store_true", help="time every strategy and cluster size")
    parser.add_argument("--no-sanitizer", action="store_true", help="skip compute-sanitizer")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        return fail("needs torch")
    if not torch.cuda.is_available():
        return fail(f"no CUDA device: torch {torch.__version__} sees none; this benchmark needs an NVIDIA GPU")
    started = time.monotonic()
    try:
        build(torch.cuda.get_device_capability())
    except (OSError, RuntimeError) as error:
        return fail(str(error))
    if options.child:
        return run_child()
    print(f"built in {time.monotonic() - started:.0f} s")
    if options.profile:
        return profile()

    from benchmarks.cuda_verify import verify_all

    try:
        verified = verify_all()
    except AssertionError as error:
        print(f"WRONG RESULT: {error}", file=sys.stderr)
        return 1
    print(f"verified {sum(verified.values())} cases {verified}; {time.monotonic() - started:.0f} s")
    checked = {} if options.no_sanitizer else sanitize()
    print(f"compute-sanitizer: {checked}; {time.monotonic() - started:.0f} s")
    if options.verify_only:
        return 1 if "errors" in checked.values() else 0

    properties = torch.cuda.get_device_properties(0)
    bandwidth, l2 = copy_bandwidth(), properties.L2_cache_size
    result: dict[str, Any] = {
        "gpu": properties.name, "torch": torch.__version__, "multiprocessors": properties.multi_processor_count, "l2_bytes": l2,
        "copy_gb_per_s": bandwidth / 1e3, "host_us_per_call": host_time(), "verified": verified, "sanitizer": checked, "rows": [],
    }  # fmt: skip
    print(
        f"{properties.name}: copy {bandwidth / 1e3:.0f} GB/s, {result['host_us_per_call']:.1f} us on the host per call"
    )
    for channels_last in (False, True):
        for shape in (*SHAPES, *SMALL):
            for dtype in (torch.float16, torch.float32):
                result["rows"].append(
                    measure(shape, dtype, channels_last, bandwidth, l2, options.sweep and not channels_last)
                )
    name = "bench_cuda-" + properties.name.replace("NVIDIA ", "").replace(" ", "_")
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result["rows"], options.output / f"{name}.png", f"{properties.name}, copy {bandwidth / 1e3:.0f} GB/s")
    if options.sweep:
        for row in result["rows"]:
            print(
                row["shape"],
                row["dtype"],
                row["layout"],
                {k: {n: round(t, 1) for n, t in v.items()} for k, v in row["us"].items()},
            )
    print(f"{time.monotonic() - started:.0f} s in all\n\n{table(result['rows'])}")
    return 1 if "errors" in checked.values() else 0


if __name__ == "__main__":
    sys.exit(main())
