"""The tutorials on MMSegmentation and timm, every block of them, with the real packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_pages import RESULT
from tests.frameworks import environment

pytestmark = pytest.mark.slow


def run(name: str, folder: Path) -> str:
    page = environment.ROOT / f"docs/tutorials/{name}.md"
    return environment.run("tests.frameworks.run_page", str(page), str(folder))


def test_the_tutorial_on_mmsegmentation_runs(tmp_path: Path) -> None:
    printed = run("mmsegmentation", tmp_path)
    assert "'mmengine.logging.history_buffer.HistoryBuffer')" in printed
    assert "batch norms folded" in printed and "largest difference" in printed
    assert len(RESULT.findall(printed)) == 1, printed
    assert {"fast_scnn.onnx", "from_python.onnx", "kept.onnx", "folded.onnx"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_the_tutorial_on_timm_runs(tmp_path: Path) -> None:
    printed = run("timm", tmp_path)
    assert len(RESULT.findall(printed)) == 2, printed
    assert "0 batch norms left" in printed and "62 batch norms left: features." in printed
    assert {"regnetx.onnx", "densenet.onnx"} <= {path.name for path in tmp_path.iterdir()}
