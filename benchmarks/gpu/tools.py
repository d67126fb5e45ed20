"""Sections `sanitize` and `profile`: compute-sanitizer's tools and ncu over the cases of bare.py."""

from __future__ import annotations

import csv
import re
import subprocess
import sys

from benchmarks.gpu import libraries
from benchmarks.gpu.report import NotRun, Report
from benchmarks.gpu.section import Options

CHECKERS = ("memcheck", "racecheck", "synccheck", "initcheck")
CLEAN = re.compile(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)")
METRICS = (
    "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_sector_hit_rate.pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active", "launch__occupancy_limit_registers", "launch__registers_per_thread",
)  # fmt: skip
KERNELS = "regex:^(moments|normalise|sums|gradient|forward_channels|backward_channels)"


def run_under(program: str, arguments: list[str], cases: str, seconds: float) -> subprocess.CompletedProcess[str]:
    found = libraries.tool(program)
    if found is None:
        raise NotRun(f"{program} is not found")
    command = [found, *arguments, sys.executable, "-m", "benchmarks.gpu.bare", cases]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(seconds, 1))


def sanitize(report: Report, options: Options) -> None:
    for i, checker in enumerate(CHECKERS):
        if not report.wanted(checker):
            continue
        with report.step(checker, report.left()) as row:
            arguments = ["--tool", checker, "--report-api-errors", "no", "--error-exitcode", "9"]
            seconds = (report.left() - 5) / (len(CHECKERS) - i)  # what is left, in equal parts
            done = run_under("compute-sanitizer", arguments, "sanitize", seconds)
            output = done.stdout + done.stderr
            row.ok = done.returncode == 0 and CLEAN.search(output) is not None
            row.value = "no finding" if row.ok else f"exit code {done.returncode}: {output[-300:]}"
            row.data = {"output": output[-4000:]} if not row.ok else {}


def profile(report: Report, options: Options) -> None:
    with report.step("ncu", report.left()) as row:
        arguments = ["--csv", "--print-units", "base", "--clock-control", "none", "--kernel-name", KERNELS]
        done = run_under("ncu", [*arguments, "--metrics", ",".join(METRICS)], "profile", report.left() - 5)
        if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
            raise NotRun("ncu may not read counters (ERR_NVGPUCTRPERM: needs CAP_SYS_ADMIN or the driver's setting)")
        launches = launches_of(done.stdout)
        if done.returncode != 0 or not launches:
            raise RuntimeError(f"exit code {done.returncode}, no kernel: {(done.stdout + done.stderr)[-300:]}")
        row.value, row.data = f"{len(launches)} launches", {"launches": launches}


def launches_of(text: str) -> list[dict[str, object]]:
    """Metrics of each launch in order, from ncu's table of one row a metric; other lines are the program's."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches: dict[str, dict[str, object]] = {}
    for row in csv.DictReader(lines):
        name = re.sub(r"\w+::|void |\([^()]*Arguments\)", "", row["Kernel Name"]).strip()
        launch = launches.setdefault(row["ID"], {"kernel": name, "grid": row["Grid Size"]})
        value = row["Metric Value"].replace(",", "")
        launch[row["Metric Name"]] = float(value) if re.fullmatch(r"[-+.eE0-9]+", value) else row["Metric Value"]
    return list(launches.values())
