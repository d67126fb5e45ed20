"""What people hand in: wrappers, nested inputs, programs, quantised modules, and what cannot be exported, each with one clear
sentence.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import bnexport
from bnexport import torch_versions
from bnexport.errors import BnexportError, MalformedModelError, MissingFileError, UsageError
from bnexport.exporting.checkpoint import read_state_dict
from tests.exporting.files import declared, output
from tests.folding.module.nets import trained
from tests.support.modules import compose

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    return trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), nn.ReLU())).eval()


def nested(self: Any, batch: dict[str, Any], scale: float = 1.0, *, flag: Any = None, mask: Any = None) -> torch.Tensor:
    """As detectors and transformers ask for their inputs."""
    y = self.net(batch["image"]) * scale + batch["shifts"][0]
    return y if flag is None or mask is None else y * mask


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_inputs_in_containers(tmp_path: Path) -> None:
    model, batch = compose(nested, net=net()).eval(), {"image": X, "shifts": [torch.tensor([0.5])]}
    kwargs = {"mask": torch.rand(2, 4, 4, 4), "flag": True}
    result = bnexport.export(model, (batch, 3), tmp_path / "m.onnx", kwargs=kwargs)
    assert result.verification.passed
    assert result.inputs == ("batch_image", "batch_shifts_0", "mask")
    assert result.notes == ("input 'scale' is the constant 3 in the file; only tensors are inputs",)
    got = output(tmp_path / "m.onnx", X, *batch["shifts"], kwargs["mask"])
    np.testing.assert_allclose(got, model(batch, 3, **kwargs).detach().numpy(), rtol=1e-5, atol=1e-5)
    assert bnexport.export(model, (batch,), tmp_path / "m.pt2").verification.passed


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["DataParallel", "compile"])
def test_wrappers(wrap: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    result = bnexport.export(wrap(net()), X, tmp_path / "m.onnx")
    assert (result.verification.passed, result.notes, result.inputs) == (True, (), ("input",))
    assert [site.name for site in result.report.sites] == ["1"]


def test_distributed_data_parallel(process_group: None, tmp_path: Path) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    assert not bnexport.export(model.eval(), X, tmp_path / "m.onnx").notes
    result = bnexport.export(model.train(), X, tmp_path / "n.onnx", mode="custom_op")
    assert result.notes == (
        "DistributedDataParallel copies buffers from its first process in every forward; the file does not",
    )


@pytest.mark.skipif(not torch_versions.has((2, 6)), reason="fully_shard came with torch 2.6")
def test_shards(process_group: None, tmp_path: Path) -> None:
    """Refused with two lines that gather them, which do."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.device_mesh.init_device_mesh("cpu", (1,))
    model, plain = fully_shard(net()), net()
    with pytest.raises(BnexportError, match=r"model: FSDP spreads .* get_model_state_dict\(model, options=State"):
        bnexport.export(model, X, tmp_path / "m.onnx")
    with pytest.raises(BnexportError, match="model: FSDP spreads"):
        bnexport.fold_module(model)
    plain.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
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
    "no tensor": (lambda: compose(nested, net=net()), ({}, 1), "args: got no tensor, expected one at least"),
    "float64": (lambda: net().double(), X,
        r"does not run on inputs of shape \(2, 3, 6, 6\) and type float32: Runtime.*double"),
    "float64 in ONNX Runtime": (lambda: net().double(), X.double(), "few operators in float64: export model.float"),
    "channels": (net, X[:, :2], r"args: Sequential does not run .* \(2, 2, 6, 6\) .* to have 3 channels, but got 2(?!.*dimension 0)"),
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


WIDER = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def plain_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()


def program():
    free = torch.export.Dim.AUTO
    return torch.export.export(plain_network(), (WIDER,), dynamic_shapes=({0: free, 2: free},))


