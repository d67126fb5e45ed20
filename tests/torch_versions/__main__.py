"""Run the ten ways, and the tests that depend most on torch, in other versions of torch and Python.

    python -m tests.torch_versions 2.4.1/3.10 2.14.1/3.13 [--keep]

Each version gets an environment under build/torch with the package installed from its wheel, and a copy of the tests, so
that nothing of the checkout is imported. Environments that are there are used again; without --keep they are removed
after their run. Writes benchmarks/results/torch_versions.json; fails where a test failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import records

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks/results/torch_versions.json"
FOLDER = ROOT / "build/torch"
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


def make_wheel() -> Path:
    shutil.rmtree(FOLDER / "wheel", ignore_errors=True)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        FOLDER / "wheel",
        ROOT,
    ]
    subprocess.run(build, check=True)
    return next((FOLDER / "wheel").glob("*.whl"))


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


def measure(version: str, python: str, wheel: Path) -> dict[str, Any]:
    inside = install(version, python, wheel)
    copy = FOLDER / f"{version}-{python}-tests"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for name in COPIED:
        ignore = shutil.ignore_patterns("node_modules", "__pycache__")
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(
            ROOT / name, copy / name, **({"ignore": ignore} if (ROOT / name).is_dir() else {})
        )
    shown = (
        "import json, onnx, onnxruntime, torch; print(json.dumps([m.__version__ for m in (torch, onnx, onnxruntime)]))"
    )
    versions = json.loads(subprocess.run([inside, "-c", shown], check=True, capture_output=True).stdout)
    command = [inside, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "--junitxml=results.xml", *TESTS]
    subprocess.run(command, cwd=copy, check=False)
    row: dict[str, Any] = dict(zip(("torch", "onnx", "onnxruntime"), versions), python=python)
    row.update(read(copy / "results.xml"))
    return row


def read(file: Path) -> dict[str, Any]:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="TORCH/PYTHON")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are")
    arguments = parser.parse_args()
    for each in arguments.versions:
        if shutil.which(f"python{each.partition('/')[2]}") is None:
            raise SystemExit(f"{each}: got no python{each.partition('/')[2]} on the PATH, expected one")
    wheel = make_wheel()
    rows: dict[str, Any] = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    for each in arguments.versions:
        version, _, python = each.partition("/")
        rows[each] = row = measure(version, python, wheel)
        rows = dict(sorted(rows.items(), key=lambda item: [int(part) for part in item[0].partition("/")[0].split(".")]))
        records.write(RESULT, {"rows": rows})
        print(
            f"{each}: {row['passed']} passed, {row['skipped']} skipped, {row['failed']} failed",
            *row["failures"],
            sep="\n  ",
        )
        if not arguments.keep:
            for folder in FOLDER.glob(f"{version}-{python}*"):
                shutil.rmtree(folder)
    return int(any(rows[each]["failed"] for each in arguments.versions))


if __name__ == "__main__":
    sys.exit(main())
