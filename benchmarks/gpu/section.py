"""Run one section of the kit in this process (benchmarks/gpu_kit.py starts it)."""

from __future__ import annotations

import argparse
import faulthandler
import fcntl
import importlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.report import INCOMPLETE, Report

# The module of each section and its function.
FUNCTIONS = {
    "build": ("libraries", "run"), "bare": ("bare", "run"), "verify": ("verify", "run"), "bench": ("bench", "run"),
    "torch": ("torch_checks", "run"), "ort": ("onnx_runtime", "run"), "sanitize": ("tools", "sanitize"),
    "profile": ("tools", "profile"),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What sections are told. device: torch's name of it."""

    rehearse: bool
    provider: str
    architecture: str

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"


def end_with_the_kit() -> None:
    """Kill this process group once the kit is gone: what is measured beside the next call's sections means nothing."""
    kit = os.getppid()

    def watch() -> None:
        while os.getppid() == kit:
            time.sleep(0.2)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=FUNCTIONS)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--provider", default="installed")
    parser.add_argument("--architecture", default="90")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    faulthandler.enable()  # where a step that ends the process was
    end_with_the_kit()
    with given.rows.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until a section of a killed kit has ended, too
        return run(given)


def run(given: argparse.Namespace) -> int:
    report = Report(given.rows, given.seconds)
    module, function = FUNCTIONS[given.name]
    section = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
    section(report, Options(given.rehearse, given.provider, given.architecture))
    if report.unreached:
        print(f"no time was left for {len(report.unreached)} steps, from {report.unreached[0]!r} on")
        return INCOMPLETE
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
