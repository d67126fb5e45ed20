"""Running a model once: ONNX Runtime gets what was checked, wherever the weights lie."""

import os
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import bnexport
from bnexport.errors import UnsupportedModelError, UsageError
from bnexport.model_io import as_model, save
from bnexport.runtime import engine
from tests.support.onnx_text import model

WEIGHT = np.random.default_rng(0).standard_normal((256, 128)).astype(np.float32)
INPUT = np.random.default_rng(1).standard_normal((3, 256)).astype(np.float32)


@pytest.mark.parametrize("external_data", [False, True])
def test_weights_inside_and_outside(tmp_path: Path, external_data: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    proto = model("g (float[N,256] x) => (float[N,128] y) { y = MatMul (x, w) }", values={"w": WEIGHT})
    save(as_model(proto), tmp_path / "m.onnx", external_data=external_data)
    monkeypatch.chdir(os.sep)
    done = engine.run(tmp_path / "m.onnx", {"x": INPUT})
    np.testing.assert_allclose(done.outputs["y"], INPUT @ WEIGHT, rtol=0, atol=256 * 2.0**-24 * 64)
    assert not done.library


def test_weights_of_every_type(tmp_path: Path) -> None:
    """Types that NumPy lacks travel inside the message."""
    for name, dtype in (("float16", np.float16), ("double", np.float64), ("int32", np.int32), ("uint8", np.uint8)):
        values = {"w": (np.arange(40_000) % 100).astype(dtype)}
        proto = model(f"g ({name}[40000] x) => ({name}[40000] y) {{ y = Concat <axis = 0> (x, w) }}", values=values)
        proto.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 80_000
        save(as_model(proto), tmp_path / "m.onnx")
        done = engine.run(tmp_path / "m.onnx", {"x": values["w"]})
        np.testing.assert_array_equal(done.outputs["y"], np.concatenate([values["w"]] * 2))


@pytest.mark.parametrize(("names", "message"), [("", "missing x"), ("xz", "unknown z; the model takes x")])
def test_other_inputs_than_the_model_s(names: str, message: str, tmp_path: Path) -> None:
    save(as_model(model("g (float[3] x) => (float[3] y) { y = Relu (x) }")), tmp_path / "m.onnx")
    with pytest.raises(UsageError, match=message):
        engine.run(tmp_path / "m.onnx", {name: np.zeros(3, np.float32) for name in names})


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ('ir_version: 99, opset_import: ["": 18]', "IR version 99"),
        ('ir_version: 9, opset_import: ["": 999]', "opset 999"),
    ],
)
def test_a_file_newer_than_the_runtime_is_one_line(header: str, kind: str, tmp_path: Path) -> None:
    """ONNX Runtime's own message is some 500 characters of C++; with custom operators it checks no opset."""
    proto = model("g (float[N] x) => (float[N] y) { y = Neg (x) }", header=f"<{header}>")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    for opened in (engine.load, bnexport.InferenceSession)[: 2 if "IR" in kind else 1]:
        with pytest.raises(UnsupportedModelError) as caught:
            opened(tmp_path / "m.onnx")
        text = str(caught.value)
        assert f"m.onnx: the file has {kind}, and onnxruntime {onnxruntime.__version__}" in text
        assert "install a newer onnxruntime" in text
        assert len(text.replace(str(tmp_path), "")) < 200 and "\n" not in text
