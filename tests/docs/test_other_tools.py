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


def test_a_cell_says_what_came_of_a_tool() -> None:
    assert tables.word({"status": "folded", "before": 1, "left": 0}) == "yes"
    assert tables.word({"status": "3 left", "before": 3, "left": 3}) == "no"
    assert tables.word({"status": "1 left", "before": 3, "left": 1}) == "1 left"
    assert tables.word({"status": "fails", "error": "mmcv:MMCVSyncBatchNorm(-1) is not a registered function"}) == (
        "does not load"
    )
    assert tables.word({"status": "crashes", "error": ""}) == "crashes"
    assert tables.word(None) == "-"


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