@pytest.mark.parametrize("as_file", [False, True])
def test_a_program_is_a_model(as_file, tmp_path):
    """What is constant in it is static in the file."""
    given = program()
    if as_file:
        torch.export.save(given, tmp_path / "program.pt2")
        given = tmp_path / "program.pt2"
    result = bnexport.export(given, WIDER, tmp_path / "m.onnx")
    assert result.verification.passed and len(result.report.folded) == 1
    assert [isinstance(size, int) for size in declared(result.path)] == [False, True, False, True]
    assert result.notes == ("input 'input': dimension 3 (width) stays 8, the model fixes it",)
    assert repr(result) == f"ExportResult({str(result.path)!r}, passed, 1 notes)"


def test_files_that_are_no_program(tmp_path):
    (tmp_path / "bad.pt2").write_bytes(b"no archive")
    with pytest.raises(MalformedModelError, match=r"bad\.pt2': torch\.export\.load cannot read it"):
        bnexport.export(tmp_path / "bad.pt2", WIDER, tmp_path / "m.onnx")
    with pytest.raises(MissingFileError, match="no such file"):
        bnexport.export(tmp_path / "none.pt2", WIDER, tmp_path / "m.onnx")
    torch.export.save(program(), tmp_path / "good.pt2")
    with pytest.raises(MalformedModelError, match=r"one of torch\.export; bnexport export .*good\.pt2 OUT\.onnx"):
        bnexport.inspect(tmp_path / "good.pt2")


def test_torchscript_alone(tmp_path):
    """The advice works, and the file is a checkpoint."""
    path, plain = tmp_path / "traced.pt", tmp_path / "plain.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(plain_network(), WIDER), path)
        module = torch.jit.load(path)
        words = r"if there is only TorchScript, call torch\.onnx\.export\(.*dynamo=False\)"
        with pytest.raises(UsageError, match=words):
            bnexport.export(module, WIDER, tmp_path / "m.onnx")
        with pytest.raises(MalformedModelError, match=r"but TorchScript: torch\.onnx\.export\(torch\.jit\.load\("):
            bnexport.inspect(path)
        options = {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
        torch.onnx.export(module, WIDER, plain, dynamo=False, **options)
        assert set(read_state_dict(path).sets[""]) == set(plain_network().state_dict())
    assert bnexport.fold(plain, tmp_path / "folded.onnx").report.verification.passed


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao import quantization

    torch.manual_seed(0)
    layers = [quantization.QuantStub(), nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), quantization.DeQuantStub()]
    model = nn.Sequential(*layers).train()
    quantization.fuse_modules_qat(model, [["1", "2", "3"]], inplace=True)
    observers = quantization.MovingAverageMinMaxObserver, quantization.MovingAveragePerChannelMinMaxObserver
    symmetric = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}
    fake = quantization.FakeQuantize.with_args
    model.qconfig = quantization.QConfig(  # type: ignore[assignment]
        activation=fake(observer=observers[0], quant_min=0, quant_max=255),
        weight=fake(observer=observers[1], **symmetric, ch_axis=0),
    )
    quantization.prepare_qat(model, inplace=True)
    for _ in range(5):
        model(torch.randn(4, 3, 10, 10))
    model.apply(quantization.disable_observer)
    return model.eval()


def test_export_and_fold_give_one_verdict(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, x = quantised(), torch.randn(2, 3, 10, 10)
        exported = bnexport.export(model, x, tmp_path / "deploy.onnx", exporter="torchscript")
        kept = bnexport.export(model, x, tmp_path / "kept.onnx", exporter="torchscript", fold=False)
    folded = bnexport.fold(kept.path, tmp_path / "folded.onnx")
    assert exported.verification.passed
    assert folded.report.verification is not None
    assert folded.report.verification.passed
    assert exported.report is not None
    assert len(exported.report.folded) == len(folded.report.folded) == 1
    for notes in (exported.notes, folded.report.notes):
        assert any("without ONNX Runtime's optimisations" in note for note in notes)
