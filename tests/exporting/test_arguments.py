"""Arguments of export that name what the file is: opset, keywords, single dimensions, external data, format."""

from __future__ import annotations

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


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), bnexport.SyncBatchNorm(4)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, scale: torch.Tensor) -> torch.Tensor:
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
    with pytest.raises(UsageError, match="opset_version: got 12, expected 18 to 23"):
        bnexport.export(model, X, tmp_path / "old.onnx", opset_version=12)


def test_inputs_by_keyword(tmp_path: Path) -> None:
    model = Scaled().eval()
    result = bnexport.export(model, X, tmp_path / "m.onnx", kwargs={"scale": SCALE})
    assert (result.inputs, type(model)) == (("x", "scale"), Scaled)
    assert result.verification
    got = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": X.numpy(), "scale": SCALE.numpy()})[0]
    np.testing.assert_allclose(got, model(X, scale=SCALE).detach().numpy(), rtol=1e-5, atol=1e-5)
    with pytest.raises(UsageError, match="kwargs: got shift, expected among x, bias, scale"):
        bnexport.export(model, X, tmp_path / "n.onnx", kwargs={"shift": SCALE})


@pytest.mark.parametrize(
    ("dynamic", "shape"),
    [({"input": {0: "n", 3: "w"}}, ["n", 3, 4, "w"]), ({"input": [2]}, [2, 3, "height", 4]), ({}, [2, 3, 4, 4])],
)
def test_dimensions_one_by_one(dynamic: Any, shape: list[Any], tmp_path: Path) -> None:
    bnexport.export(nn.Conv2d(3, 4, 1).eval(), X, tmp_path / "m.onnx", dynamic=dynamic, verify=False)
    sizes = onnx.load(tmp_path / "m.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [size.dim_param or size.dim_value for size in sizes] == shape


def test_dimensions_that_are_none(tmp_path: Path) -> None:
    for dynamic, message in (
        ({"y": [0]}, "dynamic: got y, expected inputs among"),
        ({"input": [4]}, "expected one from 0 to 3"),
    ):
        with pytest.raises(UsageError, match=message):
            bnexport.export(nn.Conv2d(3, 4, 1).eval(), X, tmp_path / "m.onnx", dynamic=dynamic, verify=False)


class Half(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(input, (int(input.shape[2] * 0.7), input.shape[3]))


@pytest.mark.parametrize(
    ("model", "exporter", "name", "operator"),
    [
        (Half(), "torchscript", "m.onnx", "differs from torch at"),
        (nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), "torchscript", "m.onnx", "the model ran at no other size"),
        (nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), "dynamo", "m.pt2", "the model ran at no other size"),
    ],
    ids=["wrong elsewhere", "the model's", "pt2"],
)
def test_a_dimension_asked_for_by_name_is_dynamic_or_an_error(model, exporter, name, operator, tmp_path: Path) -> None:
    options: dict[str, Any] = {"exporter": exporter, "dynamic": {"input": {0: "n", 2: "h"}}}
    with pytest.raises(UnsupportedModelError, match=rf"dynamic: input 'input': dimension 2 \(h\) stays 4.*{operator}"):
        bnexport.export(model.eval(), X, tmp_path / name, **options)
    assert not list(tmp_path.iterdir())
    result = bnexport.export(model.eval(), X, tmp_path / name, exporter=exporter, dynamic={"input": [0]})
    assert result.verification.passed and not any("dimension" in note for note in result.notes)


def test_external_data(tmp_path: Path) -> None:
    bnexport.export(nn.Conv2d(3, 4, 1).eval(), X, tmp_path / "m.onnx", external_data=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]


def test_the_suffix_names_the_format(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 1).eval()
    assert bnexport.export(model, X, tmp_path / "first.pt", verify=False).format == "torchscript"
    for path, options, message in (("m", {}, "names no format"), ("m.pt", {"format": "onnx"}, "names 'torchscript'")):
        with pytest.raises(UsageError, match=message):
            bnexport.export(model, X, tmp_path / path, **options)  # type: ignore[arg-type]


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


def test_a_fold_gives_the_type_that_came_in(tmp_path: Path) -> None:
    bnexport.export(nn.Conv2d(3, 4, 1).eval(), X, tmp_path / "m.onnx", verify=False)
    proto = onnx.load(tmp_path / "m.onnx")
    assert isinstance(bnexport.fold(proto, verify=False).model, onnx.ModelProto)
