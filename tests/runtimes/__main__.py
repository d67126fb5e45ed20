"""Runs exported files in every runtime: `python -m tests.runtimes [RUNTIME ...]`; `make campaign RUN=runtimes`.

Results go to benchmarks/results/runtimes.json, from which docs/runtimes.md has its table; runtimes that are not asked
for keep theirs. Fails where a result is wrong, or where ONNX Runtime does not run a file that is meant for it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, page, records
from tests.runtimes import files
from tests.runtimes.catalog import RUNTIMES, Runtime
from tests.runtimes.environments import NotInstalled, environment, run

RESULT = page.RESULTS / "runtimes.json"
_PATH = re.compile(r"(?:/[\w.+-]+){2,}/?")
_TELLS = re.compile(
    r"No conversion rule|Unsupported (operation|model IR)|Unimplemented\(|Undetermined symbol|Opset \d+ is under|not support"
)
_LONGEST = 160


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="RUNTIME", help=f"of {', '.join(RUNTIMES)}; all by default")
    parser.add_argument("--build", type=Path, default=Path("build/runtimes"), help="folder of files and environments")
    parser.add_argument("--keep", action="store_true", help="leave the environments there, for the next run")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(RUNTIMES)
    if unknown:
        parser.error(f"unknown runtimes: {', '.join(sorted(unknown))}")
    cases = files.make(arguments.build / "files")
    report = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    runtimes = dict(report.get("runtimes", {}))
    failed = []
    for name in arguments.names or RUNTIMES:
        runtimes[name] = measure(RUNTIMES[name], arguments.build / name, cases, keep=arguments.keep)
        failed += [f"{name}: {line}" for line in problems(RUNTIMES[name], runtimes[name])]
        print(f"{name}: {summary(runtimes[name])}", flush=True)
    ordered = {name: runtimes[name] for name in RUNTIMES if name in runtimes}
    described = {"machine": machine.describe(), "bound": files.BOUND, "runtimes": ordered}
    records.write(RESULT, described)
    page.refresh()
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


def measure(runtime: Runtime, folder: Path, cases: list[files.Written], *, keep: bool) -> dict[str, Any]:
    """Return the runtime's version, and for each kind of file its largest error, or why it does not run."""
    found: dict[str, Any] = {"name": runtime.name, "version": "", "files": {}}
    try:
        with environment(runtime, folder, keep=keep) as place:
            for case in cases:
                if case.libraries and not runtime.libraries:
                    continue
                answer = run(runtime, place, case.path)
                found["version"] = answer.get("version", found["version"])
                row = found["files"].setdefault(case.name, {"sizes": 0, "error": 0.0})
                judge(row, case.outputs, answer)
    except NotInstalled as error:
        found["reason"] = _plain(str(error))
    return found


def judge(row: dict[str, Any], expected: Mapping[str, np.ndarray], answer: Mapping[str, Any]) -> None:
    """Add one answer to the row of its kind of file."""
    if "outputs" not in answer:
        row.setdefault("reason", _plain(answer["reason"]))
        return
    for name, value in expected.items():
        got = np.asarray(answer["outputs"][name]["data"], np.float64).reshape(answer["outputs"][name]["shape"])
        if got.shape != value.shape and got.size == value.size == 1:
            got = got.reshape(value.shape)
        if got.shape != value.shape:
            row["wrong"] = f"output {name!r}: got shape {got.shape}, expected {value.shape}"
            return
        error = float(np.abs(got - value).max() / np.abs(value).max())
        row["error"] = max(row["error"], error)
        if not error <= files.BOUND:
            row["wrong"] = f"output {name!r}: differs by {error:.2g} of the largest value"
            return
    row["sizes"] += 1


def problems(runtime: Runtime, result: Mapping[str, Any]) -> list[str]:
    """Return wrong results, and refusals of ONNX Runtime, which runs every file but those of a newer opset."""
    lines = [f"{kind}: {row['wrong']}" for kind, row in result["files"].items() if "wrong" in row]
    if runtime.name == "onnxruntime":
        lines += [result["reason"]] if "reason" in result else []
        lines += [
            f"{kind}: {row['reason']}"
            for kind, row in result["files"].items()
            if "reason" in row and kind != files.NEWER
        ]
    return lines


def summary(result: Mapping[str, Any]) -> str:
    if "reason" in result:
        return f"not installed: {result['reason']}"
    good = [kind for kind, row in result["files"].items() if "reason" not in row and "wrong" not in row]
    return f"{result['version']}, {len(good)} of {len(result['files'])} kinds of files"


def _plain(reason: str) -> str:
    """Shorten a reason to one line, from the words on that tell it, without paths of this machine."""
    reason = reason.partition("Stack backtrace")[0]
    found = _TELLS.search(reason)
    text = " ".join(_PATH.sub("", reason[found.start() :] if found else reason).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rsplit(' ', 1)[0]} ..."


if __name__ == "__main__":
    sys.exit(main())
