"""Run one section of the kit in this process (benchmarks/gpu_kit.py starts it)."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.report import Report

MODULES = {
    "build": "build", "verify": "verify", "bench": "bench", "ort": "onnx_runtime", "torch": "torch_checks", "nccl": "nccl",
    "sanitize": "sanitize", "profile": "profile",
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=MODULES)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--provider", default="installed")
    parser.add_argument("--architecture", default="90a")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    report = Report(given.rows, given.seconds)
    section = importlib.import_module(f"benchmarks.gpu.{MODULES[given.name]}")
    section.run(report, Options(given.rehearse, given.provider, given.architecture))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
