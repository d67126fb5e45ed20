"""Losses by name, and example targets for them, used by the command line to export a step."""

from __future__ import annotations

from typing import Any

import torch

from bnexport.choices import LOSSES, VALUE_LOSSES
from bnexport.errors import UsageError
from bnexport.training.building.problem import Loss


def named_loss(name: str) -> Loss:
    """Return one of torch.nn.functional's losses, a mean over the rows. Raises UsageError."""
    if name not in LOSSES:
        raise UsageError(f"loss: got {name!r}, expected one of {', '.join(LOSSES)}, or MODULE:FUNCTION")
    loss: Loss = getattr(torch.nn.functional, name)
    return loss


def example_target(name: str, output: Any, generator: torch.Generator) -> torch.Tensor:
    """Create a random target of the loss `name` for a model output (N, C, *) or (N, *).

    Classes are int64 (N, *) below C; other targets are as the output, within [0, 1). Raises UsageError
    for an output that is not one tensor of such a shape.
    """
    if not isinstance(output, torch.Tensor):
        raise UsageError(
            f"--loss: {name} takes one tensor, the model returns a {type(output).__name__}; write a function of your "
            "own (MODULE:FUNCTION) and give an example with --target FILE.npy"
        )
    if name in VALUE_LOSSES:
        return torch.rand(output.shape, generator=generator, dtype=torch.float32).to(output.dtype)
    if output.dim() < 2:
        raise UsageError(f"--loss: {name} takes an output of shape (N, C, *), the model returns {tuple(output.shape)}")
    return torch.randint(0, output.shape[1], (output.shape[0], *output.shape[2:]), generator=generator)
