"""Section `profile`: hardware counters of our kernels on the shapes of bare.py, from ncu."""

from __future__ import annotations

import csv
import re
import subprocess
import sys

from benchmarks.gpu import libraries
from benchmarks.gpu.report import NotRun, Report
from benchmarks.gpu.section import Options

METRICS = (
    "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_sector_hit_rate.pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active", "smsp__issue_active.avg.pct",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "launch__occupancy_limit_registers", "launch__registers_per_thread",
)  # fmt: skip
KERNELS = "regex:^(moments|normalise|sums|gradient|forward_channels|backward_channels)"


def run(report: Report, options: Options) -> None:
    with report.step("ncu", report.left()) as row:
        program = libraries.tool("ncu")
        if program is None:
            raise NotRun("ncu (Nsight Compute) is not found")
        command = [
            program, "--csv", "--print-units", "base", "--clock-control", "none", "--kernel-name", KERNELS, "--metrics",
            ",".join(METRICS), sys.executable, "-m", "benchmarks.gpu.bare", "profile",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=report.left() - 5)
        if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
            raise NotRun(
                "ncu may not read counters here (ERR_NVGPUCTRPERM: needs CAP_SYS_ADMIN or the driver's setting)"
            )
        if done.returncode != 0:
            raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
        launches = launches_of(done.stdout)
        if not launches:
            raise RuntimeError(f"no kernel was profiled: {done.stdout[-300:]}")
        row.value, row.data = f"{len(launches)} launches", {"launches": launches}
        for launch in launches:
            print(launch)


def launches_of(text: str) -> list[dict[str, object]]:
    """Metrics of each launch in order, from ncu's table of one row a metric; other lines are the program's."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches: dict[str, dict[str, object]] = {}
    for row in csv.DictReader(lines):
        launch = launches.setdefault(row["ID"], {"kernel": short_name(row["Kernel Name"]), "grid": row["Grid Size"]})
        value = row["Metric Value"].replace(",", "")
        launch[row["Metric Name"]] = float(value) if re.fullmatch(r"[-+.eE0-9]+", value) else row["Metric Value"]
    return list(launches.values())


def short_name(name: str) -> str:
    return re.sub(r"\w+::|void |\([^()]*Arguments\)", "", name).strip()
