"""Real networks against files of three exporters, right ones and ones with a fault: the verdict, and the module that it names."""

import copy
import itertools
import warnings
from pathlib import Path

import torch
from torch import nn

import bnexport
from tests.frameworks import stand_ins

X = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(5))
ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish)
# A fault, the exporter of its file, and where it is: this share of all modules of its kind comes before it.
PLANS: dict[str, tuple[tuple[str, str, float], ...]] = {
    "resnet18": (("eps", "torchscript", 0.3), ("weight", "dynamo", 0.5), ("activation", "ours", 0.7)),
    "mobilenetv3_small_100": (("activation", "torchscript", 0.5), ("eps", "dynamo", 0.7), ("size", "torchscript", 0.3)),
    "efficientnet_b0": (("order", "torchscript", 0.5), ("weight", "ours", 0.7), ("train", "torchscript", 0.0)),
    "regnety_002": (("activation", "dynamo", 0.5), ("weight", "torchscript", 0.7), ("eps", "ours", 0.3)),
    "densenet121": (("order", "torchscript", 0.5), ("size", "torchscript", 0.7), ("activation", "torchscript", 0.3)),
    "vgg11_bn": (("order", "dynamo", 0.5), ("activation", "ours", 0.7)),
    "ghostnet_100": (("weight", "torchscript", 0.3), ("order", "ours", 0.7)),
    "mixnet_s": (("eps", "torchscript", 0.3), ("activation", "dynamo", 0.5)),
    "repvgg_a0": (("activation", "torchscript", 0.7), ("weight", "ours", 0.3)),
    "resnest14d": (("weight", "torchscript", 0.7), ("order", "dynamo", 0.3), ("overflow", "torchscript", 0.5)),
}


def network(name: str) -> nn.Module:
    """A network with random weights and statistics as after training."""
    stand_ins.torchvision()
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=10)
    generator = torch.Generator().manual_seed(1)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.momentum = 1.0
            norm.weight.copy_(0.4 * torch.rand(norm.weight.shape, generator=generator) + 0.8)
            norm.bias.copy_(0.2 * torch.randn(norm.bias.shape, generator=generator))
        model.train()(torch.randn(8, 3, 64, 64, generator=generator))
        for norm in norms:
            norm.running_var.clamp_(min=0.05 * float(norm.running_var.mean()))
            norm.running_mean += (
                0.05 * torch.randn(norm.running_mean.shape, generator=generator) * norm.running_var.sqrt()
            )
            norm.running_var *= torch.exp(0.05 * torch.randn(norm.running_var.shape, generator=generator))
    return model.eval()


def pair(model: nn.Module, share: float) -> tuple[str, str]:
    """The names of a convolution and of the batch norm behind it: where a file folds it, they are one."""
    modules = list(model.named_modules())
    found = [
        (one, other)
        for (one, conv), (other, norm) in itertools.pairwise(modules)
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d) and conv.out_channels == norm.num_features
    ]
    return found[int(len(found) * share)]


class Fixed(nn.Module):
    """A layer whose result has a fixed size."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.shape: tuple[int, ...] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.shape = self.shape or tuple(y.shape)
        return y.reshape(self.shape)


def planted(model: nn.Module, fault: str, share: float) -> tuple[list[str], nn.Module]:
    """The names that are right, and a copy of the model with the fault. An overflow is in the model, too: in float16 alone."""
    changed = copy.deepcopy(model)
    names = pair(model, share)
    conv, norm = map(changed.get_submodule, names)
    if fault in ("activation", "size"):
        found = [name for name, module in model.named_modules() if isinstance(module, ACTIVATIONS)]
        name = found[int(len(found) * share)]
        parent, _, last = name.rpartition(".")
        inner = changed.get_submodule(name)
        setattr(changed.get_submodule(parent), last, nn.Identity() if fault == "activation" else Fixed(inner))
        return [name, f"{name}.inner"], changed
    if fault == "eps":
        norm.eps = 0.02 * float(norm.running_var.mean())
    elif fault == "weight":
        conv.weight.data *= 1.01
    elif fault == "order":
        conv.weight.data[[0, 1]] = conv.weight.data[[1, 0]]
    elif fault == "train":
        changed.train()
    else:
        for each in (model, changed):
            module = each.get_submodule(names[1])
            module.weight.data *= 3e4
            module.bias.data *= 3e4
    # A merged convolution has the name of its block.
    return [*names, names[0].rpartition(".conv_")[0]], changed


def written(model: nn.Module, exporter: str, path: Path, x: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "ours":
            bnexport.export(model, x, path)
        elif exporter == "dynamo":
            sizes = ({0: torch.export.Dim.AUTO},)
            torch.onnx.export(model, (x,), path, dynamo=True, dynamic_shapes=sizes)
        else:
            mode = torch.onnx.TrainingMode.TRAINING if model.training else torch.onnx.TrainingMode.EVAL
            axes = {"input": {0: "n"}}
            options = {"training": mode, "do_constant_folding": not model.training}
            torch.onnx.export(model, (x,), path, dynamo=False, input_names=["input"], dynamic_axes=axes, **options)


def right(name: str, folder: Path) -> None:
    """Files in float32 pass; those in float16 pass, unless the module itself loses as much there."""
    model = network(name)
    exporter = "ours" if name == "vgg11_bn" else "torchscript"
    for half in (False, True):
        path = folder / f"{half}.onnx"
        written(copy.deepcopy(model).half() if half else model, exporter, path, X.half() if half else X)
        verdict = bnexport.verify(model, path, inputs=X)
        assert verdict.passed or (half and verdict.status == "not_verified"), (half, verdict.summary())


def wrong(name: str, folder: Path) -> None:
    """Each fault fails, and is named."""
    for number, (fault, exporter, share) in enumerate(PLANS[name]):
        model = network(name)
        names, changed = planted(model, fault, share)
        with torch.no_grad():
            changed(X)
        half = fault == "overflow"
        path = folder / f"{number}.onnx"
        written(changed.half() if half else changed, exporter, path, X.half() if half else X)
        verdict = bnexport.verify(model, path, inputs=X)
        assert verdict.status == "failed", (fault, verdict.summary())
        assert any(f"behind {each}{end}" in verdict.place for each in names for end in (":", ",")), (
            fault,
            names,
            verdict.place,
        )
