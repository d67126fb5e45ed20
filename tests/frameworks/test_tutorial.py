"""The tutorial on MMSegmentation, every block of it, with the real packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks import environment

pytestmark = pytest.mark.slow


def test_the_tutorial_runs(tmp_path: Path) -> None:
    page = environment.ROOT / "docs/tutorials/mmsegmentation.md"
    printed = environment.run("tests.frameworks.run_page", str(page), str(tmp_path))
    assert "'mmengine.logging.history_buffer.HistoryBuffer')" in printed
    assert "batch norms folded" in printed and "largest difference" in printed
    assert {"fast_scnn.onnx", "from_python.onnx", "kept.onnx", "folded.onnx"} <= {
        path.name for path in tmp_path.iterdir()
    }
