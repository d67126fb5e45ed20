"""From any batch norm to ours, and back to torch.nn.BatchNorm.

Classes of other packages are recognised by name, without importing the package. A converted module
takes over the old one's whole state (parameters, buffers, hooks, parametrisations, flags), so that
dtype, device, training flag and sharing stay as they were.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bnexport.errors import UsageError
from bnexport.sync_bn.module import SyncBatchNorm, new_layer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SyncBatchNormActivation(SyncBatchNorm):
    """SyncBatchNorm followed by an activation, as inplace_abn and apex fuse them."""

    activation: str
    activation_param: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _ACTIVATIONS[self.activation](super().forward(input), self.activation_param)


class FrozenSyncBatchNorm(SyncBatchNorm):
    """Fixed statistics and parameters, whatever train() says, as detectron2's FrozenBatchNorm2d."""

    def train(self, mode: bool = True) -> FrozenSyncBatchNorm:
        return super().train(False)


# What torch.nn.Module and torch's batch norms keep in an instance.
_MODULE_STATE = frozenset(nn.BatchNorm2d(1).__dict__)

_ACTIVATIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "identity": lambda x, _: x,
    "relu": lambda x, _: torch.relu(x),
    "leaky_relu": nn.functional.leaky_relu,
    "elu": nn.functional.elu,
}


