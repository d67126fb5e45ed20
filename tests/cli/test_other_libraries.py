"""--library: custom operators of another project in every command that runs a model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from bnexport.cli import main
from bnexport.native import library
from tests.support.onnx_text import model

NET = """g (float[N,3,H,W] x) => (float[N,4,A,B] y) { r = them.TheirOwnBatchNorm <training_mode = 0> (x, q_m:3, q_v:3, q_s:3, q_b:3)
    c = Conv (r, w:4.3.1.1) y = Norm (c, p:4) }"""
OURS, THEIRS = "MMCVSyncBatchNorm", "TheirOwnBatchNorm"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an operator that nobody knows, and a library that has it: ours with other names."""
    folder = tmp_path_factory.mktemp("other")
    onnx.save(model(NET, header='<ir_version: 8, opset_import: ["": 17, "them": 1]>'), folder / "m.onnx")
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


def test_a_library_that_is_not_there(files: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    assert "--library: absent.so: no such file" in call("run", files / "m.onnx", "--library", "absent.so", code=2)[2]
    assert "cannot load" in call("run", files / "m.onnx", "--library", files / "x.npy", code=4)[2]
