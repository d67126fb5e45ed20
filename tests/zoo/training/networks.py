"""What trains: each architecture of the catalogue once, with its library's head and a loss as that library uses it."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree

from tests.zoo import building, catalogue

Tensor = torch.Tensor
Loss = Callable[[Any, Tensor], Tensor]

IGNORED, AUXILIARY = 255, 0.4
_IMAGES, _LARGE_IMAGES, _VIDEOS = (4, 96), 2, (2, 3, 16, 48, 48)
# Sides of images, pairs of them, for networks whose last maps would be empty.
_SIDES = {
    "torchvision:inception_v3": 299,
    "torchvision:maxvit_t": 224,
    "torchvision:s3d": 224,
    "timm:coatnet_nano_rw_224": 224,
    "smp:PAN?encoder_name=resnet18": 128,
}
_OPTIMIZERS = {"sgd": {"lr": 0.01, "momentum": 0.9}, "adamw": {"lr": 1e-4, "weight_decay": 0.05}}
# A kernel for each image makes the number of groups depend on the batch: exported with dynamic=False.
_FIXED_BATCH = {"mmseg:dmnet/dmnet_r50-d8_4xb2-40k_cityscapes-512x1024.py", "timm:efficientnet_cc_b0_4e"}


@dataclasses.dataclass(frozen=True)
class Network:
    """entry: of the catalogue. Optimizers take turns over the catalogue."""

    entry: catalogue.Entry
    optimizer: str

    @property
    def name(self) -> str:
        return f"{self.entry.library}:{self.entry.architecture or self.entry.target}"

    @property
    def options(self) -> dict[str, float]:
        return _OPTIMIZERS[self.optimizer]

    @property
    def dynamic(self) -> bool:
        """Whether the graph takes batches of any size."""
        return self.name not in _FIXED_BATCH

    @property
    def shape(self) -> tuple[int, ...]:
        """(4, 3, 96, 96); pairs of images that have to be larger."""
        shape = self.entry.shape
        if side := _SIDES.get(self.name):
            return _LARGE_IMAGES, *shape[1:-2], side, side
        if len(shape) == 5:
            return _VIDEOS
        if shape[2] > 128 or "image_size" in self.entry.options:
            return _LARGE_IMAGES, *shape[1:]
        return _IMAGES[0], 3, _IMAGES[1], _IMAGES[1]


@dataclasses.dataclass(frozen=True)
class Task:
    """A model in train mode, its loss, and `target`, which draws one of a generator. kind: for the page."""

    model: nn.Module
    loss: Loss
    target: Callable[[torch.Generator], Tensor]
    kind: str


def networks() -> list[Network]:
    """Architectures in the catalogue's order; of one that is there with several conversions, the first."""
    found: dict[str, Network] = {}
    for entry in catalogue.entries():
        made = Network(entry, list(_OPTIMIZERS)[len(found) % len(_OPTIMIZERS)])
        found.setdefault(made.name, made)
    return list(found.values())


def find(name: str) -> Network:
    return next(network for network in networks() if network.name == name)


def make(network: Network) -> Task:
    """Build the model with plain batch norms, and choose the loss by the library and the outputs."""
    torch.manual_seed(0)
    entry = network.entry
    model = building.build(dataclasses.replace(entry, conversion="BN"))
    if entry.library == "mmseg" and hasattr(model, "auxiliary_head") and not _cascades(model):
        model = _WithAuxiliaryHeads(model)
    model.train()
    rows, _, *sides = network.shape
    shapes = _shapes(model, torch.randn(network.shape, generator=torch.Generator().manual_seed(1)))
    dense = [shape for shape in shapes if len(shape) == 4]
    if entry.library in ("mmdet", "ultralytics") and dense:
        count = sum(torch.Size(shape[1:]).numel() for shape in shapes)
        return Task(model, detection, lambda source: _sparse(rows, count, source), "detection")
    if entry.library == "smp":
        from segmentation_models_pytorch.losses import DiceLoss

        dice = DiceLoss("binary")
        return Task(
            model,
            lambda output, target: dice(output, target) + functional.binary_cross_entropy_with_logits(output, target),
            lambda source: torch.rand((rows, 1, *sides), generator=source).round(),
            "dice and cross entropy",
        )
    if dense and entry.library in ("mmseg", "torchvision", "hf") and "Backbone" not in network.name:
        return Task(model, segmentation, lambda source: _labels(rows, sides, dense[0][1], source), "dense, ignoring")
    if shapes and all(len(shape) == 2 for shape in shapes):
        smoothing = 0.1 if entry.library in ("timm", "mmpretrain") else 0.0
        classes = shapes[0][1]
        return Task(
            model,
            lambda output, target: classification(output, target, smoothing),
            lambda source: torch.randint(0, classes, (rows,), generator=source),
            "classification",
        )
    count = sum(torch.Size(shape[1:]).numel() for shape in shapes)
    return Task(model, features, lambda source: torch.randn(rows, count, generator=source), "features")


