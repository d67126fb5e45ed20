"""The ten ways, and the tests that depend most on torch, in other versions of torch and Python.

    python -m tests.campaign torch 2.4.1/3.10 2.14.1/3.13

Each version gets an environment under build/torch with the package installed from its wheel, and a copy of the tests, so
that nothing of the checkout is imported. They are removed after their row, unless BNEXPORT_KEEP is set. The rows are
benchmarks/results/torch_versions.json, from which docs/support.md has its table.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import page
from tests.campaign.table import ROOT, Campaign, Row

FOLDER = ROOT / "build/torch"
SECONDS = 4 * 3600
VERSIONS = ("2.4.1/3.10", "2.6.0/3.11", "2.9.1/3.12", "2.13.0/3.11", "2.14.1/3.13")
NEEDED = ("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "scikit-learn>=1.3", "setuptools")
# The operator in several processes, both exporters, default choices of sizes, checkpoints, modules, training.
TESTS = (
    "tests/torch_versions",
    *(f"tests/sync_bn/test_{name}.py" for name in ("distributed", "module", "convert", "autograd")),
    *(f"tests/exporting/test_{name}.py" for name in ("size_corpus", "checkpoint", "portable_body")),
    "tests/folding/module/test_folds.py",
    "tests/folding/module/test_programs.py",
    "tests/training/test_networks.py",
    "tests/training/building/test_kinks.py",
    "tests/training/translations/test_index_put.py",
)
COPIED = ("tests", "models", "examples", "docs", "pyproject.toml")


def warm() -> None:
    """Build the wheel."""
    shutil.rmtree(FOLDER / "wheel", ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", FOLDER / "wheel", ROOT], check=True)


def install(version: str, python: str, wheel: Path) -> Path:
    """Return the interpreter of an environment with this torch and the wheel."""
    folder = FOLDER / f"{version}-{python}"
    inside = folder / "bin/python"
    pip = [inside, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if not inside.exists():
        subprocess.run([f"python{python}", "-m", "venv", folder], check=True)
        subprocess.run([*pip, f"torch=={version}"], check=True)
    subprocess.run([*pip, *NEEDED, f"bnexport[torch,cpu] @ {wheel.as_uri()}"], check=True)
    subprocess.run([*pip, "--no-deps", "--force-reinstall", wheel], check=True)
    return inside


def run(name: str, place: Path, _: list[str]) -> None:
    """Run the tests in `name`, TORCH/PYTHON."""
    version, _, python = name.partition("/")
    inside = install(version, python, next((FOLDER / "wheel").glob("*.whl")))
    copy = FOLDER / f"{version}-{python}-tests"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for each in COPIED:
        subprocess.run(["cp", "-r", ROOT / each, copy], check=True)
    shown = (
        "import json, onnx, onnxruntime, torch; print(json.dumps([m.__version__ for m in (torch, onnx, onnxruntime)]))"
    )
    versions = json.loads(subprocess.run([inside, "-c", shown], check=True, capture_output=True).stdout)
    command = [inside, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "--junitxml=results.xml", *TESTS]
    subprocess.run(command, cwd=copy, check=False)
    row: Row = dict(zip(("torch", "onnx", "onnxruntime"), versions), python=python)
    place.write_text(json.dumps(row | read(copy / "results.xml")))
    if "BNEXPORT_KEEP" not in os.environ:
        for folder in FOLDER.glob(f"{version}-{python}*"):
            shutil.rmtree(folder)


def read(file: Path) -> Row:
    """Return the outcome of each way and the numbers of all tests."""
    ways, failed = {}, []
    counts = {"passed": 0, "skipped": 0, "failed": 0}
    for case in ElementTree.parse(file).iter("testcase"):
        skipped = case.find("skipped")
        bad = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if bad else "passed" if skipped is None else "skipped"
        counts[outcome] += 1
        name = str(case.get("name"))
        if bad:
            failed.append(f"{case.get('classname')}::{name}")
        if name.startswith("test_way["):
            reason = "" if skipped is None else str(skipped.get("message")).partition(" needs ")[2].partition(",")[0]
            ways[name[len("test_way[") : -1]] = f"needs {reason}" if reason else outcome
    return {"ways": ways, **counts, "failures": failed}


def verdict(row: Row) -> str:
    return "died" if row.get("died") else "failed" if row["failed"] else "passed"


def line(row: Row) -> str:
    if row.get("died"):
        return f"{row['name']} died: {row['died']}"
    counts = f"{row['passed']} passed, {row['skipped']} skipped, {row['failed']} failed"
    return "\n  ".join([f"torch {row['torch']}, Python {row['python']}: {counts}", *row["failures"]])


CAMPAIGN = Campaign(
    cases=lambda: VERSIONS,
    takes_others=True,
    trial=__name__,
    results=page.RESULTS / "torch_versions.json",
    key="rows",
    verdict=verdict,
    line=line,
    page=page.refresh,
    order=lambda name: [int(part) for part in name.partition("/")[0].split(".")],
)
