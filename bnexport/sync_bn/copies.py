"""Copies of modules: process groups are connections, which copies share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from bnexport.errors import UnsupportedModelError


def copy_model(model: nn.Module, *, share_parameters: bool = False) -> nn.Module:
    """A deep copy that shares process groups, which cannot be copied.

    share_parameters: the copy holds the same parameters, for runs and traces that do not change them;
    buffers, which a forward may change, are its own.

    Raises UnsupportedModelError for a module that holds something else that cannot be copied, such as a lock.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name in ("process_group", "group") or _is_process_group(value):
                if value is not None:
                    memo[id(value)] = value
            elif isinstance(value, torch.Tensor) and not value.is_leaf:
                # A result of an earlier forward, or the weight that torch.nn.utils.weight_norm computes.
                memo[id(value)] = value.detach().clone()
    if share_parameters:
        # The first forward of a lazy module makes its parameters, in place.
        memo.update((id(p), p) for p in model.parameters() if not isinstance(p, UninitializedParameter))
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__}: cannot be copied, and bnexport works on a copy: {error};"
            " move what cannot be copied out of the module"
        ) from error


def _is_process_group(value: Any) -> bool:
    return torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup)
