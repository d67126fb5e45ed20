"""What to do with a pt2 or TorchScript file alone."""

import warnings

import onnxruntime
import pytest
import torch
from torch import nn

import bnexport
from bnexport.errors import MalformedModelError, MissingFileError, UsageError
from bnexport.exporting.checkpoint import read_state_dict

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()


def program():
    free = torch.export.Dim.AUTO
    return torch.export.export(network(), (X,), dynamic_shapes=({0: free, 2: free},))


@pytest.mark.parametrize("as_file", [False, True])
def test_a_program_is_a_model(as_file, tmp_path):
    """What is constant in it is static in the file."""
    given = program()
    if as_file:
        torch.export.save(given, tmp_path / "program.pt2")
        given = tmp_path / "program.pt2"
    result = bnexport.export(given, X, tmp_path / "m.onnx")
    assert result.verification.passed and len(result.report.folded) == 1
    shape = onnxruntime.InferenceSession(result.path).get_inputs()[0].shape
    assert [isinstance(size, int) for size in shape] == [False, True, False, True]
    assert result.notes == ("input 'input': dimension 3 (width) stays 8, the model fixes it",)
    assert repr(result) == f"ExportResult({str(result.path)!r}, passed, 1 notes)"


def test_files_that_are_no_program(tmp_path):
    (tmp_path / "bad.pt2").write_bytes(b"no archive")
    with pytest.raises(MalformedModelError, match=r"bad\.pt2': torch\.export\.load cannot read it"):
        bnexport.export(tmp_path / "bad.pt2", X, tmp_path / "m.onnx")
    with pytest.raises(MissingFileError, match="no such file"):
        bnexport.export(tmp_path / "none.pt2", X, tmp_path / "m.onnx")
    torch.export.save(program(), tmp_path / "good.pt2")
    with pytest.raises(MalformedModelError, match=r"one of torch\.export; bnexport export .*good\.pt2 OUT\.onnx"):
        bnexport.inspect(tmp_path / "good.pt2")


def test_torchscript_alone(tmp_path):
    """The advice works, and the file is a checkpoint."""
    path, plain = tmp_path / "traced.pt", tmp_path / "plain.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(network(), X), path)
        module = torch.jit.load(path)
        with pytest.raises(
            UsageError, match=r"if there is only TorchScript, call torch\.onnx\.export\(.*dynamo=False\)"
        ):
            bnexport.export(module, X, tmp_path / "m.onnx")
        with pytest.raises(MalformedModelError, match=r"but TorchScript: torch\.onnx\.export\(torch\.jit\.load\("):
            bnexport.inspect(path)
        torch.onnx.export(
            module, X, plain, dynamo=False, training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False
        )
        assert set(read_state_dict(path).sets[""]) == set(network().state_dict())
    assert bnexport.fold(plain, tmp_path / "folded.onnx").report.verification.passed
