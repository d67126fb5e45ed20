"""An environment of its own for each runtime, and single cases in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bnexport.errors import first_line
from tests.runtimes.catalog import Runtime

ROOT = Path(__file__).resolve().parents[2]
# Seconds for an installation, and for one case: TVM compiles for half a minute.
INSTALLATION, CASE = 900, 300


class NotInstalled(Exception):
    """The package index has no such package for this machine."""


@contextlib.contextmanager
def environment(runtime: Runtime, folder: Path, *, keep: bool) -> Iterator[Path]:
    """Install a runtime into `folder`, which is removed afterwards unless it is kept; a kept one is used again."""
    try:
        if not folder.exists():
            (_install_npm if runtime.is_javascript else _install_pip)(runtime, folder)
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


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


def run(runtime: Runtime, folder: Path, case: Path) -> dict[str, Any]:
    """Return what an engine printed: its version, and outputs or the reason why there are none."""
    if runtime.is_javascript:
        script = ROOT / "tests/runtimes/engines/javascript.mjs"
        command, where = ["node", str(script), runtime.name, str(case.resolve())], folder
    else:
        command = [
            str(folder.absolute() / "bin/python"),
            "-m",
            "tests.runtimes.engines",
            runtime.engine,
            str(case.resolve()),
        ]
        where = ROOT
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
        return {
            "reason": first_line(
                Exception(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no result")
            )
        }
    return dict(json.loads(lines[-1]))
