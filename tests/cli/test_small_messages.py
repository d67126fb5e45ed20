"""Messages about mistakes that are easily made: each says what was given and what to write."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import bnexport
from bnexport.errors import UnsupportedModelError
from tests.support.onnx_text import model

NET = "g (float[N,3,H,W] image) => (float[N,4,A,B] y) { z = Conv (image, w:4.3.1.1) y = Norm (z, p:4) }"
SHARED = """g (float[N,3,H,W] x, float[N,3,H,W] u) => (float[N,4,A,B] y, float[N,4,C,D] v) { a = Conv (x, w:4.3.9.9) y = Norm (a, p:4)
    b = Conv (u, w) v = Norm (b, q:4) }"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    onnx.save(model(NET), tmp_path / "m.onnx")
    np.save(tmp_path / "rows.npy", np.zeros((4, 3, 2, 2), np.float32))
    return tmp_path


def test_a_link_to_nothing_is_a_file_that_exists(net, call):
    os.symlink(net / "absent", net / "o.onnx")
    code, _, err = call("fold", net / "m.onnx", net / "o.onnx")
    assert code == 2 and "OUT: " in err and "exists; write to another file, or replace it with --overwrite" in err


def test_a_file_without_statistics_stays_the_same(net, call):
    call("fold", net / "m.onnx", net / "f.onnx")
    code, _, err = call("recalibrate", net / "f.onnx", net / "o.onnx", "-i", f"image:{net / 'rows.npy'}")
    assert code == 0 and err.splitlines()[-1] == f"{net / 'o.onnx'} is the same model"


def test_parameters_that_grow_are_told(tmp_path, call):
    onnx.save(model(SHARED), tmp_path / "m.onnx")
    code, _, err = call("fold", tmp_path / "m.onnx", tmp_path / "o.onnx")
    assert code == 0 and "note: the parameters grew from 4,016 to 7,808 bytes" in err


def test_a_fold_that_no_engine_runs_is_warned_of(tmp_path, call):
    own = NET.replace("Conv (image", "my.Op (image) z = Conv (q").replace("z = my", "q = my")
    onnx.save(model(own, header='<ir_version: 8, opset_import: ["": 17, "my": 1]>'), tmp_path / "m.onnx")
    command = ["fold", tmp_path / "m.onnx", tmp_path / "o.onnx", "--method", "whole"]
    assert "\nwarning: not verified: " in call(*command, code=0)[2]


def test_explain_says_what_the_table_says(tmp_path, call):
    onnx.save(
        model("""g (float[N,4,H,W] x) => (float[N,4,H,W] y) {
        [pre] y = mmcv.MMCVSyncBatchNorm <training_mode=0> (x, p_m:4, p_v:4, p_s:4, p_b:4) }"""),
        tmp_path / "m.onnx",
    )
    assert "pre: kept, as BatchNormalization" in call("fold", tmp_path / "m.onnx", "--explain", "pre", code=0)[2]


def test_a_training_node_names_the_option() -> None:
    made = model("g (float[N,4,H,W] x) => (float[N,4,H,W] y) { y = Norm <training_mode=1> (x, p:4) }")
    assert "--training-to-inference" in bnexport.fold(made, verify=False).report.sites[0].reason


def test_a_library_that_is_registered_twice(net):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(bnexport.get_library_path())
    with pytest.raises(UnsupportedModelError, match="sess_options have the custom-op library twice; leave out"):
        bnexport.InferenceSession(net / "m.onnx", options)


# Sizes that a file leaves open in its own way: -1, as Paddle writes it, and names without a letter.
@pytest.fixture(params=[("dim_value", -1), ("dim_param", "")], ids=["minus-one", "empty-name"])
def open_sizes(request, tmp_path):
    proto, (field, value) = model(NET.replace("image", "x")), request.param
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("z", 1, ["N", 4, "A", "B"]))
    for each in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in (dim for dim in each.type.tensor_type.shape.dim if dim.dim_param):
            dim.Clear()
            setattr(dim, field, value)
    onnx.save(proto, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_sizes_that_a_file_leaves_open(open_sizes, call):
    report = bnexport.inspect(open_sizes)
    assert report.inputs[0].shape == (None, 3, None, None)
    assert report.batch_norms[0].input_shape == (None, 4, None, None)
    (output,) = json.loads(call("inspect", open_sizes, "--json", "-", code=0)[1])["outputs"]
    assert output["shape"] == [None, 4, None, None]


def test_inputs_of_any_size(open_sizes, tmp_path, call):
    for command in (["fold", open_sizes, tmp_path / "f.onnx"], ["verify", open_sizes, open_sizes], ["run", open_sizes]):
        call(*command, "--input", "x:1,3,5,7", code=0)
    error = call("run", open_sizes, "-i", "x:1,4,8,8", code=2)[2]
    assert "--input x: got shape (1, 4, 8, 8), expected x: float32 (?, 3, ?, ?)" in error
    assert bnexport.fold(open_sizes).report.verification  # on inputs that are made up
