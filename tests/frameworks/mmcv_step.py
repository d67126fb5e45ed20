"""Trains MMCV's own SyncBatchNorm and its conversion one step on two gloo processes and compares them.

Prints one JSON object: the largest difference of each tensor, and the attributes of MMCV's class.
Runs in the environment of `environment`.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bnexport import SyncBatchNorm, convert_sync_batchnorm
from tests.frameworks import stand_ins
from tests.support.cluster import Raised, join, run_once


def _tensors(net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = net(x)
    y.square().mean().backward()
    tensors = {"output": y.detach(), "grad_input": x.grad}
    tensors |= {f"grad of {name}": value.grad for name, value in net.named_parameters()}
    return tensors | {name: value for name, value in net.named_buffers() if "tracked" not in name}


def _step(rank: int, size: int, port: int) -> Any:
    join(rank, size, port)
    stand_ins.mmcv_extension()
    from mmcv.ops.sync_bn import SyncBatchNorm as TheirSyncBatchNorm

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), TheirSyncBatchNorm(4), nn.ReLU()).train()
    attributes = {name: type(value).__name__ for name, value in vars(net[1]).items() if not name.startswith("_")}
    state = sorted(net[1].state_dict())
    converted = convert_sync_batchnorm(copy.deepcopy(net[:1]).append(_clone(net[1])).append(nn.ReLU()))
    assert type(converted[1]) is SyncBatchNorm
    torch.manual_seed(rank + 1)
    x = torch.randn(4, 3, 6, 6)
    theirs, ours = _tensors(net, x), _tensors(converted, x)
    assert theirs.keys() == ours.keys()
    differences = {name: float((ours[name] - value).abs().max() / value.abs().max()) for name, value in theirs.items()}
    dist.barrier()
    dist.destroy_process_group()
    return {"differences": differences, "attributes": attributes, "state": state}


def _clone(norm: nn.Module) -> nn.Module:
    """A copy that shares the group, which cannot be copied."""
    clone = type(norm)(norm.num_features)
    clone.load_state_dict(norm.state_dict())
    return clone


if __name__ == "__main__":
    # By its module's name, under which the processes find it.
    from tests.frameworks.mmcv_step import _step as step

    results = run_once(2, step, timeout=300)
    for result in results:
        if isinstance(result, Raised):
            raise SystemExit(result.trace)
    print(json.dumps(results))
