"""What a figure was measured on: in every result that is written to benchmarks/results."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

# What limits each engine to an instruction set, ours and its peers alike. ONNX Runtime's own kernels have no such
# limit: they take what the processor has.
LIMITS = {
    "avx512": {},
    "avx2": {"BNEXPORT_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "baseline": {"BNEXPORT_ISA": "baseline", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}

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


def add_isa_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--isa", choices=LIMITS, help="limit ours and the peers to this instruction set")


def limit(isa: str | None) -> None:
    """Starts the program once more where its environment does not limit it to the instruction set yet.

    Engines read their limits when they are loaded, which is before a program reads its arguments.
    """
    wanted = LIMITS[isa or "avx512"]
    if isa is not None and any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | wanted)


def result_of(path: Path, isa: str | None) -> Path:
    """ort_cpu.json is the result with all that the processor has, ort_cpu_avx2.json that with a limit."""
    return path if not LIMITS[isa or "avx512"] else path.with_stem(f"{path.stem}_{isa}")


def describe() -> dict[str, Any]:
    """Processor, its cores that this process may use, instruction set of our kernels, load, versions.

    The load is that of the last minute, the program's own included: beyond its threads, others were at work.
    """
    from bnexport.native import capi

    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instruction_set": capi.instruction_set(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
    }


def rest() -> None:
    """Waits until no other thread of this process runs.

    Threads without work spin before they sleep, each pool on its own: a million pauses in ONNX Runtime, 300,000 in
    OpenMP. That is 60 ms where a pause takes 140 cycles, and until then whoever is measured next has a core less.

    Raises:
        TimeoutError: they still run after five seconds.
    """
    for _ in range(1000):
        before = time.process_time()
        time.sleep(0.005)
        if time.process_time() - before < 0.0005:
            return
    raise TimeoutError("threads of this process still run after 5 s: nothing can be measured beside them")


def _load(machine: dict[str, Any]) -> str:
    return f"load {machine['load']:.1f}" if machine.get("load") is not None else "load not recorded"


def sentence(report: dict[str, Any], *, load: bool = True) -> str:
    """One line of what a report says about its machine; empty for a report from before it was kept.

    load: False where the table itself has it.
    """
    machine = report.get("machine", {})
    versions = machine.get("versions", {})
    known = {"onnxruntime": "ONNX Runtime", "torch": "torch"}
    parts = [
        machine.get("processor", ""),
        f"{machine['cores']} cores" if "cores" in machine else "",
        machine.get("instruction_set", ""),
        _load(machine) if load and machine else "",
        *(f"{name} {versions[package]}" for package, name in known.items() if versions.get(package)),
    ]
    return ", ".join(part for part in parts if part)
