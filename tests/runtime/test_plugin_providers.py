"""Devices that are added to the session's options, as those of plugin providers are."""

from __future__ import annotations

import warnings

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import bnexport

pytestmark = pytest.mark.skipif(not hasattr(onnxruntime, "get_ep_devices"), reason="needs ONNX Runtime 1.22")


def model() -> bytes:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()


@pytest.mark.parametrize("from_file", [False, True], ids=["bytes", "file"])
def test_devices_in_the_options_are_used(tmp_path, from_file) -> None:
    options = onnxruntime.SessionOptions()
    (cpu,) = [device for device in onnxruntime.get_ep_devices() if device.ep_name == "CPUExecutionProvider"]
    options.add_provider_for_devices([cpu], {})
    (tmp_path / "model.onnx").write_bytes(model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # ONNX Runtime says so when it drops the devices for a list of names
        session = bnexport.InferenceSession(tmp_path / "model.onnx" if from_file else model(), sess_options=options)
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert session.run(None, {"x": np.array([-1, 2], np.float32)})[0].tolist() == [0, 2]
