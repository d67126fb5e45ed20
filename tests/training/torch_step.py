"""One training step with torch itself: torch.nn, autograd and torch.optim, from any state, in any precision."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bnexport import TrainingSession, model_io


def state_of(session: TrainingSession, folder: Path) -> dict[str, np.ndarray]:
    """All that a session keeps, under the names of a training graph."""
    session.save_checkpoint(folder / "state.safetensors", overwrite=True)
    return model_io.load_tensors(folder / "state.safetensors")[0]


OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def torch_step(
    model: nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    optimizer: str,
    options: Mapping[str, Any],
    state: Mapping[str, np.ndarray],
    batch: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
    clip_grad_norm: float | None = None,
) -> dict[str, np.ndarray]:
    """Loss and new state under the names of a training graph. `model` stays as it is."""
    model = copy.deepcopy(model).to(dtype)
    own = model.state_dict()  # with what modules say about its version
    for name, value in own.items():
        own[name] = torch.from_numpy(state[name]).to(value.dtype)
    model.load_state_dict(own)
    rule = OPTIMIZERS[optimizer](model.parameters(), **options)
    names = {parameter: name for name, parameter in model.named_parameters()}
    steps = int(state["optimizer.step"])
    for parameter, name in names.items():
        if steps and parameter.requires_grad:
            prefix = f"optimizer.{name}."
            kept = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            rule.state[parameter] = {kind: torch.from_numpy(value).to(dtype, copy=True) for kind, value in kept.items()}
            if optimizer != "sgd":
                rule.state[parameter]["step"] = torch.tensor(float(steps))
    inputs = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in batch]
    value = loss(model(*inputs[:-1]), inputs[-1])
    value.backward()
    if clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    rule.step()
    results = {"loss": value.detach().numpy(), "optimizer.step": np.array(steps + 1)}
    results |= {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for parameter, kept in rule.state.items():
        for kind, tensor in kept.items():
            if kind != "step" and tensor is not None:
                results[f"optimizer.{names[parameter]}.{kind}"] = tensor.detach().numpy()
    return results
