"""Messages about mistakes that are easily made: each says what was given and what to write."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import bnexport
from bnexport.cli import main
from bnexport.errors import UnsupportedModelError
from tests.support.onnx_text import batch_norm, model

NET = """g (float[N,3,H,W] image) => (float[N,4,A,B] y) {
    z = Conv (image, w)
    y = BatchNormalization (z, p_s, p_b, p_m, p_v) }"""
SHARED = """g (float[N,3,H,W] x, float[N,3,H,W] u) => (float[N,4,A,B] y, float[N,4,C,D] v) {
    a = Conv (x, w)
    y = BatchNormalization (a, p_s, p_b, p_m, p_v)
    b = Conv (u, w)
    v = BatchNormalization (b, q_s, q_b, q_m, q_v) }"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    onnx.save(model(NET, {"w": (4, 3, 1, 1), **batch_norm("p", 4)}), tmp_path / "m.onnx")
    np.save(tmp_path / "rows.npy", np.zeros((4, 3, 2, 2), np.float32))
    return tmp_path


def call(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    return code, capfd.readouterr().err


@pytest.mark.parametrize(
    ("factory", "line"),
    [
        ("segnet.py:build", "got the file 'segnet.py', expected a module: write segnet:build"),
        ("../seg/segnet.py:build", "write segnet:build, and run it in the folder '../seg' or with that on PYTHONPATH"),
        ("segnet:build?classes=7", "arguments behind ? are for models of timm, torchvision, mmengine"),
    ],
)
def test_a_factory(tmp_path, factory, line, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "segnet.py").write_text("def build(): ...\n")
    code, err = call(capfd, "export", factory, "o.onnx")
    assert code == 2 and line in err


def test_a_link_to_nothing_is_a_file_that_exists(net, capfd):
    os.symlink(net / "absent", net / "o.onnx")
    code, err = call(capfd, "fold", net / "m.onnx", net / "o.onnx")
    assert code == 2 and "OUT: " in err and "exists; write to another file, or replace it with --overwrite" in err


@pytest.mark.parametrize("length", [240, 300])
def test_a_name_that_is_too_long(net, length, capfd):
    name = "a" * length + ".onnx"
    code, err = call(capfd, "fold", net / "m.onnx", net / name)
    assert code == 2 and f"OUT: got a file name of {length + 5} bytes, expected at most 220" in err
    assert call(capfd, "fold", net / name, net / "o.onnx")[0] == 2


def test_rows_of_another_input_are_told_before_anything_else(net, capfd):
    code, err = call(capfd, "recalibrate", net / "m.onnx", net / "o.onnx", "-i", f"x:{net / 'rows.npy'}")
    assert code == 2
    assert err.startswith("error: --input: got rows of x; ") and "takes image" in err


def test_a_file_without_statistics_stays_the_same(net, capfd):
    call(capfd, "fold", net / "m.onnx", net / "f.onnx")
    code, err = call(capfd, "recalibrate", net / "f.onnx", net / "o.onnx", "-i", f"image:{net / 'rows.npy'}")
    assert code == 0 and err.splitlines()[-1] == f"{net / 'o.onnx'} is the same model"


def test_parameters_that_grow_are_told(tmp_path, capfd):
    onnx.save(model(SHARED, {"w": (4, 3, 9, 9), **batch_norm("p", 4), **batch_norm("q", 4)}), tmp_path / "m.onnx")
    code, err = call(capfd, "fold", tmp_path / "m.onnx", tmp_path / "o.onnx")
    assert code == 0 and "note: the parameters grew from 4,016 to 7,808 bytes" in err


def test_explain_says_what_the_table_says(tmp_path, capfd):
    text = "g (float[N,4,H,W] x) => (float[N,4,H,W] y) { y = mmcv.MMCVSyncBatchNorm <training_mode=0> (x, p_m, p_v, p_s, p_b) }"
    made = model(text, batch_norm("p", 4))
    made.graph.node[0].name = "pre"
    onnx.save(made, tmp_path / "m.onnx")
    code, err = call(capfd, "fold", tmp_path / "m.onnx", "--explain", "pre")
    assert code == 0 and "pre: kept, as BatchNormalization" in err


def test_a_training_node_names_the_option(tmp_path, capfd):
    text = "g (float[N,4,H,W] x) => (float[N,4,H,W] y) { y = BatchNormalization <training_mode=1> (x, p_s, p_b, p_m, p_v) }"
    onnx.save(model(text, batch_norm("p", 4)), tmp_path / "m.onnx")
    report = bnexport.fold(tmp_path / "m.onnx", verify=False).report
    assert "--training-to-inference" in report.sites[0].reason


def test_ort_format_is_named(net, capfd):
    (net / "m.ort").write_bytes(b"\x18\0\0\0ORTM" + b"\0" * 64)
    code, err = call(capfd, "inspect", net / "m.ort")
    assert code == 3 and "is in ORT format, which is not read; expected the ONNX file" in err


def test_a_library_that_is_registered_twice(net):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(bnexport.get_library_path())
    with pytest.raises(UnsupportedModelError, match="sess_options have the custom-op library twice; leave out"):
        bnexport.InferenceSession(net / "m.onnx", options)
