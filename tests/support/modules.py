"""Modules in one expression."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def compose(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module whose forward is a function of itself and of its inputs; tensors among the parts become buffers."""
    made = type("Model", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        buffer = isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter)
        made.register_buffer(name, part) if buffer else setattr(made, name, part)
    return made
