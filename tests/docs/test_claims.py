"""What the documents say of torch and MMCV, of targets and environment variables, where a few lines can show it."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from tests.docs.pages import ROOT


def test_plain_torch_folds_sync_batch_norm_in_eval_mode(tmp_path: Path) -> None:
    """README: often bnexport is not needed."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SyncBatchNorm(8), nn.ReLU()).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (torch.randn(1, 3, 8, 8),), str(tmp_path / "m.onnx"), dynamo=True, verbose=False)
    assert [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node] == ["Conv", "Relu"]


class _Untyped(torch.autograd.Function):
    """A symbolic function that passes a string without its type, as that of MMCV 2.2.0 does."""

    @staticmethod
    def symbolic(g: Any, input: Any) -> Any:
        return g.op("mmcv::MMCVSyncBatchNorm", input, momentum_f=0.1, stats_mode="default")

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        return input.clone()


class _Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Untyped.apply(x)
        return result


def test_the_symbolic_function_of_mmcv_fails_with_this_torch(tmp_path: Path) -> None:
    """docs/faq.md has the message."""
    with warnings.catch_warnings(), pytest.raises(ValueError, match="Invalid attribute specifier 'stats_mode'"):
        warnings.simplefilter("ignore")
        torch.onnx.export(_Layer(), (torch.randn(1, 3, 8, 8),), str(tmp_path / "m.onnx"), dynamo=False)


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (target, path.name)
        for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md"))
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 20
    assert {(target, page) for target, page in named if target not in targets} == set()


def test_every_variable_is_documented() -> None:
    sources = [*ROOT.glob("bnexport/**/*.py"), *ROOT.glob("custom_ops/**/*.cpp"), *ROOT.glob("custom_ops/**/*.h")]
    read = {
        name
        for path in sources
        for name in re.findall(r"(?:getenv\(|_VARIABLE = |environ[.\[(]\w*\(?)[\"'](BNEXPORT_\w+)", path.read_text())
    }
    assert {"BNEXPORT_LIBRARY", "BNEXPORT_ISA"} <= read
    table = (ROOT / "docs/command_line.md").read_text().partition("## Environment variables")[2]
    assert sorted(name for name in read if f"`{name}`" not in table) == []
