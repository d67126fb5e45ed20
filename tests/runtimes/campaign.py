"""Exported files in every runtime: `python -m tests.campaign runtimes [RUNTIME ...]`.

The rows are benchmarks/results/runtimes.json, from which docs/runtimes.md has its table. A row is wrong where a result is,
and where ONNX Runtime does not run a file that is meant for it. Each runtime gets an environment in build/runtimes, which is
removed after its row.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, page
from bnexport.errors import first_line
from tests.campaign.table import ROOT, Campaign, Row
from tests.runtimes import files

# Minor versions of ONNX Runtime 1; the newest is asked for without a number as well.
FIRST, LAST = 17, 32


@dataclasses.dataclass(frozen=True)
class Runtime:
    """engine: a function of tests/runtimes/engine.py, or "javascript". libraries: whether it takes custom-op libraries."""

    name: str
    engine: str
    packages: tuple[str, ...]
    libraries: bool = False

    @property
    def is_javascript(self) -> bool:
        return self.engine == "javascript"


def _onnxruntime(version: str, *, old_numpy: bool = False) -> Runtime:
    packages = (f"onnxruntime{version}", "numpy<2" if old_numpy else "numpy")
    return Runtime("onnxruntime", "onnxruntime_cpu", packages, libraries=True)


RUNTIMES = {
    **{
        f"onnxruntime-1.{minor}": _onnxruntime(f"==1.{minor}.*", old_numpy=minor < 19)
        for minor in range(FIRST, LAST + 1)
    },
    "onnxruntime-newest": _onnxruntime(""),
    "onnxruntime-node": Runtime("onnxruntime-node", "javascript", ("onnxruntime-node",)),
    "onnxruntime-web": Runtime("onnxruntime-web", "javascript", ("onnxruntime-web",)),
    "onnx-reference": Runtime("onnx.reference", "onnx_reference", ("onnx",)),
    "openvino": Runtime("OpenVINO", "openvino_cpu", ("openvino", "numpy")),
    "tract": Runtime("tract", "tract_onnx", ("tract", "numpy")),
    "ncnn": Runtime("ncnn", "ncnn_pnnx", ("ncnn", "pnnx", "numpy")),
    "onnx2torch": Runtime("onnx2torch", "onnx_to_torch", ("torch", "onnx2torch", "onnx")),
    "tvm": Runtime("TVM", "tvm_relax", ("apache-tvm", "onnx")),
}


FOLDER = ROOT / "build/runtimes"
# For a whole runtime, an installation, and one case: TVM compiles for half a minute.
SECONDS, INSTALLATION, CASE = 7200, 900, 300
_PATH = re.compile(r"(?:/[\w.+-]+){2,}/?")
_TELLS = re.compile(
    r"No conversion rule|Unsupported (operation|model IR)|Unimplemented\(|Undetermined symbol|Opset \d+ is under|not support"
)
_LONGEST = 160


def warm() -> None:
    """Write the files, in another process: sessions start threads."""
    subprocess.run([sys.executable, "-m", "tests.runtimes.files", str(FOLDER / "files")], cwd=ROOT, check=True)


def run(name: str, place: Path, _: list[str]) -> None:
    """Find the runtime's version, and for each kind of file its largest error, or why it does not run."""
    runtime, folder = RUNTIMES[name], FOLDER / name
    found: Row = {"name": runtime.name, "version": "", "files": {}}
    try:
        (_install_npm if runtime.is_javascript else _install_pip)(runtime, folder)
        for path in sorted((FOLDER / "files").glob("*.json")):
            case = json.loads(path.read_text())
            if case["libraries"] and not runtime.libraries:
                continue
            answer = ask(runtime, folder, path)
            found["version"] = answer.get("version", found["version"])
            judge(found["files"].setdefault(case["name"], {"sizes": 0, "error": 0.0}), case["outputs"], answer)
    except NotInstalled as error:
        found["reason"] = _plain(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    place.write_text(json.dumps(found))


def judge(row: dict[str, Any], expected: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Add one answer to the row of its kind of file."""
    if "outputs" not in answer:
        row.setdefault("reason", _plain(answer["reason"]))
        return
    for name, wanted in expected.items():
        got, value = (
            np.asarray(each["data"], np.float64).reshape(each["shape"]) for each in (answer["outputs"][name], wanted)
        )
        if got.size == value.size == 1:
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


def problems(result: Mapping[str, Any]) -> list[str]:
    """Return wrong results, and refusals of ONNX Runtime, which runs every file but those of a newer opset."""
    lines = [f"{kind}: {row['wrong']}" for kind, row in result["files"].items() if "wrong" in row]
    if result["name"] == "onnxruntime":
        lines += [result["reason"]] if "reason" in result else []
        lines += [
            f"{kind}: {row['reason']}"
            for kind, row in result["files"].items()
            if "reason" in row and kind != files.NEWER
        ]
    return lines


def line(result: Row) -> str:
    if result.get("died") or "reason" in result:
        return f"{result['name']}: {result.get('died') or 'not installed: ' + result['reason']}"
    good = [kind for kind, row in result["files"].items() if "reason" not in row and "wrong" not in row]
    text = f"{result['name']} {result['version']}: {len(good)} of {len(result['files'])} kinds of files"
    return "\n  ".join([text, *problems(result)])


def verdict(result: Row) -> str:
    if result.get("died"):
        return "died"
    return "wrong" if problems(result) else "not installed" if "reason" in result else "ran"


def _plain(reason: str) -> str:
    """Shorten a reason to one line, from the words on that tell it, without paths of this machine."""
    reason = reason.partition("Stack backtrace")[0]
    found = _TELLS.search(reason)
    text = " ".join(_PATH.sub("", reason[found.start() :] if found else reason).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rsplit(' ', 1)[0]} ..."


class NotInstalled(Exception):
    """The package index has no such package for this machine."""


def _install_pip(runtime: Runtime, folder: Path) -> None:
    _call([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _call([*pip, *runtime.packages])


def _install_npm(runtime: Runtime, folder: Path) -> None:
    if not shutil.which("npm"):
        raise NotInstalled("npm is not installed")
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"private": true}\n')
    _call(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", *runtime.packages], folder)


def _call(command: list[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALLATION, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "rror" in line] or done.stderr.splitlines()
        raise NotInstalled(lines[-1].strip() if lines else f"exit code {done.returncode}")


def ask(runtime: Runtime, folder: Path, case: Path) -> dict[str, Any]:
    """Return what an engine printed: its version, and outputs or the reason why there are none."""
    if runtime.is_javascript:
        command, where = ["node", ROOT / "tests/runtimes/engine.mjs", runtime.name, case], folder
    else:
        command, where = [folder / "bin/python", "-m", "tests.runtimes.engine", runtime.engine, case], ROOT
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "BNEXPORT_LIBRARY")}
    try:
        done = subprocess.run(
            command, cwd=where, env=environment, capture_output=True, text=True, timeout=CASE, check=False
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"no result within {CASE} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode < 0:
        return {"reason": f"the process ended with signal {-done.returncode}"}
    if not lines:
        said = done.stderr.strip().splitlines() or ["no result"]
        return {"reason": first_line(Exception(said[-1]))}
    return dict(json.loads(lines[-1]))


CAMPAIGN = Campaign(
    cases=lambda: list(RUNTIMES),
    trial=__name__,
    results=page.RESULTS / "runtimes.json",
    key="runtimes",
    head=lambda: {"machine": machine.describe(), "bound": files.BOUND},
    verdict=verdict,
    line=line,
    page=page.refresh,
    order=list(RUNTIMES).index,
)
