"""What people hand in: wrappers, nested inputs, and what cannot be exported, each with one clear sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.distributed as dist
from torch import nn

import bnexport
from bnexport import torch_versions
from bnexport.errors import BnexportError, UnsupportedModelError, UsageError
from tests.folding.module.nets import trained

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    return trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), nn.ReLU())).eval()


class Nested(nn.Module):
    """As detectors and transformers ask for their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, batch: dict[str, Any], scale: float = 1.0, *, flag: Any = None, mask: Any = None) -> torch.Tensor:
        y = self.net(batch["image"]) * scale + batch["shifts"][0]
        return y if flag is None or mask is None else y * mask


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


BATCH = {"image": X, "shifts": [torch.tensor([0.5])]}


def test_inputs_in_containers(tmp_path: Path) -> None:
    model, batch = Nested().eval(), BATCH
    kwargs = {"mask": torch.rand(2, 4, 4, 4), "flag": True}
    result = bnexport.export(model, (batch, 3), tmp_path / "m.onnx", kwargs=kwargs)
    assert result.verification.passed
    assert result.inputs == ("batch_image", "batch_shifts_0", "mask")
    assert result.notes == ("input 'scale' is the constant 3 in the file; only tensors are inputs",)
    feeds = dict(zip(result.inputs, (X.numpy(), np.array([0.5], np.float32), kwargs["mask"].numpy())))
    (got,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, feeds)
    np.testing.assert_allclose(got, model(batch, 3, **kwargs).detach().numpy(), rtol=1e-5, atol=1e-5)


def test_inputs_in_containers_for_pt2(tmp_path: Path) -> None:
    assert bnexport.export(Nested().eval(), (BATCH,), tmp_path / "m.pt2").verification.passed


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["DataParallel", "compile"])
def test_wrappers(wrap: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    model = net()
    result = bnexport.export(wrap(model), X, tmp_path / "m.onnx")
    assert (result.verification.passed, result.notes, result.inputs) == (True, (), ("input",))
    assert [site.name for site in result.report.sites] == ["1"]


def test_distributed_data_parallel(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
        assert not bnexport.export(model.eval(), X, tmp_path / "m.onnx").notes
        result = bnexport.export(model.train(), X, tmp_path / "n.onnx", mode="custom_op")
    finally:
        dist.destroy_process_group()
    assert result.notes == (
        "DistributedDataParallel copies buffers from its first process in every forward; the file does not",
    )


@pytest.mark.skipif(not torch_versions.has((2, 6)), reason="fully_shard came with torch 2.6")
def test_shards(tmp_path: Path) -> None:
    """Refused with two lines that gather them, which do."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dist.device_mesh.init_device_mesh("cpu", (1,))
        model, plain = fully_shard(net()), net()
        with pytest.raises(BnexportError, match=r"model: FSDP spreads .* get_model_state_dict\(model, options=State"):
            bnexport.export(model, X, tmp_path / "m.onnx")
        with pytest.raises(BnexportError, match="model: FSDP spreads"):
            bnexport.fold_module(model)
        plain.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    finally:
        dist.destroy_process_group()
    assert bnexport.export(plain, X, tmp_path / "m.onnx").verification.passed


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Conv2d(3, 4, 1)


# What is handed in, and what the one sentence says.
REFUSED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "traced": (lambda: torch.jit.trace(net(), X), X, "TopLevelTracedModule; export the module that it was made from"),
    "scripted": (lambda: torch.jit.script(nn.ReLU()), X, "RecursiveScriptModule; export the module"),
    "quantised": (lambda: nn.Sequential(torch.ao.nn.quantized.Conv2d(3, 4, 1)), X,
        "0: a quantised Conv2d, .* export the model before torch.ao.quantization.convert"),
    "meta": (meta, X, "model: 'weight' is on the meta device and has no values; .* load a checkpoint"),
    "an array": (net, X.numpy(), r"args: input: got ndarray, expected tensors(.|\n)*class Wrapped\(torch.nn.Module\)"),
    "keyword arguments": (net, {"input": X},
        r"args: got a dict of forward's parameters; write args=\(\), kwargs=\{'input'"),
    "no tensor": (Nested, ({}, 1), "args: got no tensor, expected one at least"),
    "float64": (lambda: net().double(), X,
        r"does not run on inputs of shape \(2, 3, 6, 6\) and type float32: Runtime.*double"),
    "float64 in ONNX Runtime": (lambda: net().double(), X.double(), "few operators in float64: export model.float"),
    "channels": (net, X[:, :2], r"args: Sequential does not run .* \(2, 2, 6, 6\) .* to have 3 channels, but got 2"),
    "no batch": (net, X[0, :, 1:, 1:], r"inputs of shape \(3, 5, 5\) .*; dimension 0 is the batch"),
    "a branch on values": (Branches, X,
        "Branches: torch cannot export it, though it runs: .*data-dependent.*; its code asks for values of tensors at .*"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_one_clear_sentence(case: str, tmp_path: Path, capfd: Any) -> None:
    make, args, message = REFUSED[case]
    with pytest.raises(BnexportError, match=message):
        bnexport.export(make(), args, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
    printed = capfd.readouterr()
    assert not printed.out and "def forward" not in printed.err


@pytest.mark.parametrize("suffix", ["onnx", "pt"])
def test_a_file_is_replaced_only_where_that_is_asked_for(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m.{suffix}"
    path.write_bytes(b"what was there")
    with pytest.raises(UsageError, match="exists; write to another file, or replace it with overwrite=True"):
        bnexport.export(net(), X, path, verify=False)
    assert path.read_bytes() == b"what was there"
    bnexport.export(net(), X, path, verify=False, overwrite=True)
    assert path.read_bytes() != b"what was there"


def test_train_mode_is_mentioned(tmp_path: Path) -> None:
    result = bnexport.export(net().train(), X, tmp_path / "m.onnx")
    assert result.notes == ("the module is in train mode; mode 'deploy' writes it in eval mode",)
    with pytest.raises(UnsupportedModelError, match="torch cannot export it"):
        bnexport.export(Branches(), X, tmp_path / "n.onnx", verify=False)
