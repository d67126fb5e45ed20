"""The real inplace_abn, in inference, in a training step and exported, next to its conversion.

Prints one JSON object: for each class and activation the largest relative differences. Runs in the environment of
`environment`.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import bnexport
from tests.frameworks import stand_ins

CASES = (
    *((name, activation) for name in ("ABN", "InPlaceABN") for activation in ("leaky_relu", "elu", "identity")),
    ("ABN", "relu"),
    ("InPlaceABNSync", "leaky_relu"),
)


def network(norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    nn.init.normal_(norm.running_mean, std=0.1)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    with torch.no_grad():
        norm.weight[0] *= -1
    return nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), norm, nn.Conv2d(6, 2, 1))


def trained(net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, gradients and statistics of a step."""
    x = x.clone().requires_grad_()
    y = net.train()(x)
    y.square().mean().backward()
    tensors = {"output": y.detach(), "input": x.grad, **{name: value.grad for name, value in net.named_parameters()}}
    return tensors | {name: value for name, value in net.named_buffers() if name.endswith(("mean", "var"))}


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def compare(make: Callable[[], nn.Module], folder: Path) -> dict[str, Any]:
    net, twin = network(make()), network(make())  # its process group cannot be copied
    converted = bnexport.convert_sync_batchnorm(twin)
    x = torch.randn(4, 3, 9, 7)
    with torch.no_grad():
        inference = difference(converted.eval()(x), net.eval()(x))
    result = bnexport.export(net.eval(), x, folder / "m.onnx")
    training = {}
    if "Sync" not in type(net[1]).__name__:  # which trains on CUDA only: its CPU build lacks a function
        theirs, ours = trained(net, x), trained(converted, x)
        # The weight of an InPlaceABN is |weight| + eps in the conversion, so that a gradient may have the other sign.
        ours["1.weight"], theirs["1.weight"] = ours["1.weight"].abs(), theirs["1.weight"].abs()
        training = {name: difference(ours[name], value) for name, value in theirs.items()}
    return {
        "inference": inference,
        "training": training,
        "exported": result.verification.passed,
        "reference": result.verification.reference,
        "batch_norms": [result.report.before.sync_batch_norm, result.report.after.batch_norm],
        "attributes": sorted(name for name in vars(net[1]) if not name.startswith("_")),
        "state": sorted(net[1].state_dict()),
    }


def main() -> None:
    stand_ins.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    import inplace_abn

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, activation in CASES:
            make = functools.partial(getattr(inplace_abn, name), 6, activation=activation)
            results[f"{name} {activation}"] = compare(make, Path(folder))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
