"""Copies of modules: process groups are connections, which copies share."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def copy_model(model: nn.Module, *, share_parameters: bool = False) -> nn.Module:
    """A deep copy that shares process groups, which cannot be copied.

    share_parameters: the copy holds the same parameters, for runs and traces that do not change them;
    buffers, which a forward may change, are its own.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name in ("process_group", "group"):
            group = module.__dict__.get(name)
            if group is not None:
                memo[id(group)] = group
    if share_parameters:
        memo.update((id(parameter), parameter) for parameter in model.parameters())
    return copy.deepcopy(model, memo)
