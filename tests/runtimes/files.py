"""The files that every runtime is given, with inputs and what torch computes.

A network with convolutions (grouped, strided), sync batch norm, pooling, resizing and a linear layer, in each form that
bnexport writes, at two sizes each.
"""

import copy
import dataclasses
import json
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


class Net(nn.Module):
    """(N, 3, H, W) to logits (N, 5): what every runtime has, and what exporters write for sizes."""

    def __init__(self, norm: type[nn.Module] = nn.SyncBatchNorm) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(8), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, groups=2, bias=False), norm(8), nn.ReLU())
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
    """A file, its inputs and what torch computes. libraries: keys of the custom-op libraries that it needs."""

    name: str
    file: str
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    libraries: tuple[str, ...] = ()


def network(kind: type[Net] = Net, norm: type[nn.Module] = nn.SyncBatchNorm) -> Net:
    torch.manual_seed(0)
    model = kind(norm)
    for module in (model.stem[1], model.down[1]):
        nn.init.normal_(module.weight, 1, 0.2)
        nn.init.normal_(module.bias, 0, 0.2)
        module.running_mean.normal_(0, 0.2)
        module.running_var.uniform_(0.5, 2)
    return model


def make(folder: Path) -> None:
    """Write all files anew, and for each case, in order, what an engine reads: a JSON file with paths and numbers."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, case in enumerate([*_inference(folder), *_training_graphs(folder), *_training_steps(folder)]):
        inputs, outputs = (
            {
                name: {"dtype": value.dtype.name, "shape": list(value.shape), "data": value.ravel().tolist()}
                for name, value in values.items()
            }
            for values in (case.inputs, case.outputs)
        )
        libraries = [get_library_path(kind) for kind in case.libraries]
        record = {"name": case.name, "path": str(folder / case.file), "libraries": libraries}
        (folder / f"{number:02}.json").write_text(json.dumps({**record, "inputs": inputs, "outputs": outputs}))


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
        cases += [
            Case("deploy, resizing", "resizing.onnx", inputs, {"output": resizing(x).detach().numpy()}),
            Case("deploy", "deploy.onnx", inputs, outputs),
            Case("kept, body", "kept.onnx", inputs, outputs),
            Case("kept, library", "kept.onnx", inputs, outputs, ("ops",)),
            Case("kept, inlined", "kept_inlined.onnx", inputs, outputs),
            Case(NEWER, "newer.onnx", inputs, outputs),
        ]
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
        inputs = {"x": x.numpy()}
        cases += [
            Case("train mode, body", "train.onnx", inputs, outputs),
            Case("train mode, library", "train.onnx", inputs, outputs, ("ops",)),
            Case("train mode, inlined", "train_inlined.onnx", inputs, outputs),
        ]
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
    make(Path(sys.argv[1]).absolute())
