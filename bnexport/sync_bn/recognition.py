"""Recognition of batch norms: the known class that a module belongs to, and its deviations from it.

Classes of other packages are known by (top-level package, class name), without importing the package.
A subclass counts as its known base only where it inherits unchanged all that the base's forward uses
(_USED). Overrides of anything else do not reach the result, such as __init__, extra_repr,
_check_input_dim and _check_non_zero_input_channels (they refuse inputs and change none), reset_parameters,
_load_from_state_dict and its relatives, __deepcopy__, and methods that forward does not call.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.utils import parametrize

from bnexport.sync_bn.module import SyncBatchNorm
from bnexport.torch_versions import BatchNormBase

# Batch norm variants: with a following activation, or with fixed statistics.
#
# Sync classes are what modules of other packages become; plain ones are what those return to.

# The submodule that holds an activation which its class had fused (inplace_abn, apex).
FUSED = "fused_activation"


class SyncBatchNormAct(SyncBatchNorm):
    """SyncBatchNorm, then the submodules `drop` and `act` of timm's classes, or a fused activation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _drop_and_activate(self, super().forward(input))


class BatchNormAct(nn.BatchNorm2d):
    """torch.nn.BatchNorm2d, then the submodules `drop` and `act` of timm's classes, or a fused activation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _drop_and_activate(self, super().forward(input))


class FrozenSyncBatchNorm(SyncBatchNorm):
    """Fixed statistics and parameters, whatever train() says, as detectron2's FrozenBatchNorm2d."""

    def train(self, mode: bool = True) -> FrozenSyncBatchNorm:
        return super().train(False)


class FrozenBatchNorm(nn.BatchNorm2d):
    """torch.nn.BatchNorm2d with fixed statistics, whatever train() says."""

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        return super().train(False)


def fuse(module: nn.Module, activation: nn.Module) -> None:
    """Make a SyncBatchNormAct run `activation` after the norm, and nothing else."""
    module._modules[FUSED] = activation


def _drop_and_activate(module: nn.Module, output: torch.Tensor) -> torch.Tensor:
    for name in (FUSED,) if FUSED in module._modules else ("drop", "act"):
        layer = module._modules.get(name)
        if layer is not None:
            output = layer(output)
    return output


# Kinds of batch norms whose statistics are, or may be, those of a group.
SYNC_KINDS = frozenset({"ours", "torch_sync", "mmcv", "apex", "detectron2_naive", "inplace_abn", "timm_sync_act"})

_OWN: dict[type, str] = {
    SyncBatchNorm: "ours",
    SyncBatchNormAct: "ours",
    FrozenSyncBatchNorm: "ours",
    BatchNormAct: "batch_norm_act",
    FrozenBatchNorm: "frozen",
    nn.SyncBatchNorm: "torch_sync",
    BatchNormBase: "batch_norm",
}
_FOREIGN: dict[tuple[str, str], str] = {
    ("mmcv", "SyncBatchNorm"): "mmcv",
    ("apex", "SyncBatchNorm"): "apex",
    ("detectron2", "NaiveSyncBatchNorm"): "detectron2_naive",
    ("mmdet3d", "NaiveSyncBatchNorm1d"): "detectron2_naive",
    ("mmdet3d", "NaiveSyncBatchNorm2d"): "detectron2_naive",
    ("detectron2", "FrozenBatchNorm2d"): "frozen",
    ("torchvision", "FrozenBatchNorm2d"): "frozen",
    ("inplace_abn", "ABN"): "inplace_abn",
    ("inplace_abn", "InPlaceABN"): "inplace_abn",
    ("inplace_abn", "InPlaceABNSync"): "inplace_abn",
    ("timm", "BatchNormAct2d"): "batch_norm_act",
    ("timm", "SyncBatchNormAct"): "timm_sync_act",
}

