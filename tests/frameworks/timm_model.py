"""Exports a timm model after timm's own conversion and compares it: python -m tests.frameworks.timm_model NAME EXPORTER.

Prints one JSON object; differences are relative to the largest value of the untouched model's output. Runs in the
environment of `environment`.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path

import onnxruntime
import torch
from torch import nn

import bnexport
from tests.frameworks import stand_ins


def main(name: str, exporter: str) -> None:
    stand_ins.torchvision()
    import timm
    from timm.layers import convert_sync_batchnorm

    torch.manual_seed(0)
    plain = timm.create_model(name, num_classes=10).eval()
    for module in batch_norms(plain):  # as after training
        nn.init.normal_(module.running_mean, std=0.1)
        nn.init.uniform_(module.running_var, 0.5, 2.0)
    sync = convert_sync_batchnorm(copy.deepcopy(plain)).eval()
    side = plain.default_cfg["input_size"][1] if plain.default_cfg.get("fixed_input_size") else 128
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        result = bnexport.export(sync, torch.randn(2, 3, side, side), path, exporter=exporter)
        session = onnxruntime.InferenceSession(str(path))
        (declared,) = (value.shape for value in session.get_inputs())
        differences = {}
        for wanted in ((2, 3, side, side), (1, 3, 96, 160)):
            # A dimension that the file declares fixed stays as it is.
            shape = [size if isinstance(size, int) else other for size, other in zip(declared, wanted)]
            x = torch.randn(shape)
            with torch.no_grad():
                expected = plain(x)
            (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
            differences[str(shape)] = relative(torch.from_numpy(got), expected)
    print(
        json.dumps(
            {
                "declared": declared,
                "differences": differences,
                "training": trained(plain, torch.randn(4, 3, side, side)),
                "notes": result.notes,
                "reference": result.verification.reference,
                "passed": result.verification.passed,
                "batch norms": [len(list(batch_norms(plain))), len(list(batch_norms(sync)))],
                "kept": len(result.report.kept),
            }
        )
    )


def batch_norms(model: nn.Module):
    return (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def trained(model: nn.Module, x: torch.Tensor) -> float:
    """The largest relative difference, in train mode, of the output and the updated statistics after conversion to ours."""
    results = []
    for one in (copy.deepcopy(model).train(), bnexport.convert_sync_batchnorm(copy.deepcopy(model).train())):
        torch.manual_seed(1)  # dropout draws the same numbers
        with torch.no_grad():
            output = one(x)
        statistics = [value for name, value in one.state_dict().items() if "running_" in name]
        results.append([*(output if isinstance(output, tuple) else (output,)), *statistics])
    return max(relative(got, expected) for expected, got in zip(*results, strict=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
