"""Sections `sanitize` and `profile`: compute-sanitizer's tools and ncu over the cases of bare.py."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from functools import partial
from typing import Any

from benchmarks.gpu import libraries
from benchmarks.gpu.kit import NotRun

CHECKERS = ("memcheck", "racecheck", "synccheck", "initcheck")
CLEAN = re.compile(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)")
METRICS = (
    "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_sector_hit_rate.pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active", "launch__occupancy_limit_registers", "launch__registers_per_thread",
)  # fmt: skip
KERNELS = "regex:^(moments|normalise|sums|gradient|forward_channels|backward_channels)"


def run_under(program: str, arguments: list[str], cases: str) -> subprocess.CompletedProcess[str]:
    found = libraries.tool(program)
    if found is None:
        raise NotRun(f"{program} is not found")
    command = [found, *arguments, sys.executable, "-m", "benchmarks.gpu.bare", cases]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def steps(section: str) -> dict[str, Any]:
    return {"ncu": profile} if section == "profile" else {name: partial(sanitize, name) for name in CHECKERS}


def sanitize(checker: str) -> str:
    done = run_under(
        "compute-sanitizer", ["--tool", checker, "--report-api-errors", "no", "--error-exitcode", "9"], "sanitize"
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0 and CLEAN.search(output), f"exit code {done.returncode}: {output[-300:]}"
    return "no finding"


def profile() -> dict[str, Any]:
    arguments = ["--csv", "--print-units", "base", "--clock-control", "none", "--kernel-name", KERNELS]
    done = run_under("ncu", [*arguments, "--metrics", ",".join(METRICS)], "profile")
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise NotRun("ncu may not read counters (ERR_NVGPUCTRPERM: needs CAP_SYS_ADMIN or the driver's setting)")
    launches = launches_of(done.stdout)
    assert done.returncode == 0 and launches, f"exit code {done.returncode}: {(done.stdout + done.stderr)[-300:]}"
    return {"said": f"{len(launches)} launches", "launches": launches}


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
