"""--library: custom operators of another project in every command that runs a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import pytest

from bnexport.cli import main
from bnexport.native import library
from tests.support.onnx_text import batch_norm, model

NET = """g (float[N,3,H,W] x) => (float[N,4,A,B] y) {
    r = BatchNormalization (x, q_s, q_b, q_m, q_v)
    c = Conv (r, w)
    y = BatchNormalization (c, p_s, p_b, p_m, p_v) }"""
OURS, THEIRS = "MMCVSyncBatchNorm", "TheirOwnBatchNorm"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an operator that nobody knows, and a library that has it: ours with other names."""
    folder = tmp_path_factory.mktemp("other")
    made = model(NET, {"w": (4, 3, 1, 1), **batch_norm("p", 4), **batch_norm("q", 3)})
    inputs = ["x", "q_m", "q_v", "q_s", "q_b"]
    made.graph.node[0].CopyFrom(onnx.helper.make_node(THEIRS, inputs, ["r"], domain="them", training_mode=0))
    made.opset_import.append(onnx.helper.make_opsetid("them", 1))
    onnx.save(made, folder / "m.onnx")
    data = Path(library.get_library_path()).read_bytes()
    assert data.count(b"\0mmcv\0") == 1
    data = data.replace(b"\0mmcv\0", b"\0them\0").replace(OURS.encode(), THEIRS.encode())
    (folder / "theirs.so").write_bytes(data)
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((4, 3, 2, 2)).astype(np.float32))
    assert main(["fold", str(folder / "m.onnx"), str(folder / "f.onnx"), "--method", "local"]) == 0
    return folder


COMMANDS = {
    "run": "run m.onnx -i x:1,3,2,2",
    "recalibrate": "recalibrate m.onnx r.onnx -i x:x.npy --overwrite",
    "statistics": "statistics m.onnx -i x:x.npy",
    "verify": "verify m.onnx f.onnx -i x:1,3,2,2 --method whole",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_model_that_needs_another_library(files: Path, name: str) -> None:
    command = [sys.executable, "-m", "bnexport", *COMMANDS[name].split()]
    without = subprocess.run(command, cwd=files, capture_output=True, text=True, check=False)
    assert without.returncode in (3, 5)
    assert "--library PATH" in without.stderr, without.stderr
    done = subprocess.run([*command, "--library", "theirs.so"], cwd=files, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_library_that_is_not_there(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(files / "m.onnx"), "--library", "absent.so"]) == 2
    assert "--library: absent.so: no such file" in capfd.readouterr().err
    assert main(["run", str(files / "m.onnx"), "--library", str(files / "x.npy")]) == 4
    assert "cannot load" in capfd.readouterr().err
