"""Arguments of export that name what the file is: opset, keywords, single dimensions, external data, format."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import bnexport
from bnexport.errors import MissingFileError, UnsupportedModelError, UsageError
from tests.exporting import size_corpus
from tests.exporting.files import declared, output
from tests.support.modules import compose


def scaled(self: Any, x: torch.Tensor, bias: Any = None, *, scale: torch.Tensor) -> torch.Tensor:
    y = self.norm(self.conv(x)) * scale
    return y if bias is None else y + bias


X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
SCALE = torch.randn(2, 1, 1, 1, generator=torch.Generator().manual_seed(1))


def test_the_opset_is_chosen_and_the_ir_version_the_lowest(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 1).eval()
    for version, ir_version, options in ((18, 8, {}), (20, 9, {"opset_version": 20})):
        bnexport.export(model, X, tmp_path / f"{version}.onnx", verify=False, **options)  # type: ignore[arg-type]
        made = onnx.load(tmp_path / f"{version}.onnx")
        assert ([each.version for each in made.opset_import], made.ir_version) == ([version], ir_version)


def test_inputs_by_keyword(tmp_path: Path) -> None:
    model = compose(scaled, conv=nn.Conv2d(3, 4, 1), norm=bnexport.SyncBatchNorm(4)).eval()
    kind = type(model)
    result = bnexport.export(model, X, tmp_path / "m.onnx", kwargs={"scale": SCALE})
    assert (result.inputs, type(model)) == (("x", "scale"), kind)
    assert result.verification
    got = output(tmp_path / "m.onnx", X, SCALE)
    np.testing.assert_allclose(got, model(X, scale=SCALE).detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dynamic", "shape"),
    [({"input": {0: "n", 3: "w"}}, ["n", 3, 4, "w"]), ({"input": [2]}, [2, 3, "height", 4]), ({}, [2, 3, 4, 4])],
)
def test_dimensions_one_by_one(dynamic: Any, shape: list[Any], tmp_path: Path) -> None:
    bnexport.export(nn.Conv2d(3, 4, 1).eval(), X, tmp_path / "m.onnx", dynamic=dynamic, verify=False)
    assert declared(tmp_path / "m.onnx") == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exporter": "jit"}, "exporter: got 'jit'"),
        ({"args": (1,)}, "args: got no tensor"),
        ({"model": torch.relu}, "model: got builtin_function_or_method"),
        ({"path": X, "args": nn.ReLU(), "model": "m.onnx"}, r"path: got Tensor.*export\(model, args, path\)"),
        ({"path": io.BytesIO()}, "path: got BytesIO, expected the name .*; export to a file and read its bytes"),
        ({"input_names": ["a", "b"]}, "input_names: got 2 names, expected 1"),
        ({"output_names": ["a", "b"]}, "output_names: got 2 names, expected 1"),
        ({"format": "pt2", "path": "m.pt2", "input_names": ["a"]}, "input_names, output_names: given with format"),
        ({"dynamic": {"y": [0]}}, "dynamic: got y, expected inputs among"),
        ({"dynamic": {"input": [4]}}, "expected one from 0 to 3"),
        ({"opset_version": 12}, "opset_version: got 12, expected 18 to 23"),
        ({"kwargs": {"shift": SCALE}}, "kwargs: got shift, expected among input"),
        ({"path": "m"}, "names no format"),
        ({"path": "m.pt", "format": "onnx"}, "names 'torchscript'"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {"model": nn.Conv2d(3, 4, 1).eval(), "args": X, "path": "m.onnx"} | change
    with pytest.raises(UsageError, match=message):
        bnexport.export(**arguments)
    assert not list(tmp_path.iterdir())


def seven_tenths(y: torch.Tensor) -> torch.Tensor:
    return nn.functional.interpolate(y, (int(y.shape[2] * 0.7), y.shape[3]))


FLATTENED = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))


@pytest.mark.parametrize(
    ("function", "exporter", "name", "words"),
    [
        (seven_tenths, "torchscript", "m.onnx", "differs from torch at"),
        (FLATTENED, "torchscript", "m.onnx", "the model ran at no other size"),
        (FLATTENED, "dynamo", "m.pt2", "the model ran at no other size"),
    ],
    ids=["wrong elsewhere", "the model's", "pt2"],
)
def test_a_dimension_asked_for_by_name_is_dynamic_or_an_error(function, exporter, name, words, tmp_path: Path) -> None:
    model, dynamic = size_corpus.Net(function).eval(), {"x": {0: "n", 2: "h"}}
    with pytest.raises(UnsupportedModelError, match=rf"dynamic: input 'x': dimension 2 \(h\) stays 4.*{words}"):
        bnexport.export(model, X, tmp_path / name, exporter=exporter, dynamic=dynamic)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    result = bnexport.export(model, X, tmp_path / name, exporter=exporter, dynamic={"x": [0]})
    assert result.verification.passed and not any("dimension" in note for note in result.notes)


def test_external_data(tmp_path: Path) -> None:
    bnexport.export(nn.Conv2d(3, 4, 1).eval(), X, tmp_path / "m.onnx", external_data=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]


def test_the_suffix_names_the_format(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 1).eval()
    assert bnexport.export(model, X, tmp_path / "first.pt", verify=False).format == "torchscript"


def test_a_session_is_onnxruntimes(tmp_path: Path) -> None:
    bnexport.export(nn.Conv2d(3, 4, 1).eval(), X, tmp_path / "m.onnx", verify=False)
    options = onnxruntime.SessionOptions()
    session = bnexport.InferenceSession(tmp_path / "m.onnx", options, ["CPUExecutionProvider"])
    assert isinstance(session, onnxruntime.InferenceSession)
    with pytest.raises(TypeError, match="sess_options"):
        bnexport.InferenceSession(tmp_path / "m.onnx", session_options=options)
    with pytest.raises(FileNotFoundError) as caught:
        bnexport.InferenceSession(tmp_path / "gone.onnx")
    assert isinstance(caught.value, MissingFileError)
