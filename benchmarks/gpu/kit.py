"""The kit for a GPU: checks and measures the CUDA code.

    python -m tests.campaign gpu                        every case that has no row yet
    python -m tests.campaign gpu --only '^(build|bare)' these
    BNEXPORT_KIT_REHEARSAL=1 ...                        on an emulated device

    build     do the libraries load, and have they code for the device; they are built unless they are there
    bare      nine cases without torch: what a new device is tried with first
    verify    every type and layout against float64; groups and threads on streams of their own; CUDA graphs
    bench     times against a device copy, PyTorch's kernels, cuDNN's and its sync batch norm
    torch     bnexport.SyncBatchNorm and its operators on the device
    ort       the operators in ONNX Runtime's CUDA provider (BNEXPORT_KIT_PROVIDER names its library)
    sanitize  compute-sanitizer's four tools over the cases of `bare`
    profile   hardware counters of five shapes from ncu

Rows are in build/gpu_kit. Needs torch 2.11 or newer and NumPy; `ort` needs onnxruntime. BNEXPORT_KIT_ARCHITECTURE (90) is what
is compiled for.
"""

from __future__ import annotations

import importlib
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import libraries
from bnexport.native import cuda
from tests.campaign.table import ROOT, Campaign, judged, told

# The module of each section, which has a function `steps`: what each case runs, by name. A step returns nothing, a text, or
# data with its text in "said" and in "right" whether it is; it raises what is wrong.
SECTIONS = {
    "build": "libraries", "bare": "bare", "verify": "verify", "bench": "bench", "torch": "torch_checks", "ort": "onnx_runtime",
    "sanitize": "tools", "profile": "tools",
}  # fmt: skip
SECONDS = 180
Steps = dict[str, Callable[[], Any]]


class NotRun(Exception):
    """A step cannot run here, and that is nothing wrong; the message is the reason."""


def steps(section: str) -> Steps:
    return importlib.import_module(f"benchmarks.gpu.{SECTIONS[section]}").steps(section)


def cases() -> list[str]:
    return [f"{section}: {name}" for section in SECTIONS for name in steps(section)]


def warm() -> None:
    """Build what is missing; each case finds the libraries through the environment. No CUDA before a fork."""
    problem = libraries.make()
    if problem:
        raise SystemExit(problem)
    os.environ.update(libraries.environment())


def run(name: str, place: Path, _: list[str]) -> None:
    section, _, step = name.partition(": ")
    row: dict[str, Any] = {"name": name, "status": "right"}
    try:
        if section != "build" and not libraries.REHEARSES and cuda.driver_version() is None:
            raise NotRun("no NVIDIA driver; BNEXPORT_KIT_REHEARSAL=1 runs it on an emulated device")
        result = steps(section)[step]()
    except NotRun as reason:
        row |= {"status": "not run", "said": str(reason)}
    except Exception as error:
        traceback.print_exc()
        row |= {"status": "wrong", "said": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    else:
        data = result if isinstance(result, dict) else {"said": result or ""}
        status = {True: "right", False: "wrong", None: "measured"}[data.pop("right", True)]
        row |= {"status": status, **data}
    place.write_text(json.dumps(row))


CAMPAIGN = Campaign(
    cases=cases,
    trial=__name__,
    results=ROOT / ("build/gpu_rehearsal" if libraries.REHEARSES else "build/gpu_kit") / "rows.json",
    verdict=judged,
    line=told,
    bad=("wrong", "died"),
    cost=lambda name, rows: list(SECTIONS).index(name.partition(":")[0]),
)
