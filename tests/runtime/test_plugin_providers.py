"""Devices that are added to the session's options, as those of plugin providers are."""

import warnings

import numpy as np
import onnxruntime
import pytest

import bnexport
from tests.support.onnx_text import model

pytestmark = pytest.mark.skipif(not hasattr(onnxruntime, "get_ep_devices"), reason="needs ONNX Runtime 1.22")


MODEL = model("g (float[2] x) => (float[2] y) { y = Relu (x) }").SerializeToString()


@pytest.mark.parametrize("from_file", [False, True], ids=["bytes", "file"])
def test_devices_in_the_options_are_used(tmp_path, from_file) -> None:
    options = onnxruntime.SessionOptions()
    (cpu,) = [device for device in onnxruntime.get_ep_devices() if device.ep_name == "CPUExecutionProvider"]
    options.add_provider_for_devices([cpu], {})
    (tmp_path / "model.onnx").write_bytes(MODEL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # ONNX Runtime says so when it drops the devices for a list of names
        session = bnexport.InferenceSession(tmp_path / "model.onnx" if from_file else MODEL, sess_options=options)
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert session.run(None, {"x": np.array([-1, 2], np.float32)})[0].tolist() == [0, 2]
