"""Every CPU benchmark, then the tables and charts of the documents.

    python -m benchmarks.run_all [NAME ...] [--all] [--list]

Without names: those of at most ten minutes. Each is a program of its own that verifies, measures and writes its
result to benchmarks/results; one that fails keeps the result that was there, and the exit code tells. Only ratios
of one run mean anything: let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import time

from benchmarks import charts, page


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """`python -m benchmarks.<module> <arguments>`; `minutes` on two cores, roughly."""

    module: str
    minutes: int
    arguments: tuple[str, ...] = ()


# A benchmark joins by a line here, its table by one in page.BLOCKS, its chart by one in charts.CHARTS.
BENCHMARKS = {
    "ort-cpu": Benchmark("bench_ort_cpu", 4),
    "ort-cpu-avx2": Benchmark("bench_ort_cpu", 4, ("--isa", "avx2")),
    "ort-cpu-baseline": Benchmark("bench_ort_cpu", 4, ("--isa", "baseline")),
    "torch": Benchmark("bench_torch_operator", 4),
    "torch-avx2": Benchmark("bench_torch_operator", 4, ("--isa", "avx2")),
    "torchscript": Benchmark("bench_torchscript", 1),
    "export": Benchmark("bench_export", 15),
    "training-step": Benchmark("bench_training_step", 5),
    "training-step-avx2": Benchmark("bench_training_step", 5, ("--isa", "avx2")),
    "parallel-training": Benchmark("bench_parallel_training", 2),
    "conv-gradient": Benchmark("bench_conv_gradient", 2),
    "branches": Benchmark("bench_branches", 1),
    "recalibration": Benchmark("bench_recalibration", 2),
    "proof": Benchmark("bench_proof", 3),
    "fold": Benchmark("bench_fold", 30),
    "tools": Benchmark("tools.compare", 30, ("--models",)),
    "tools-proof": Benchmark("bench_proof", 60, ("--peers",)),
}
LONGEST = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--all", action="store_true", help="also those that take longer")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"got {', '.join(sorted(unknown))}, expected some of {', '.join(BENCHMARKS)}")
    chosen = arguments.names or [name for name, it in BENCHMARKS.items() if arguments.all or it.minutes <= LONGEST]
    if arguments.list:
        for name, it in BENCHMARKS.items():
            print(f"{name:14} {it.minutes:3} min  python -m benchmarks.{it.module} {' '.join(it.arguments)}")
        return 0
    failed = []
    for name in chosen:
        it = BENCHMARKS[name]
        print(f"== {name}", flush=True)
        start = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{it.module}", *it.arguments]
        if subprocess.run(command, cwd=page.ROOT, check=False).returncode != 0:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)
        print("tables that changed:", ", ".join(page.refresh()) or "none")
    charts.draw()
    if failed:
        print(f"failed: {', '.join(failed)}; their tables are what they were", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
