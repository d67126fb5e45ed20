"""Sizes that a file leaves open in its own way: -1, as Paddle writes it, and names without a letter."""

import json

import onnx
import pytest

from bnexport.cli import main
from bnexport.folding import fold, inspect
from tests.support.onnx_text import batch_norm, model

NET = """g (float[N,3,H,W] x) => (float[N,4,A,B] y) {
    z = Conv (x, w)
    y = BatchNormalization (z, p_s, p_b, p_m, p_v) }"""


def set_free(proto, field, value):
    for each in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in each.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.Clear()
                setattr(dim, field, value)


@pytest.fixture(params=[("dim_value", -1), ("dim_param", "")], ids=["minus-one", "empty-name"])
def path(request, tmp_path):
    proto = model(NET, {"w": (4, 3, 1, 1), **batch_norm("p", 4)})
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("z", 1, ["N", 4, "A", "B"]))
    set_free(proto, *request.param)
    onnx.save(proto, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_inspect(path, capfd):
    report = inspect(path)
    assert report.inputs[0].shape == (None, 3, None, None)
    assert report.batch_norms[0].input_shape == (None, 4, None, None)
    assert main(["inspect", str(path), "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out)["outputs"][0]["shape"] == [None, 4, None, None]


@pytest.mark.parametrize("command", ["fold", "verify", "run"])
def test_inputs_of_any_size(path, tmp_path, command):
    files = {"fold": [path, tmp_path / "f.onnx"], "verify": [path, path], "run": [path]}[command]
    assert main([command, *map(str, files), "--input", "x:1,3,5,7"]) == 0


def test_the_hint(path, capfd):
    assert main(["run", str(path), "-i", "x:1,4,8,8"]) == 2
    error = capfd.readouterr().err
    assert "--input x: got shape (1, 4, 8, 8), expected x: float32 (?, 3, ?, ?)" in error


def test_inputs_are_made_up(path):
    assert fold(path).report.verification
