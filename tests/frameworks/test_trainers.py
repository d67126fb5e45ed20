"""The page on trainers, every block of it, with the real packages."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from bnexport.native import library
from tests.docs.pages import blocks
from tests.frameworks import environment

pytestmark = pytest.mark.slow


def test_the_page_runs(tmp_path: Path) -> None:
    page, printed = environment.ROOT / "docs/tutorials/trainers.md", ""
    programs = environment.python("trainers").parent
    variables = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{environment.ROOT}{os.pathsep}{tmp_path}",
        "OMP_NUM_THREADS": "1",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        library.ENVIRONMENT_VARIABLE: str(library.get_library_path()),
    }
    ends = re.compile(r"largest difference from one process: ([\d.e-]+)")
    for language, code in blocks(page.read_text(), "python", "sh"):
        name = code.partition("\n")[0]
        if language == "python" and name.endswith(".py"):
            (tmp_path / name.removeprefix("# ")).write_text(code)
            continue
        command = ["bash", "-euc", code] if language == "sh" else ["python", "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        printed += done.stdout + done.stderr
    assert len(ends.findall(printed)) >= 2 * 5
    assert {path.name for path in tmp_path.glob("*.onnx")} == {"model.onnx", "averaged.onnx"}
