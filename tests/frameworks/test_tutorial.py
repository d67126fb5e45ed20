"""The tutorials on MMSegmentation, MMDetection and timm, every block of them, with the real packages."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.docs.test_pages import RESULT
from tests.frameworks import environment

pytestmark = pytest.mark.slow


def run(name: str, folder: Path, *options: str) -> str:
    page = environment.ROOT / f"docs/tutorials/{name}.md"
    return environment.run("tests.frameworks.run_page", str(page), str(folder), *options, timeout=1800)


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


def test_the_tutorial_on_mmdetection_runs(tmp_path: Path) -> None:
    printed = run("mmdetection", tmp_path, "kernels")
    assert printed.count("became standard ones: 13 MMCVModulatedDeformConv2d") == 2, printed
    assert "batch norms folded" in printed and "passed" in printed and "folds proved" in printed
    for name in ("detector.onnx", "folded.onnx"):
        model = onnx.load(tmp_path / name)
        assert {node.domain for node in model.graph.node} == {""}
        assert "BatchNormalization" not in {node.op_type for node in model.graph.node}


def test_definitions_of_operators_are_those_of_the_kernels() -> None:
    printed = environment.run("tests.frameworks.mmcv_operators_step", timeout=1800)
    deformable, roi_align, others = printed.split()[1::2]
    assert float(deformable) < 4e-6 and float(roi_align) < 4e-6 and others == "0", printed
