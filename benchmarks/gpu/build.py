"""Section `build`: the libraries exist, load, belong together, and have code for the device."""

from __future__ import annotations

import os
import platform
import sys

from benchmarks.gpu import libraries
from benchmarks.gpu.report import NotRun, Report
from benchmarks.gpu.section import Options


def run(report: Report, options: Options) -> None:
    with report.step("libraries", report.left()) as row:
        problem = ""
        if not libraries.are_given():
            problem = libraries.build_emulated() if options.rehearse else libraries.build(options.architecture)
        os.environ.update(libraries.environment())
        found = libraries.find()
        row.ok = not problem and len(found) == 2
        row.value = problem or ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in found.values())
    with report.step("loading") as row:
        from bnexport.native import capi, cuda, library

        cuda.library()  # of another version, it is refused
        row.value = f"version {library.version('cuda')}, operators for {capi.instruction_set()}"
        row.ok = True
    with report.step("code for the device") as row:
        from bnexport.native import cuda

        if not options.rehearse and (problem := libraries.driver_problem()) is not None:
            raise NotRun(problem)
        count = cuda.device_count()
        for index in range(max(count, 1)):  # without one, device 0 gives the driver's reason
            cuda.check_device(index)
        row.ok, row.value = count > 0, f"{count} devices"
    with report.step("machine") as row:
        row.ok, row.value = None, describe(options.rehearse)


def describe(rehearse: bool) -> str:
    import numpy

    text = f"Python {sys.version.split()[0]}, NumPy {numpy.__version__}, {platform.machine()}"
    try:
        import torch
    except ImportError:
        return f"{text}, no torch"
    text += f", torch {torch.__version__}"
    if rehearse or not torch.cuda.is_available():
        return text
    return f"{text}, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
