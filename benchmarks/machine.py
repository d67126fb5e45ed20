"""What a figure was measured on: in every result that is written to benchmarks/results."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("bnexport", "torch", "onnxruntime", "onnx", "numpy")


def processor() -> str:
    """The processor's name as the kernel gives it, or its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """Processor, its cores that this process may use, instruction set of our kernels, versions."""
    from bnexport.runtime import capi

    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instruction_set": capi.instruction_set(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
    }


def sentence(report: dict[str, Any]) -> str:
    """One line of what a report says about its machine; empty for a report from before it was kept."""
    machine = report.get("machine", {})
    versions = machine.get("versions", {})
    known = {"onnxruntime": "ONNX Runtime", "torch": "torch"}
    parts = [
        machine.get("processor", ""),
        f"{machine['cores']} cores" if "cores" in machine else "",
        machine.get("instruction_set", ""),
        *(f"{name} {versions[package]}" for package, name in known.items() if versions.get(package)),
    ]
    return ", ".join(part for part in parts if part)
