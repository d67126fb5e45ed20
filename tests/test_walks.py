"""The ways of a model, a module and what carries them, through the files and packages: in one direction, with few returns."""

from __future__ import annotations

import itertools
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


# By their names: a class may move.
CARRIERS = {
    *("Model", "ModelProto", "Pair", "Terms", "Verification"),
    *("Plan", "Context", "Folding", "FoldReport", "Site", "_Transformed"),
}


def carries(value: object) -> bool:
    return type(value).__name__ in CARRIERS


def holds(value: object) -> bool:
    """Whether it carries a model, or the name of the file, itself or in an attribute."""
    several = (value, *getattr(value, "__dict__", {}).values())
    return any(carries(each) or (isinstance(each, str) and each.endswith("a.onnx")) for each in several)


NET = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), nn.ReLU())).eval()


def is_net(value: object) -> bool:
    """Whether it is the module, or the job that it is put down in."""
    return value is NET or type(value).__name__ == "ExportJob"


def export(file: str) -> object:
    return bnexport.export(NET, torch.ones(2, 3, 8, 8), file, exporter="torchscript", overwrite=True)


def recalibrate() -> object:
    x = np.random.default_rng(0).standard_normal((10, 3, 9, 9)).astype(np.float32)
    return bnexport.recalibrate_file("a.onnx", None, [x[:5], x[5:]])


# What is done, who carries the model, the least files or packages on the way, and the most returns to one that was left.
WALKS: dict[str, tuple[Callable[[], object], Callable[[object], bool], int, int]] = {
    "verify": (lambda: bnexport.verify("a.onnx", "b.onnx"), carries, 3, 40),
    "fold": (lambda: bnexport.fold("a.onnx", "b.onnx", overwrite=True), carries, 5, 90),
    **{file: (lambda file=file: export(file), is_net, 5, 15) for file in ("m.onnx", "m.pt", "m.pt2")},  # type: ignore[misc]
    "recalibrate": (recalibrate, holds, 5, 25),
}


@pytest.mark.parametrize("name", [pytest.param(it, marks=pytest.mark.slow if "pt" in it else ()) for it in WALKS])
def test_the_way(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    norm = bnexport.SyncBatchNorm
    net = trained(nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3), norm(4))).eval()
    if not name.startswith("m."):
        bnexport.export(net, torch.ones(2, 3, 9, 9), "a.onnx", fold=False)
        bnexport.fold("a.onnx", "b.onnx")
    function, carrying, least, most = WALKS[name]
    way = walk(function, carrying)
    if carrying is carries:
        way = [package for package, _ in itertools.groupby(file.rpartition("/")[0] for file in way)]
    assert len(set(way)) >= least and len(way) - len(set(way)) <= most, way
