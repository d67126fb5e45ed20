"""Example inputs given by keyword, as further positional inputs of the module."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bnexport.errors import UsageError


def as_positional(
    model: nn.Module, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor]
) -> tuple[nn.Module, tuple[torch.Tensor, ...], list[str]]:
    """Return a module that takes `args` and then the values of `kwargs` by position, all inputs, and their names.

    It shares submodules, parameters and buffers with `model`, which stays as it is. Raises UsageError for keywords that
    its forward does not take.
    """
    parameters = inspect.signature(model.forward).parameters
    any_name = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    unknown = [name for name in kwargs if name not in parameters]
    if unknown and not any_name:
        raise UsageError(f"kwargs: got {', '.join(unknown)}, expected among {', '.join(parameters)}")
    positional = [each.name for each in parameters.values() if each.kind is not each.KEYWORD_ONLY][: len(args)]
    twice = [name for name in positional if name in kwargs]
    if twice:
        raise UsageError(f"kwargs: got {', '.join(twice)}, which args hold already")
    cls, count, names = type(model), len(args), tuple(kwargs)

    def forward(self: Any, *inputs: torch.Tensor) -> Any:
        return cls.forward(self, *inputs[:count], **dict(zip(names, inputs[count:])))

    wrapped = copy.copy(model)
    wrapped.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    return wrapped, (*args, *kwargs.values()), [*positional, *names]
