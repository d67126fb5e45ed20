"""The ways of a model, a module and what carries them, through the files and packages: in one direction, with few returns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bnexport
from tests.folding.module.nets import trained

_PACKAGE = f"{Path(bnexport.__file__).parent}/"


def walk(function: Callable[[], object], carries: Callable[[object], bool]) -> list[str]:
    """Return the files of the package whose functions are entered with an argument that `carries`, in their order and without
    the same one twice in a row. `function` runs once before, so that everything is imported.
    """
    way: list[str] = []

    def enter(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            file = code.co_filename.removeprefix(_PACKAGE)
            if way[-1:] != [file] and any(
                map(carries, map(frame.f_locals.get, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]))
            ):
                way.append(file)

    function()
    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        function()
    finally:
        sys.setprofile(before)
    return way


def returns(way: list[str]) -> int:
    """How often it comes back to a file that it has left."""
    return len(way) - len(set(way))


def packages(way: list[str]) -> list[str]:
    """Return the way from package to package."""
    found: list[str] = []
    for file in way:
        package = file.rpartition("/")[0]
        if found[-1:] != [package]:
            found.append(package)
    return found


# By their names: a class may move.
CARRIERS = {
    *("Model", "ModelProto", "Pair", "Terms", "Verification"),
    *("Plan", "Context", "Folding", "FoldReport", "Site", "_Transformed"),
}


def carries(value: object) -> bool:
    return type(value).__name__ in CARRIERS


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walks")
    norm = bnexport.SyncBatchNorm
    net = trained(nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3), norm(4))).eval()
    bnexport.export(net, torch.ones(2, 3, 9, 9), folder / "a.onnx", fold=False)
    bnexport.fold(folder / "a.onnx", folder / "b.onnx")
    return folder


def test_a_verification(files: Path) -> None:
    way = packages(walk(lambda: bnexport.verify(files / "a.onnx", files / "b.onnx"), carries))
    assert len(set(way)) >= 3 and returns(way) <= 40, way


def test_a_fold(files: Path) -> None:
    way = packages(walk(lambda: bnexport.fold(files / "a.onnx", files / "b.onnx", overwrite=True), carries))
    assert len(set(way)) >= 5 and returns(way) <= 90, way


@pytest.mark.parametrize("file", ["m.onnx", "m.pt", "m.pt2"])
def test_an_export(file: str, tmp_path: Path) -> None:
    """Of the module, and of the job that it is put down in."""
    net = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), nn.ReLU())).eval()
    x = torch.ones(2, 3, 8, 8)

    def export() -> object:
        return bnexport.export(net, x, tmp_path / file, exporter="torchscript", overwrite=True)

    way = walk(export, lambda value: value is net or type(value).__name__ == "ExportJob")
    assert len(set(way)) >= 5 and returns(way) <= 15, way


def test_a_recalibration(files: Path) -> None:
    source = str(files / "a.onnx")
    x = np.random.default_rng(0).standard_normal((10, 3, 9, 9)).astype(np.float32)

    def held(value: object) -> bool:
        inner = getattr(value, "__dict__", {}).values()
        return any(carries(each) or (isinstance(each, str) and each == source) for each in (value, *inner))

    def recalibrate() -> object:
        return bnexport.recalibrate_file(source, None, [x[:5], x[5:]])

    way = walk(recalibrate, held)
    assert len(set(way)) >= 5 and returns(way) <= 25, way