# How a call reaches forward, and how modes change. An instance may have its own of these, too.
_METHODS = ("forward", "train", "eval", "_call_impl", "_wrapped_call_impl")
_SPECIAL_METHODS = ("__call__", "__getattr__", "__getattribute__")
_READ = (
    *("weight", "bias", "running_mean", "running_var", "num_batches_tracked"),
    *("momentum", "eps", "training", "track_running_stats"),
)
_USED: dict[str, tuple[str, ...]] = {
    "ours": (
        *("group", "group_size", "stats_mode", "grad_reduction"),
        *("_normalise", "_batches", "_update_statistics", "_updates_statistics", "_set_statistic", "_tensor"),
    ),
    "torch_sync": ("process_group",),
    "mmcv": ("group", "group_size", "stats_mode"),
    "apex": ("process_group", "channel_last", "fuse_relu"),
    "detectron2_naive": ("_stats_mode",),
    "inplace_abn": ("activation", "activation_param"),
    "batch_norm_act": ("drop", "act"),
    "timm_sync_act": ("process_group", "drop", "act"),
}
_SCRIPTED = {"SyncBatchNorm": "torch_sync"} | {f"BatchNorm{n}d": "batch_norm" for n in (1, 2, 3)}


def has_hooks(module: nn.Module) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(module.__dict__.get(name) for name in names)


@dataclasses.dataclass(frozen=True)
class Recognised:
    """kind: of the known class `base`, the module's own or its nearest. changed: deviations of the module from it."""

    kind: str
    base: type
    changed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A module at `path` that derives from a batch norm but computes something else."""

    path: str
    module: nn.Module
    found: Recognised

    def __str__(self) -> str:
        cls = parametrize.type_before_parametrizations(self.module)
        changes = ", ".join(self.found.changed)
        return f"{self.path or 'the module itself'} ({cls.__module__}.{cls.__qualname__} changes {changes})"


def recognise(module: nn.Module) -> Recognised | None:
    """Find the known batch norm class that `module` is or derives from; None for anything else."""
    if isinstance(module, torch.jit.ScriptModule):
        kind = _SCRIPTED.get(getattr(module, "original_name", ""))
        return None if kind is None else Recognised(kind, BatchNormBase, ("forward (compiled by TorchScript)",))
    # torch.nn.utils.parametrize gives each instance a class of its own, with properties for what it computes.
    cls = parametrize.type_before_parametrizations(module)
    for base in cls.__mro__:
        kind = _OWN.get(base) or _FOREIGN.get((base.__module__.split(".")[0], base.__name__))
        if kind == "mmcv" and issubclass(base, BatchNormBase):
            continue  # MMCV's own derives from nn.Module; this one wraps torch's
        if kind is not None:
            return Recognised(kind, base, tuple(_changes(module, cls, base, kind)))
    return None


def known_kind(module: nn.Module) -> str | None:
    """Return the kind of a known, unchanged batch norm."""
    found = recognise(module)
    return None if found is None or found.changed else found.kind


def is_sync_batch_norm(module: nn.Module) -> bool:
    """Whether `module` is, or derives from, a batch norm whose statistics are, or may be, those of a group."""
    found = recognise(module)
    return found is not None and found.kind in SYNC_KINDS


def unknown_batch_norms(model: nn.Module, *, ours: bool = False) -> list[Unknown]:
    """Find modules that derive from a known batch norm but compute something else; subclasses of bnexport's own on
    request.
    """
    found = ((path, module, recognise(module)) for path, module in model.named_modules())
    return [
        Unknown(path, module, one)
        for path, module, one in found
        if one and one.changed and (ours or one.kind != "ours")
    ]


def listed(unknown: Iterable[Unknown], most: int = 5) -> str:
    """Format the modules for a message."""
    texts = [str(one) for one in unknown]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def _changes(module: nn.Module, cls: type, base: type, kind: str) -> Iterator[str]:
    for name in _METHODS:
        if name in module.__dict__:
            yield f"{name} (set on the instance)"
    if base.__name__.startswith("InPlaceABN") and "weight" not in module._parameters:
        yield "weight (computed)"  # it scales by |weight| + eps, which needs the parameter itself
    for name in (*_METHODS, *_SPECIAL_METHODS, *_READ, *_USED.get(kind, ())):
        attribute = inspect.getattr_static(cls, name, None)
        if attribute is inspect.getattr_static(base, name, None):
            continue
        if name in module.__dict__ and not inspect.isdatadescriptor(attribute):
            continue  # the instance's own value comes first
        yield name