def convert_sync_batchnorm(module: nn.Module, process_group: ProcessGroup | None = None) -> nn.Module:
    """`module` with every batch norm in it replaced by bnexport.SyncBatchNorm.

    Recognised: torch's BatchNorm1d/2d/3d and SyncBatchNorm and their subclasses (mmengine's reverted
    class, apex's), MMCV's SyncBatchNorm (keeps its stats_mode; gradients are the group's mean, as
    MMCV defines them), detectron2's NaiveSyncBatchNorm and FrozenBatchNorm2d, inplace_abn's ABN
    classes. Other modules are left alone.

    Args:
        module: changed in place below its root; the root itself is replaced when it is a batch norm.
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
    return replace(module, functools.partial(to_sync, process_group=process_group))


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """`module` with every sync batch norm (ours, torch's, MMCV's, ...) replaced by torch.nn.BatchNorm.

    A module that was converted from BatchNorm1d/2d/3d returns to that class. Where the use is not
    known the result is a BatchNorm2d that accepts every rank >= 2, so that torch.fx's fuse, which
    asks for the exact class, understands it.

    Examples:
        >>> from torch import nn
        >>> type(revert_sync_batchnorm(nn.SyncBatchNorm(4))).__name__
        'BatchNorm2d'
    """
    return replace(module, _to_plain)


def is_sync_batch_norm(module: nn.Module) -> bool:
    """Whether `module` is a batch norm whose statistics are, or may be, those of a group."""
    return _kind(module) in ("ours", "torch_sync", "mmcv", "apex", "detectron2_naive", "inplace_abn")


def replace(module: nn.Module, convert: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """`module` with each submodule for which `convert` returns another one replaced; shared ones stay shared."""
    memo: dict[int, nn.Module] = {}

    def visit(old: nn.Module) -> nn.Module:
        if id(old) in memo:
            return memo[id(old)]
        new = convert(old)
        memo[id(old)] = old if new is None else new
        if new is None:
            for name, child in list(old._modules.items()):
                if child is not None:
                    replacement = visit(child)
                    if replacement is not child:
                        old._modules[name] = replacement
        return memo[id(old)]

    return visit(module)


def _kind(module: nn.Module) -> str | None:
    """Which known batch norm `module` is, by the names in its class hierarchy."""
    if isinstance(module, nn.SyncBatchNorm):
        return "torch_sync"
    if isinstance(module, SyncBatchNorm):
        return "ours"
    names = {(base.__module__.split(".")[0], base.__name__) for base in type(module).__mro__}
    bare = {name for _, name in names}
    if "SyncBatchNorm" in bare:
        return "mmcv" if hasattr(module, "stats_mode") else "apex"
    if "NaiveSyncBatchNorm" in bare:
        return "detectron2_naive"
    if bare & {"FrozenBatchNorm2d", "FrozenBatchNorm", "FrozenBatchNorm3d"}:
        return "frozen"
    if bare & {"ABN", "InPlaceABN", "InPlaceABNSync"}:
        return "inplace_abn"
    if isinstance(module, _BatchNorm):
        return "batch_norm"
    return None


def to_sync(old: nn.Module, process_group: ProcessGroup | None) -> nn.Module | None:
    """Our module for a batch norm of any known class, with its state; None for anything else."""
    kind = _kind(old)
    if kind is None or (kind == "ours" and process_group is None):
        return None
    if isinstance(old, nn.modules.lazy.LazyModuleMixin) and old.has_uninitialized_params():
        raise UsageError(f"{type(old).__name__}: its parameters are uninitialised; run one forward before converting")
    fuse_relu = kind == "apex" and bool(getattr(old, "fuse_relu", False))
    if kind == "frozen":
        new_class: type[SyncBatchNorm] = FrozenSyncBatchNorm
    elif kind == "inplace_abn" or fuse_relu:
        new_class = SyncBatchNormActivation
    else:
        new_class = (
            type(old) if isinstance(old, SyncBatchNorm) and not hasattr(old, "parametrizations") else SyncBatchNorm
        )
    new = _take_over(old, new_class)
    group = process_group
    for name in ("process_group", "group"):
        if group is None:
            group = _as_group(getattr(old, name, None))
    defaults = {
        "eps": 1e-5,
        "momentum": 0.1,
        "affine": new._parameters.get("weight") is not None,
        "track_running_stats": True,
    }
    for name, value in defaults.items():
        new.__dict__.setdefault(name, value)
    if "num_features" not in new.__dict__:
        new.__dict__["num_features"] = _channels(new)
    new.__dict__.update(
        group=group,
        stats_mode=_stats_mode(old, kind),
        grad_reduction="mean" if kind == "mmcv" else getattr(old, "grad_reduction", "local"),
        _layer=new_layer(),
        _lost_group=None,
        reverts_to=_plain_class(old),
    )
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        new._buffers.setdefault(name, None)
    for name in ("weight", "bias"):
        new._parameters.setdefault(name, None)
    if fuse_relu:
        new.__dict__.update(activation="relu", activation_param=0.0)
    if kind == "frozen":
        _thaw(new)
    if kind == "inplace_abn":
        _take_activation(new, old)
    if new.running_mean is not None and new.num_batches_tracked is None:
        new._buffers["num_batches_tracked"] = torch.tensor(0, dtype=torch.long, device=new.running_mean.device)
    return new


def _to_plain(old: nn.Module) -> nn.Module | None:
    kind = _kind(old)
    if kind is None or kind == "batch_norm":
        return None
    if kind != "ours":
        sync = to_sync(old, None)
        assert sync is not None
        return _to_plain(sync)
    assert isinstance(old, SyncBatchNorm)
    plain: type[nn.Module] | None = old.__dict__.get("reverts_to")
    new = _take_over(old, plain or nn.BatchNorm2d)
    for name in ("group", "stats_mode", "grad_reduction", "_layer", "_lost_group", "reverts_to"):
        new.__dict__.pop(name, None)
    if plain is None:
        new._check_input_dim = _check_any_rank
    if isinstance(old, SyncBatchNormActivation) and old.activation != "identity":
        activation, parameter = new.__dict__.pop("activation"), new.__dict__.pop("activation_param")
        layers = {"relu": nn.ReLU(), "leaky_relu": nn.LeakyReLU(parameter), "elu": nn.ELU(parameter)}
        return nn.Sequential(new, layers[activation])
    if isinstance(old, FrozenSyncBatchNorm):
        new.eval()
    return new


def _check_any_rank(input: torch.Tensor) -> None:
    if input.dim() < 2:
        raise ValueError(f"expected an input of rank >= 2, got {input.dim()}")


def _take_over(old: nn.Module, new_class: type[nn.Module]) -> Any:
    """An instance of `new_class` with a copy of the state of `old`: same tensors, hooks and flags.

    Attributes that another package, or a user, put on the module come along, unless they would hide an
    attribute of the new class (MMCV keeps a number in `group_size`, a method of ours).
    """
    if hasattr(old, "parametrizations"):
        # torch.nn.utils.parametrize puts properties on a class of its own, made per instance.
        properties = {name: value for name, value in type(old).__dict__.items() if isinstance(value, property)}
        new_class = type(f"Parametrized{new_class.__name__}", (new_class,), properties)
    new = new_class.__new__(new_class)
    for key, value in old.__dict__.items():
        if key in _MODULE_STATE or not _hides(key, type(old), new_class):
            new.__dict__[key] = value.copy() if isinstance(value, dict) else value
    new.__dict__["_modules"] = dict(old._modules)
    return new


def _hides(key: str, old_class: type, new_class: type) -> bool:
    """Whether the instance attribute `key` would hide one of `new_class` that it did not hide in `old_class`."""
    if key == "_compiled_call_impl":  # torch.compile's, bound to the old module
        return True
    attribute = inspect.getattr_static(new_class, key, None)
    return attribute is not None and attribute is not inspect.getattr_static(old_class, key, None)


def _as_group(value: Any) -> Any:
    """A process group, or None for what stands for the default group (MMCV stores its own world)."""
    if value is None or isinstance(value, (int, str)) or not torch.distributed.is_available():
        return None
    return None if value is torch.distributed.group.WORLD else value


def _channels(module: nn.Module) -> int:
    for tensor in (
        module._buffers.get("running_mean"),
        module._parameters.get("weight"),
        module._buffers.get("weight"),
    ):
        if tensor is not None:
            return int(tensor.shape[0])
    raise UsageError(
        f"{type(module).__name__}: cannot tell its number of channels: no weight and no running statistics"
    )


def _stats_mode(old: nn.Module, kind: str) -> str:
    if kind in ("mmcv", "ours"):
        return str(getattr(old, "stats_mode", "default"))
    if kind == "detectron2_naive":
        return "N" if getattr(old, "_stats_mode", "") == "N" else "default"
    return "exact"


def _plain_class(old: nn.Module) -> type[nn.Module] | None:
    if "reverts_to" in old.__dict__:
        return old.__dict__["reverts_to"]
    for plain in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        if isinstance(old, plain):
            return plain
    return nn.BatchNorm2d if _kind(old) in ("detectron2_naive", "frozen") else None


def _thaw(new: FrozenSyncBatchNorm) -> None:
    """Frozen classes keep weight and bias as buffers; ours keeps them as parameters without gradient."""
    for name in ("weight", "bias"):
        buffer = new._buffers.pop(name, None)
        if buffer is not None:
            new._parameters[name] = nn.Parameter(buffer, requires_grad=False)
    new.__dict__.update(affine=new._parameters.get("weight") is not None, training=False)


def _take_activation(new: SyncBatchNormActivation, old: nn.Module) -> None:
    """inplace_abn's InPlace classes scale by |weight| + eps; its plain ABN by weight."""
    activation = getattr(old, "activation", "leaky_relu")
    if activation not in _ACTIVATIONS:
        raise UsageError(
            f"{type(old).__name__}: got activation {activation!r}, expected one of {', '.join(_ACTIVATIONS)}"
        )
    new.__dict__.update(activation=activation, activation_param=float(getattr(old, "activation_param", 0.01)))
    weight = new._parameters.get("weight")
    if weight is not None and any(base.__name__.startswith("InPlaceABN") for base in type(old).__mro__):
        new._parameters["weight"] = nn.Parameter(weight.detach().abs() + new.eps, requires_grad=weight.requires_grad)