class _WithAuxiliaryHeads(nn.Module):
    """A segmentor of MMSegmentation as it trains: the outputs of all of its heads."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.segmentor = model

    def forward(self, x: Tensor) -> list[Any]:
        found = self.segmentor.extract_feat(x)
        auxiliary = self.segmentor.auxiliary_head
        heads = auxiliary if isinstance(auxiliary, nn.ModuleList) else [auxiliary]
        return [head(found) for head in (self.segmentor.decode_head, *heads)]


def _cascades(model: Any) -> bool:
    return model.auxiliary_head is None or isinstance(model.decode_head, nn.ModuleList)


def leaves(output: Any) -> list[Tensor]:
    """The tensors of an output, of batches of anything."""
    return [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _shapes(model: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
    """Shapes of the outputs in train mode; statistics are put back."""
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        found = [tuple(leaf.shape) for leaf in leaves(model(x))]
    model.load_state_dict(before)
    return found


def _labels(rows: int, sides: list[int], classes: int, source: torch.Generator) -> Tensor:
    """Labels with a quarter of the pixels ignored."""
    labels = torch.randint(0, classes, (rows, *sides), generator=source)
    return torch.where(torch.rand(labels.shape, generator=source) < 0.25, IGNORED, labels)


def _sparse(rows: int, count: int, source: torch.Generator) -> Tensor:
    """One position of a hundred is an object."""
    values = torch.rand((rows, count), generator=source)
    return torch.where(values < 0.01, 100 * values, 0.0)


def _weighted(losses: list[Tensor]) -> Tensor:
    """The first head's, and a share of the auxiliary ones."""
    return losses[0] + AUXILIARY * sum(losses[1:]) if len(losses) > 1 else losses[0]


def classification(output: Any, target: Tensor, smoothing: float) -> Tensor:
    """output (N, classes) of each head, target (N,)."""
    return _weighted([functional.cross_entropy(leaf, target, label_smoothing=smoothing) for leaf in leaves(output)])


def segmentation(output: Any, target: Tensor) -> Tensor:
    """output (N, classes, h, w) of each head, enlarged to the target (N, H, W); (N, classes): which classes there are."""
    losses = []
    for leaf in leaves(output):
        if leaf.dim() == 2:
            classes = torch.arange(leaf.shape[1], device=target.device)[:, None, None]
            present = (target[:, None] == classes).flatten(2).any(2).to(leaf.dtype)
            losses.append(functional.binary_cross_entropy_with_logits(leaf, present))
            continue
        large = functional.interpolate(leaf, target.shape[1:], mode="bilinear", align_corners=False)
        # Heads of boundaries have fewer classes than the first one has.
        labels = target if leaf.shape[1] > 2 else torch.where(target == IGNORED, IGNORED, target % leaf.shape[1])
        losses.append(functional.cross_entropy(large, labels, ignore_index=IGNORED))
    return _weighted(losses)


def detection(output: Any, target: Tensor) -> Tensor:
    """output: maps of scores first, then boxes and more, all levels; target (N, all positions): the assigned values.

    Which position answers for which object is chosen by values, which is no part of a graph.
    """
    joined = torch.cat([leaf.flatten(1) for leaf in leaves(output)], 1)
    joined = joined[:, -target.shape[1] :]  # in eval mode some networks return decoded boxes before the maps
    focal = torch.sigmoid(joined) - target
    scores = functional.binary_cross_entropy_with_logits(joined, target, reduction="none") * focal * focal
    boxes = functional.smooth_l1_loss(joined, target, reduction="none")
    half = joined.shape[1] // 2
    return scores[:, :half].mean() + boxes[:, half:].mean()


def features(output: Any, target: Tensor) -> Tensor:
    """output: any; target (N, all its values)."""
    joined = torch.cat([leaf.flatten(1) for leaf in leaves(output)], 1)
    return functional.mse_loss(joined[:, -target.shape[1] :], target)
