"""The files that every runtime is given, with inputs and what torch computes.

A network with convolutions (grouped, strided), sync batch norm, pooling, resizing and a linear layer, in each form that
bnexport writes, at two sizes each.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

import bnexport
from bnexport.model_io import load, load_tensors
from bnexport.native.library import get_library_path
from bnexport.verification.certificate import KEY

# A file of a newer opset than older runtimes know: they have to say so.
NEWER = "deploy, opset 23"
# The example, and another size of every dynamic dimension.
SIZES = ((2, 3, 12, 12), (3, 3, 17, 10))
# Of the largest value of an output; float32 networks of this depth stay a hundred times below it.
BOUND = 1e-4
RATE = 0.1
WRITTEN = "written.pickle"


class Net(nn.Module):
    """(N, 3, H, W) to logits (N, 5): what every runtime has, and what exporters write for sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.SyncBatchNorm(8), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, groups=2, bias=False), nn.SyncBatchNorm(8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.stem(x))
        return self.head((x + nn.functional.max_pool2d(x, 3, 1, 1)).mean((2, 3)))


class Resizing(Net):
    """As segmentation does: a smaller map grows to the size of a larger one, whatever that is; to (N, 8, H, W)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return x + nn.functional.interpolate(self.down(x), x.shape[2:], mode="bilinear", align_corners=False)


@dataclasses.dataclass(frozen=True)
class Case:
    """libraries: keys of the custom-op libraries that the file needs."""

    name: str
    file: str
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    libraries: tuple[str, ...] = ()


def network(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    model = kind()
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias, 0, 0.2)
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2)
    return model


@dataclasses.dataclass(frozen=True)
class Written:
    """A case as an engine reads it: a JSON file with the model's path, inputs and the names of the outputs."""

    name: str
    path: Path
    outputs: Mapping[str, np.ndarray]
    libraries: tuple[str, ...]


def make(folder: Path) -> list[Written]:
    """Write all files anew, and a JSON file for each case."""
    folder = folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made = []
    for number, case in enumerate([*_inference(folder), *_training_graphs(folder), *_training_steps(folder)]):
        path = folder / f"{number}.json"
        inputs = {
            name: {"dtype": value.dtype.name, "shape": list(value.shape), "data": value.ravel().tolist()}
            for name, value in case.inputs.items()
        }
        record = {
            "path": str(folder / case.file),
            "inputs": inputs,
            "outputs": list(case.outputs),
            "libraries": [get_library_path(kind) for kind in case.libraries],
        }
        path.write_text(json.dumps(record))
        made.append(Written(case.name, path, case.outputs, case.libraries))
    return made


def _inference(folder: Path) -> list[Case]:
    model = network().eval()
    example = torch.randn(SIZES[0])
    bnexport.export(model, example, folder / "deploy.onnx")
    if KEY not in load(folder / "deploy.onnx").metadata_props:
        raise AssertionError("no runtime is given a file with a certificate")
    bnexport.export(model, example, folder / "newer.onnx", opset_version=23)
    bnexport.export(model, example, folder / "kept.onnx", mode="custom_op")
    bnexport.inline(folder / "kept.onnx", folder / "kept_inlined.onnx")
    resizing = network(Resizing).eval()
    bnexport.export(resizing, example, folder / "resizing.onnx")
    cases = []
    for size in SIZES:
        x = torch.randn(size)
        inputs, outputs = {"x": x.numpy()}, {"output": model(x).detach().numpy()}
        cases.append(Case("deploy, resizing", "resizing.onnx", inputs, {"output": resizing(x).detach().numpy()}))
        for name, file, libraries in (
            ("deploy", "deploy.onnx", ()),
            ("kept, body", "kept.onnx", ()),
            ("kept, library", "kept.onnx", ("ops",)),
            ("kept, inlined", "kept_inlined.onnx", ()),
            (NEWER, "newer.onnx", ()),
        ):
            cases.append(Case(name, file, inputs, outputs, libraries))
    return cases


def _training_graphs(folder: Path) -> list[Case]:
    """A graph in train mode: the batch's statistics, and the new ones as outputs."""
    model = bnexport.convert_sync_batchnorm(network()).train()
    bnexport.export(model, torch.randn(SIZES[0]), folder / "train.onnx", mode="custom_op")
    bnexport.inline(folder / "train.onnx", folder / "train_inlined.onnx")
    cases = []
    for size in SIZES:
        x, trained = torch.randn(size), copy.deepcopy(model)
        outputs = {"output": trained(x).detach().numpy()}
        outputs |= {
            f"{name}.new": value.numpy()
            for name, value in trained.state_dict().items()
            if name.endswith(("_mean", "_var", "_tracked"))
        }
        for name, file, libraries in (
            ("train mode, body", "train.onnx", ()),
            ("train mode, library", "train.onnx", ("ops",)),
            ("train mode, inlined", "train_inlined.onnx", ()),
        ):
            cases.append(Case(name, file, {"x": x.numpy()}, outputs, libraries))
    return cases


def _training_steps(folder: Path) -> list[Case]:
    """One step of SGD: loss and the new parameters."""
    model = bnexport.convert_sync_batchnorm(network()).train()
    loss = nn.functional.cross_entropy
    cases = []
    for name, options, libraries in (
        ("training step, library", {}, ("ops", "training")),
        ("training step, standard", {"standard_ops_only": True}, ()),
    ):
        file = f"step_{'library' if libraries else 'standard'}.onnx"
        batch = (torch.randn(SIZES[0]), torch.randint(5, SIZES[0][:1]))
        bnexport.export_training_step(model, loss, batch, folder / file, optimizer_options={"lr": RATE}, **options)
        state, _ = load_tensors((folder / file).with_suffix(".safetensors"))
        for rows in (2, 3):
            x, target = torch.randn(rows, *SIZES[0][1:]), torch.randint(5, (rows,))
            trained = copy.deepcopy(model)
            value = loss(trained(x), target)
            value.backward()
            with torch.no_grad():
                new = {
                    f"{key}.new": (p - RATE * p.grad).numpy()
                    for key, p in trained.named_parameters()
                    if p.grad is not None
                }
            inputs = {"x": x.numpy(), "target": target.numpy(), "lr": np.asarray(RATE), **state}
            cases.append(Case(name, file, inputs, {"loss": value.detach().numpy(), **new}, libraries))
    return cases


if __name__ == "__main__":
    destination = Path(sys.argv[1])
    # By its module's name, under which the class is found again.
    from tests.runtimes.files import make as made

    (destination / WRITTEN).write_bytes(pickle.dumps(made(destination)))
