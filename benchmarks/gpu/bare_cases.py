"""Section `bare`: the cases of bare.py in a process without torch, a row each."""

from __future__ import annotations

from benchmarks.gpu import bare
from benchmarks.gpu.report import Report
from benchmarks.gpu.section import Options


def run(report: Report, options: Options) -> None:
    device = bare.Host() if options.rehearse else bare.Driver()
    for case in bare.CASES:
        if report.wanted(str(case)):
            with report.step(str(case)):
                bare.run_case(case, device, check=True)
