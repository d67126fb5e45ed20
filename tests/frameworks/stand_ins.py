"""Makes packages whose compiled parts do not fit a CPU build of torch importable.

`python -m tests.frameworks.stand_ins ARGUMENTS` is bnexport's command line with them.
"""

import sys
import types
from typing import Any

import torch


def install() -> None:
    """All of them, in this process, before anything of these packages is imported; once."""
    if "mmcv._ext" in sys.modules:
        return
    torchvision()
    mmcv_extension()
    # Its classes derive from classes that transformers does not have any more.
    sys.modules["mmpretrain.models.multimodal"] = types.ModuleType("mmpretrain.models.multimodal")


def torchvision() -> None:
    """torchvision registers fake kernels for operators of a library that a CPU build of torch does not load."""
    if "torchvision._meta_registrations" in sys.modules:
        return
    sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
    torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def mmcv_extension() -> None:
    """mmcv._ext with the five functions of MMCV's SyncBatchNorm, from their formulas; the others cannot be called.

    Shapes: input (N, C, S), statistics (C,). Each function writes its results into tensors that it gets.
    """
    extension: Any = types.ModuleType("mmcv._ext")
    functions = (forward_mean, forward_var, forward_output, backward_param, backward_data)
    for function in functions:
        setattr(extension, f"sync_bn_{function.__name__}", function)
    extension.__getattr__ = lambda name: None if not name.startswith("__") else _raise(name)
    sys.modules["mmcv._ext"] = extension


def _raise(name: str) -> None:
    raise AttributeError(name)


def _row(statistic: torch.Tensor) -> torch.Tensor:
    return statistic[None, :, None]


def forward_mean(input: torch.Tensor, mean: torch.Tensor) -> None:
    mean.copy_(input.float().mean((0, 2)))


def forward_var(input: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> None:
    """The mean square distance to the group's mean."""
    var.copy_((input.float() - _row(mean)).square().mean((0, 2)))


def forward_output(
    input: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    norm: torch.Tensor,
    std: torch.Tensor,
    output: torch.Tensor,
    eps: float,
    momentum: float,
    group_size: int,
) -> None:
    std.copy_((var + eps).sqrt())
    x_hat = (input.float() - _row(mean)) / _row(std)
    if norm.numel():
        norm.copy_(x_hat)
    output.copy_(x_hat * _row(weight) + _row(bias))
    count = input.numel() // input.shape[1] * group_size
    unbiased = var * (count / (count - 1) if count > 1 else 1.0)
    running_mean.mul_(1 - momentum).add_(momentum * mean)
    running_var.mul_(1 - momentum).add_(momentum * unbiased)


def backward_param(
    grad_output: torch.Tensor, norm: torch.Tensor, grad_weight: torch.Tensor, grad_bias: torch.Tensor
) -> None:
    grad_weight.copy_((grad_output.float() * norm).sum((0, 2)))
    grad_bias.copy_(grad_output.float().sum((0, 2)))


def backward_data(
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    grad_weight: torch.Tensor,
    grad_bias: torch.Tensor,
    norm: torch.Tensor,
    std: torch.Tensor,
    grad_input: torch.Tensor,
) -> None:
    """grad_weight and grad_bias are the group's means, as MMCV reduces them before."""
    count = grad_output.numel() // grad_output.shape[1]
    inner = grad_output.float() - (_row(grad_bias) + norm * _row(grad_weight)) / count
    grad_input.copy_(inner * _row(weight / std))


if __name__ == "__main__":
    from bnexport.cli import main

    install()
    sys.argv[0] = "bnexport"
    sys.exit(main())
