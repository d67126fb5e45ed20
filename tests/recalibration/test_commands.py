"""Statistics re-estimated on the command line, and the page of what changed."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import bnexport
from bnexport.cli import main
from tests.recalibration.test_files import data, net, stored


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(net(), "a.onnx")
    np.save("x.npy", data(20))
    return tmp_path


def shift(layer: dict[str, Any]) -> list[float]:
    """The changes of the means, in old standard deviations."""
    stored = zip(layer["old_mean"], layer["new_mean"], layer["old_var"], strict=True)
    return [(new - old) / (var + layer["eps"]) ** 0.5 for old, new, var in stored]


def test_recalibrate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "recalibrate",
        "a.onnx",
        "b.onnx",
        "-i",
        "x:x.npy",
        "--batch",
        "7",
        "--html",
        "r.html",
        "--json",
        "r.json",
    ]
    assert main(arguments) == 0
    said = capsys.readouterr().err
    assert "20 rows, 3 passes" in said and "b.onnx written" in said
    expected = bnexport.recalibrate_file(net(), None, [{"x": data(20)}])
    for name, array in stored(expected.model).items():
        np.testing.assert_allclose(stored(onnx.load("b.onnx"))[name], array, rtol=1e-6, atol=1e-6)
    report = json.loads(Path("r.json").read_text())
    assert (report["rows"], report["batches"], len(report["layers"])) == (20, 3, 3)
    page = Path("r.html").read_text()
    assert "3 batch norms re-estimated on 20 rows, 3 passes" in page
    for layer in report["layers"]:
        assert html.escape(layer["name"]) in page and f"{max(map(abs, shift(layer))):.3g}" in page


def test_fold_after_recalibration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recalibrate", "a.onnx", "b.onnx", "-i", "x:x.npy"]) == 0
    assert "re-estimated on 20 rows" in capsys.readouterr().err
    assert main(["fold", "b.onnx", "c.onnx", "--method", "local"]) == 0
    better = bnexport.recalibrate_file("a.onnx", None, [{"x": data(20)}])
    assert bnexport.verify(better.model, "c.onnx").passed
    assert not bnexport.verify("a.onnx", "c.onnx").passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-i", "x"], "--input: got 'x', expected NAME:FILE.npy|FOLDER"),
        (["-i", "x:x.npy", "-i", "x:x.npy"], "got 'x' twice"),
        (["-i", "x:nothing.npy"], "no such file"),
        (["-i", "z:x.npy"], "got rows of z; a.onnx takes x"),
        (["-i", "x:x.npy", "--layers", "all"], "--layers: got 'all'"),
        ([], "Missing option '--input'"),
    ],
)
def test_bad_arguments(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["recalibrate", "a.onnx", "b.onnx", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("b.onnx").exists()


def test_a_model_without_batch_norms(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(net("y = Relu(x)"), "plain.onnx")
    assert main(["recalibrate", "plain.onnx", "b.onnx", "-i", "x:x.npy"]) == 0
    assert "no batch norms with running statistics: nothing was changed" in capsys.readouterr().err


def test_names_of_a_model_are_escaped(folder: Path) -> None:
    proto = net()
    proto.graph.node[1].name = "<script>alert(1)</script>\u202e"
    onnx.save(proto, "a.onnx")
    assert main(["recalibrate", "a.onnx", "b.onnx", "-i", "x:x.npy", "--html", "r.html"]) == 0
    page = Path("r.html").read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "\u202e" not in page
    assert not re.search(r"(src|href)=", page)
