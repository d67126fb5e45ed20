"""Check and measure the CUDA code on a GPU: one command, in sections that each end with their figures on disk.

    python benchmarks/gpu_kit.py                        everything that is not done yet
    python benchmarks/gpu_kit.py --only verify,bench    these sections
    python benchmarks/gpu_kit.py --only build           the libraries alone, where nvcc is; needs no GPU
    python benchmarks/gpu_kit.py --rehearse             every section on an emulated device

    build     both libraries for this GPU, unless they are there; do they load, and have they code for the device
    bare      nine cases without torch, each of which prints a line: what a new device is tried with first
    verify    every type and layout against float64; groups and threads on streams of their own; CUDA graphs
    bench     times against a device copy, PyTorch's kernels, cuDNN's and its sync batch norm
    ort       the operators in ONNX Runtime's CUDA provider (--provider)
    torch     bnexport.SyncBatchNorm and its operators on the device
    sanitize  compute-sanitizer's four tools over the cases of `bare`
    profile   hardware counters of five shapes from ncu

A section is a process group of its own with a deadline, and writes each figure as it gets it: what was measured
stays when it is killed, and the next call goes on behind it. A step that does not end within its limit (30 seconds, if it
says nothing else) is named as hung, its section is ended and goes on behind it, and no later call tries it again. A section
that ran out of time is "incomplete", one of whose steps none could run is "not run". To start anew, remove the results.
Needs torch 2.11 or newer and NumPy; `ort` needs onnxruntime.

Exit codes: 0; 1 when something is wrong, incomplete or not run; 2 usage; 4 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if "--rehearse" in sys.argv[1:]:
    os.environ["BNEXPORT_KIT_REHEARSAL"] = "1"

from benchmarks.gpu import libraries  # noqa: E402
from benchmarks.gpu.report import INCOMPLETE, append, read_rows, running_step, table, write_json  # noqa: E402
from bnexport.native import cuda  # noqa: E402

SECTIONS = ("build", "bare", "verify", "bench", "torch", "ort", "sanitize", "profile")
LONGEST_SECTION = 480  # seconds
SHORTEST_SECTION = 15  # what is left must allow so much, or the section waits for the next call
HUNG = -1  # the code of a section that a step kept from ending, or ended with its process
POLL = 0.3  # seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="sections, separated by commas")
    parser.add_argument("--deadline", type=float, default=540, help="seconds for the whole call (540)")
    parser.add_argument("--provider", default="installed", help="'installed', or the CUDA provider's library")
    parser.add_argument("--output", type=Path, default=ROOT / "build/gpu_kit", help="folder of the results")
    parser.add_argument("--architecture", default="90", help="what `build` compiles for")
    parser.add_argument("--rehearse", action="store_true", help="on an emulated device")
    options = parser.parse_args()
    sections = tuple(options.only.split(",")) if options.only else SECTIONS
    unknown = sorted(set(sections) - set(SECTIONS))
    if unknown:
        parser.error(f"--only: got {', '.join(unknown)}, expected some of {','.join(SECTIONS)}")
    if not options.rehearse and sections != ("build",) and cuda.driver_version() is None:
        print("gpu_kit: no NVIDIA driver; --rehearse runs the sections on an emulated device", file=sys.stderr)
        return 4
    options.output.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # `run_section` ends its section on the way out
    end = time.monotonic() + options.deadline
    results: dict[str, Any] = {}
    for name in sections:
        results[name] = run_section(name, options, end)
        write_json(options.output / "gpu_kit.json", collect(options.output))
        print(f"\n## {name}: {results[name]}\n\n{table(read_rows(options.output / f'{name}.jsonl'))}", flush=True)
    print(f"\n{options.output / 'gpu_kit.json'}: {json.dumps(results)}")
    return 0 if all(status == "passed" for status in results.values()) else 1


def run_section(name: str, options: argparse.Namespace, end: float) -> str:
    """Runs a section and returns "passed", or what went wrong."""
    rows_file = options.output / f"{name}.jsonl"
    status_file = options.output / f"{name}.status"
    stamp = fingerprint(options)
    if not rows_file.exists() or stamp not in rows_file.read_text(errors="replace").partition("\n")[0]:
        write_json(rows_file, {"fingerprint": stamp}, indent=None)
        status_file.unlink(missing_ok=True)
    if status_file.exists() and status_file.read_text() == "passed":
        return "passed"
    seconds = min(LONGEST_SECTION, end - time.monotonic())
    if seconds < SHORTEST_SECTION:
        return f"not run, {max(seconds, 0):.0f} s of --deadline are left"
    log = options.output / f"{name}.log"
    command = [
        sys.executable, "-m", "benchmarks.gpu.section", name, "--rows", str(rows_file), "--seconds", f"{seconds:.0f}",
        "--provider", options.provider, "--architecture", options.architecture, *(["--rehearse"] if options.rehearse else []),
    ]  # fmt: skip
    environment = {**os.environ, **libraries.environment(), "PYTHONPATH": str(ROOT)}
    stop = time.monotonic() + seconds
    while (code := run_process(command, environment, log, rows_file, stop)) == HUNG:
        pass  # behind the step that hung
    rows = read_rows(rows_file)
    wrong = sum(row["ok"] is False for row in rows)
    if code is None:
        status = f"killed after {seconds:.0f} s"
    elif code == INCOMPLETE:
        status = f"incomplete, {wrong} wrong: {last_line(log)}"
    elif code != 0 and not wrong:
        status = f"ended with code {code}: " + last_line(log)
    else:
        status = f"{wrong} wrong" if wrong else "passed" if rows else "measured nothing"
        if status == "passed" and all(row.get("not_run") for row in rows):
            status = rows[0]["value"]
    status_file.write_text(status)
    return status


def run_process(command: list[str], environment: dict[str, str], log: Path, rows: Path, stop: float) -> int | None:
    """Run a section until it ends, a step hangs or its time is over; return its exit code, HUNG or None."""
    with log.open("ab") as stream:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )  # fmt: skip
        try:
            while time.monotonic() < stop:
                code = None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(POLL)
                step = running_step(rows)
                if code is not None and step is None:
                    return code
                if code is not None:
                    value = f"ended its process with code {code}"
                elif step is not None and time.time() > step["started"] + step["limit"]:
                    end_group(child)
                    value = f"hung: no end within {step['limit']:.0f} s"
                else:
                    continue
                append(rows, {"name": step["name"], "ok": False, "hung": True, "value": value})
                return HUNG
            return None
        finally:
            end_group(child)


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Kills the section's process group: what a section starts does not outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "no output"


def fingerprint(options: argparse.Namespace) -> str:
    """Rows of other libraries, or of another kind of run, are not continued."""
    digest = hashlib.sha256(b"rehearsal" if options.rehearse else b"device")
    for path in libraries.find().values():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def collect(folder: Path) -> dict[str, Any]:
    """What all sections have measured so far."""
    sections = {}
    for name in SECTIONS:
        if (folder / f"{name}.jsonl").exists():
            status = folder / f"{name}.status"
            sections[name] = {
                "status": status.read_text() if status.exists() else "not ended",
                "rows": read_rows(folder / f"{name}.jsonl"),
            }
    return {"schema_version": 1, "sections": sections}


if __name__ == "__main__":
    sys.exit(main())
