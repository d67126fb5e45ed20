"""The comparison with other tools: its tables, and the whole of it against a package index."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.page import RESULTS
from benchmarks.tools import tables
from tests.docs.pages import ROOT

STORED = json.loads((RESULTS / "other_tools.json").read_text())


def test_every_cell_has_a_command_or_a_source() -> None:
    for row in STORED["rows"].values():
        assert all(it["status"] for it in row["tools"].values())
    assert all(STORED["tools"][tool] for tool in tables.SHOWN_TOOLS)
    for source in STORED["sources"].values():
        assert source["version"] and source["date"] and source["source"]


@pytest.mark.slow
def test_the_comparison_can_be_repeated(tmp_path: Path) -> None:
    """In a new environment with the newest tools; what they make of a network may change, ours and torch's may not."""
    path = tmp_path / "other_tools.json"
    command = [sys.executable, "-m", "benchmarks.tools.compare", "--output", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800)
    report = json.loads(path.read_text())
    assert report["rows"].keys() == STORED["rows"].keys()
    for name, row in report["rows"].items():
        for tool in ("torch.onnx.export", "bnexport"):
            got, expected = (it["tools"].get(tool, {}).get("status") for it in (row, STORED["rows"][name]))
            assert got == expected, f"{name}: {tool}"
