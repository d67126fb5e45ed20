"""Section `sanitize`: compute-sanitizer's tools over the cases of bare.py."""

from __future__ import annotations

import re
import subprocess
import sys

from benchmarks.gpu import libraries
from benchmarks.gpu.report import NotRun, Report
from benchmarks.gpu.section import Options

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = 9  # the exit code for what a tool found
CLEAN = re.compile(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)")
CASES = [sys.executable, "-m", "benchmarks.gpu.bare", "sanitize"]


def run(report: Report, options: Options) -> None:
    if report.wanted("without a tool"):
        with report.step("without a tool", report.left()) as row:
            done = subprocess.run(CASES, capture_output=True, text=True, check=False, timeout=max(report.left() - 5, 1))
            row.ok = done.returncode == 0
            row.value = f"{len(done.stdout.splitlines())} cases" if row.ok else (done.stdout + done.stderr)[-300:]
    for i, tool in enumerate(TOOLS):
        if not report.wanted(tool):
            continue
        with report.step(tool, report.left()) as row:
            program = libraries.tool("compute-sanitizer")
            if program is None:
                raise NotRun("compute-sanitizer is not found")
            command = [program, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", str(FOUND), *CASES]
            seconds = (report.left() - 5) / (len(TOOLS) - i)  # what is left, in equal parts
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
            output = done.stdout + done.stderr
            row.ok = done.returncode == 0 and CLEAN.search(output) is not None
            row.value = "no finding" if row.ok else f"exit code {done.returncode}: {output[-300:]}"
            row.data = {"output": output[-4000:]} if not row.ok else {}
