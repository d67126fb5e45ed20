"""LIBRARY:NAME in place of MODULE:FACTORY, and --library: models and operators of other projects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from bnexport.cli import main
from bnexport.cli.input_options import parse_name
from bnexport.errors import MissingDependencyError, MissingFileError, UsageError
from bnexport.native import library
from tests.support import warm
from tests.support.onnx_text import model

# As much of timm as a name needs, offline or not.
TIMM = """
import os, torch
def is_model(name): return name == "tiny"
def list_models(): return ["tiny"]
def create_model(name, pretrained, classes=3):
    assert pretrained is False and os.environ["HF_HUB_OFFLINE"] == "1"
    model = torch.nn.Sequential(torch.nn.Conv2d(3, classes, 3), torch.nn.BatchNorm2d(classes))
    model.default_cfg = {"input_size": (3, 12, 16)}
    return model
"""


@pytest.fixture
def timm(tmp_path, monkeypatch):
    """A folder with a package timm and checkpoints of two networks."""
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text(TIMM)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5))
    torch.save({"state_dict": net.state_dict()}, tmp_path / "right.pth")
    torch.save({"state_dict": net[:1].state_dict()}, tmp_path / "other.pth")
    return tmp_path


def test_parts_of_a_name(monkeypatch):
    monkeypatch.setattr("bnexport.cli.input_options._is_installed", lambda package: True)
    name = parse_name("timm:Unet?encoder_name=resnet34&classes=3&decoder_channels=(64,32)&activation=None")
    assert name is not None and (name.library, name.target) == ("timm", "Unet")
    expected = {"encoder_name": "resnet34", "classes": 3, "decoder_channels": (64, 32), "activation": None}
    assert name.options == expected
    assert parse_name("models.resnet:digits_resnet") is None
    assert parse_name("timm") is None
    for text, words in (("timm:", "got no model behind timm:"), ("timm:a?b", "got option 'b'"), ("timm:a?=1", "'=1'")):
        with pytest.raises(UsageError, match=words):
            parse_name(text)
    with pytest.raises(MissingFileError, match=r"no such file 'gone\.py'; .* this machine only"):
        parse_name("mmengine:gone.py")


@pytest.mark.parametrize("library", ["timm", "torchvision", "mmengine"])
def test_a_library_that_is_not_installed(library, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MissingDependencyError, match=f"needs {library}, which is not installed; pip install"):
        parse_name(f"{library}:{tmp_path / 'config.json'}")


def test_a_missing_library_is_one_line(monkeypatch, tmp_path, call):
    monkeypatch.setitem(sys.modules, "timm", None)
    _, out, err = call("export", "timm:resnet18", tmp_path / "o.onnx", code=4)
    assert (out, err) == ("", "error: timm:resnet18: needs timm, which is not installed; pip install timm\n")


def export(folder, *arguments, code):
    done = warm.run("-m", "bnexport", "export", *arguments, cwd=folder)
    assert done.returncode == code, done.stderr
    return done.stderr


def test_a_model_by_name_with_its_checkpoint(timm):
    command = ["timm:tiny?classes=5", "o.onnx", "--checkpoint"]
    said = export(timm, *command, "right.pth", code=0)
    assert "note: input input:1,3,12,16, as timm states; --input gives another" in said
    assert "1 of 1 batch norm folded" in said and "random" not in said
    assert os.path.exists(timm / "o.onnx")
    *_, last = export(timm, *command, "other.pth", "--overwrite", code=2).splitlines()
    wrong = "error: other.pth: its names under 'state_dict' do not fit the module: 4 missing: 1.weight"
    assert last.startswith(wrong)
    said = export(timm, "timm:tiny", "o.onnx", "--overwrite", code=0)
    assert "note: the weights of timm:tiny are random; --checkpoint loads trained ones, of which" in said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timm:tyny", "timm:tyny: timm has no model 'tyny'; did you mean 'tiny'?"),
        ("timm:hf-hub:a/b", "timm:hf-hub:a/b: timm has no model 'hf-hub:a/b'"),
        ("timm:tiny?pretrained=True", "pretrained: got a true value, expected --checkpoint with a file"),
        ("timm:tiny?frob=1", "building it failed: TypeError: create_model() got an unexpected keyword argument 'frob'"),
    ],
)
def test_wrong_names(name, words, timm):
    said = export(timm, name, "o.onnx", code=2)
    assert said.startswith("error: ") and said.count("\n") == 1 and words in said
    assert not os.path.exists(timm / "o.onnx")


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
