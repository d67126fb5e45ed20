"""Sizes that a file leaves open in its own way: -1, as Paddle writes it, and names without a letter."""

import json

import onnx
import pytest

from bnexport.folding import fold, inspect
from tests.cli.conftest import NET
from tests.support.onnx_text import model


@pytest.fixture(params=[("dim_value", -1), ("dim_param", "")], ids=["minus-one", "empty-name"])
def path(request, tmp_path):
    proto, (field, value) = model(NET), request.param
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("z", 1, ["N", 4, "A", "B"]))
    for each in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in (dim for dim in each.type.tensor_type.shape.dim if dim.dim_param):
            dim.Clear()
            setattr(dim, field, value)
    onnx.save(proto, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_inspect(path, call):
    report = inspect(path)
    assert report.inputs[0].shape == (None, 3, None, None)
    assert report.batch_norms[0].input_shape == (None, 4, None, None)
    assert json.loads(call("inspect", path, "--json", "-", code=0)[1])["outputs"][0]["shape"] == [None, 4, None, None]


def test_inputs_of_any_size(path, tmp_path, call):
    for command in (["fold", path, tmp_path / "f.onnx"], ["verify", path, path], ["run", path]):
        call(*command, "--input", "x:1,3,5,7", code=0)
    error = call("run", path, "-i", "x:1,4,8,8", code=2)[2]
    assert "--input x: got shape (1, 4, 8, 8), expected x: float32 (?, 3, ?, ?)" in error
    assert fold(path).report.verification  # on inputs that are made up
