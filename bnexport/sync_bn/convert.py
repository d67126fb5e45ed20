"""Conversion of any known batch norm to bnexport.SyncBatchNorm, and back to torch.nn.BatchNorm.

Which classes are known is in bnexport.sync_bn.recognition. A converted module takes over the old one's
whole state (parameters, buffers, hooks, parametrisations, flags), so that dtype, device, training flag
and sharing stay as they were.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from bnexport.errors import NotConvertedWarning, UsageError
from bnexport.sync_bn import distributed, recognition
from bnexport.sync_bn.module import SyncBatchNorm, new_layer
from bnexport.sync_bn.recognition import (
    SYNC_KINDS,
    BatchNormAct,
    FrozenBatchNorm,
    FrozenSyncBatchNorm,
    Recognised,
    SyncBatchNormAct,
    Unknown,
    known_kind,
    listed,
    recognise,
    unknown_batch_norms,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# What torch.nn.Module and torch's batch norms keep in an instance.
_MODULE_STATE = frozenset(nn.BatchNorm2d(1).__dict__)

_ACTIVATIONS: dict[str, Callable[[float], nn.Module]] = {
    "identity": lambda _: nn.Identity(),
    "relu": lambda _: nn.ReLU(),
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
}


def convert_sync_batchnorm(module: nn.Module, process_group: ProcessGroup | None = None) -> nn.Module:
    """Replace every batch norm in `module` by bnexport.SyncBatchNorm; return the module.

    Recognised: torch's BatchNorm1d/2d/3d and SyncBatchNorm, MMCV's SyncBatchNorm (keeps its stats_mode;
    gradients are the group's mean, as MMCV defines them), apex's, detectron2's and mmdet3d's NaiveSyncBatchNorm,
    detectron2's and torchvision's FrozenBatchNorm2d, inplace_abn's ABN classes, timm's BatchNormAct2d and
    SyncBatchNormAct with their activation and dropout; and subclasses of these that inherit what their
    forward uses (mmengine's two, for example). A class that changes it, or an instance with a forward of
    its own, stays as it is, and NotConvertedWarning names it. Other modules are left alone.

    Args:
        module: changed in place below its root, where submodules keep their identity; the root itself is
            replaced when it is a batch norm.
        process_group: the group of the new modules; None keeps what a module had, else the default.

    Returns the module, or its replacement. Parameters and buffers are the same tensors.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> weight = model[1].weight
        >>> model = convert_sync_batchnorm(model)
        >>> type(model[1])
        <class 'bnexport.sync_bn.module.SyncBatchNorm'>
        >>> model[1].weight is weight
        True
    """
    converted = replace(module, functools.partial(to_sync, process_group=process_group))
    _warn_of(unknown_batch_norms(converted))
    return converted


SyncBatchNorm.convert_sync_batchnorm = staticmethod(convert_sync_batchnorm)


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every sync batch norm (bnexport's, torch's, MMCV's, ...) in `module` by torch.nn.BatchNorm; return the
    module.

    A module that was converted from BatchNorm1d/2d/3d returns to that class. Where the use is not
    known the result is a BatchNorm2d that accepts every rank >= 2, so that torch.fx's fuse, which
    asks for the exact class, understands it. Frozen ones stay frozen. A subclass that changes what its
    base computes stays as it is, and NotConvertedWarning names it.

    Examples:
        >>> from torch import nn
        >>> type(revert_sync_batchnorm(nn.SyncBatchNorm(4))).__name__
        'BatchNorm2d'
    """
    reverted = replace(module, functools.partial(to_plain, split=True))
    _warn_of([unknown for unknown in unknown_batch_norms(reverted, ours=True) if unknown.found.kind in SYNC_KINDS])
    return reverted


def _warn_of(unknown: list[Unknown]) -> None:
    if unknown:
        warnings.warn(
            f"left as they are, since they compute something else than a batch norm: {listed(unknown)};"
            " derive such a class from bnexport.SyncBatchNorm, or let a module hold a batch norm and call it",
            NotConvertedWarning,
            stacklevel=3,
        )


def replace(module: nn.Module, convert: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Replace, in place, each submodule of `module` for which `convert` returns a new one.

    A submodule keeps its identity: a list, a hook or a function that refers to it refers to the new one.
    The root is replaced.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"module: got {type(module).__name__}, expected a torch.nn.Module")
    memo: dict[int, nn.Module] = {}

    def visit(old: nn.Module, path: str) -> nn.Module:
        if id(old) in memo:
            return memo[id(old)]
        try:
            new = convert(old)
        except UsageError as error:
            raise UsageError(f"{path}: {error}" if path else str(error)) from error
        if new is not None and path:
            become(old, type(new), new.__dict__)
        memo[id(old)] = result = new if new is not None and not path else old
        for name, child in list(result._modules.items()):
            if child is not None:
                visit(child, f"{path}.{name}" if path else name)
        return result

    return visit(module, "")


def become(module: nn.Module, new_class: type[nn.Module], state: dict[str, Any]) -> None:
    """Change the class and attributes of `module` in place, so that references to it stay valid."""
    module.__class__ = new_class
    module.__dict__.clear()
    module.__dict__.update(state)


def to_sync(old: nn.Module, process_group: ProcessGroup | None) -> nn.Module | None:
    """Return a SyncBatchNorm with the state of a batch norm of a known class; None for anything else."""
    found = recognise(old)
    if found is None or (found.changed and found.kind != "ours"):
        return None
    kind = found.kind
    if kind == "ours" and process_group is None:
        return None
    if isinstance(old, nn.modules.lazy.LazyModuleMixin) and old.has_uninitialized_params():
        raise UsageError(f"{type(old).__name__}: its parameters are uninitialised; run one forward before converting")
    fuse_relu = kind == "apex" and bool(getattr(old, "fuse_relu", False))
    activated = dict.fromkeys(("inplace_abn", "batch_norm_act", "timm_sync_act"), SyncBatchNormAct)
    classes = {"ours": parametrize.type_before_parametrizations(old), "frozen": FrozenSyncBatchNorm, **activated}
    new = _take_over(old, SyncBatchNormAct if fuse_relu else classes.get(kind, SyncBatchNorm))
    group = process_group
    for name in ("process_group", "group"):
        if group is None:
            group = _as_group(getattr(old, name, None))
    distributed.name_of(group)
    defaults = {
        "eps": 1e-5,
        "momentum": 0.1,
        "affine": new._parameters.get("weight") is not None,
        "track_running_stats": True,
    }
    for name, value in defaults.items():
        new.__dict__.setdefault(name, value)
    if "num_features" not in new.__dict__:
        new.__dict__["num_features"] = _channels(new, type(old).__name__)
    new.__dict__.update(
        group=group,
        stats_mode=_stats_mode(old, kind),
        grad_reduction="mean" if kind == "mmcv" else old.grad_reduction if kind == "ours" else "local",
        _layer=new_layer(),
        _lost_group=None,
        reverts_to=_plain_class(old, found),
    )
    counts = "num_batches_tracked" in new._buffers
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        new._buffers.setdefault(name, None)
    for name in ("weight", "bias"):
        if name not in new.__dict__:  # a hook computes it (torch.nn.utils.weight_norm)
            new._parameters.setdefault(name, None)
    if fuse_relu:
        recognition.fuse(new, nn.ReLU())
    if kind == "frozen":
        _thaw(new)
    if kind == "inplace_abn":
        _take_activation(new, old)
    if new.running_mean is not None and not counts:
        new._buffers["num_batches_tracked"] = torch.tensor(0, dtype=torch.long, device=new.running_mean.device)
    return new


def to_plain(old: nn.Module, *, split: bool = False) -> nn.Module | None:
    """Return a plain batch norm with the state of a sync or frozen one of a known class; None for anything else.

    split: a fused activation becomes a module of its own, behind a torch.nn.BatchNorm2d; names of
    parameters change by it. A module with hooks stays one, since hooks see what the whole of it returns.
    """
    kind = known_kind(old)
    if kind is None or kind in ("batch_norm", "batch_norm_act") or type(old) is FrozenBatchNorm:
        return None
    if kind != "ours":
        sync = to_sync(old, None)
        assert sync is not None
        return to_plain(sync, split=split)
    assert isinstance(old, SyncBatchNorm)
    plain: type[nn.Module] | None = old.__dict__.get("reverts_to")
    activated, frozen = isinstance(old, SyncBatchNormAct), isinstance(old, FrozenSyncBatchNorm)
    split = (
        split and activated and plain is None and recognition.FUSED in old._modules and not recognition.has_hooks(old)
    )
    fallback = FrozenBatchNorm if frozen else BatchNormAct if activated and not split else nn.BatchNorm2d
    new = _take_over(old, plain or fallback)
    for name in ("group", "stats_mode", "grad_reduction", "_layer", "_lost_group", "reverts_to"):
        new.__dict__.pop(name, None)
    if plain is None:
        new._check_input_dim = _check_any_rank
    if not split:
        return new
    return nn.Sequential(new, new._modules.pop(recognition.FUSED)).train(old.training)


def split_activation(old: nn.Module) -> nn.Module | None:
    """Return a Sequential of `norm`, `drop` and `act` for a batch norm with an activation and without hooks, else
    None.
    """
    if known_kind(old) != "batch_norm_act" or recognition.has_hooks(old):
        return None
    norm = _take_over(old, nn.BatchNorm2d)
    parts = {name: norm._modules.pop(name) for name in ("drop", "act", recognition.FUSED) if name in norm._modules}
    return nn.Sequential(OrderedDict(norm=norm, **parts)).train(old.training)


def _check_any_rank(input: torch.Tensor) -> None:
    if input.dim() < 2:
        raise ValueError(f"expected an input of rank >= 2, got {input.dim()}")


def _take_over(old: nn.Module, new_class: type[nn.Module]) -> Any:
    """Create an instance of `new_class` with a copy of the state of `old`: same tensors, hooks and flags.

    Attributes that another package, or a user, put on the module come along, unless they would hide an
    attribute of the new class (MMCV keeps a number in `group_size`, a method of ours).
    """
    if parametrize.is_parametrized(old):
        # torch.nn.utils.parametrize puts properties on a class of its own, made per instance.
        properties = {name: value for name, value in type(old).__dict__.items() if isinstance(value, property)}
        new_class = type(f"Parametrized{new_class.__name__}", (new_class,), properties)
    new = new_class.__new__(new_class)
    for key, value in old.__dict__.items():
        if key in _MODULE_STATE or not _hides(key, type(old), new_class):
            # Hooks stay in the dictionary that the handles to remove them know.
            new.__dict__[key] = value.copy() if key in ("_parameters", "_buffers", "_modules") else value
    return new


def _hides(key: str, old_class: type, new_class: type) -> bool:
    """Whether the instance attribute `key` would hide an attribute of `new_class` that it did not hide in
    `old_class`.
    """
    if key == "_compiled_call_impl":  # torch.compile's, bound to the old module
        return True
    attribute = inspect.getattr_static(new_class, key, None)
    return attribute is not None and attribute is not inspect.getattr_static(old_class, key, None)


def _as_group(value: Any) -> Any:
    """Return a process group, or None for a stand-in of the default group (MMCV stores its own world)."""
    if value is None or isinstance(value, (int, str)) or not torch.distributed.is_available():
        return None
    return None if value is torch.distributed.group.WORLD else value


def _channels(module: nn.Module, name: str) -> int:
    for tensor in (
        module._buffers.get("running_mean"),
        module._parameters.get("weight"),
        module._buffers.get("weight"),
    ):
        if tensor is not None:
            return int(tensor.shape[0])
    raise UsageError(f"{name}: cannot tell its number of channels: no weight and no running statistics")


def _stats_mode(old: nn.Module, kind: str) -> str:
    if kind in ("mmcv", "ours"):
        return str(getattr(old, "stats_mode", "default"))
    if kind == "detectron2_naive":
        return "N" if getattr(old, "_stats_mode", "") == "N" else "default"
    return "exact"


def _plain_class(old: nn.Module, found: Recognised) -> type[nn.Module] | None:
    """Return the class for revert_sync_batchnorm, or None if the use is unknown."""
    if "reverts_to" in old.__dict__:
        return old.__dict__["reverts_to"]
    if found.kind == "batch_norm_act":
        return found.base
    if found.kind == "frozen":
        return FrozenBatchNorm
    for plain in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        if isinstance(old, plain):
            return plain
    return nn.BatchNorm2d if found.kind == "detectron2_naive" else None


def _thaw(new: FrozenSyncBatchNorm) -> None:
    """Turn weight and bias into parameters without gradient; frozen classes keep them as buffers."""
    for name in ("weight", "bias"):
        buffer = new._buffers.pop(name, None)
        if buffer is not None:
            new._parameters[name] = nn.Parameter(buffer, requires_grad=False)
    new.__dict__.update(affine=new._parameters.get("weight") is not None, training=False)


def _take_activation(new: SyncBatchNorm, old: nn.Module) -> None:
    """Copy the activation of an inplace_abn module: InPlace classes scale by |weight| + eps, the plain ABN by
    weight.
    """
    activation = getattr(old, "activation", "leaky_relu")
    if activation not in _ACTIVATIONS:
        raise UsageError(
            f"{type(old).__name__}: got activation {activation!r}, expected one of {', '.join(_ACTIVATIONS)}"
        )
    recognition.fuse(new, _ACTIVATIONS[activation](float(getattr(old, "activation_param", 0.01))))
    weight = new._parameters.get("weight")
    if weight is not None and any(base.__name__.startswith("InPlaceABN") for base in type(old).__mro__):
        new._parameters["weight"] = nn.Parameter(weight.detach().abs() + new.eps, requires_grad=weight.requires_grad)
