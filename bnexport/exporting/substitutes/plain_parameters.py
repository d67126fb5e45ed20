"""Parametrized weights as plain parameters, for TorchScript: torch refuses to script torch.nn.utils.parametrize."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize


def with_plain_parameters(copied: nn.Module) -> nn.Module:
    """Give each parametrized weight of `copied`, a copy in eval mode, the value that it has there, in place.

    torch's remove_parametrizations changes the class, which the original shares, and the tensors, which layers share.
    """
    for module in [module for module in copied.modules() if parametrize.is_parametrized(module)]:
        names = list(module.parametrizations)  # type: ignore[arg-type]
        with torch.no_grad():
            values = {name: getattr(module, name).clone() for name in names}
        module.__class__ = parametrize.type_before_parametrizations(module)
        del module._modules["parametrizations"]
        module._parameters.update({name: nn.Parameter(value) for name, value in values.items()})
    return copied
