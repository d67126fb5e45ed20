"""Run torch's own SyncBatchNorm tests on our module, in processes of a gloo group.

The tests are imported from the installed torch and changed at run time: device decorators are
unwrapped, `.cuda()` does nothing, DistributedDataParallel drops its devices, torch.nn.SyncBatchNorm
is ours.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from bnexport import SyncBatchNorm, convert_sync_batchnorm
from models.deep_resnet import Bottleneck

# What a test mentions, itself or in a helper that it calls, when it is about SyncBatchNorm.
CLASS = "SyncBatchNorm"


def names(group: dist.ProcessGroup) -> list[str]:
    """Names of torch's distributed tests that mention SyncBatchNorm."""
    base = _suite().DistributedTest._DistTestBase
    methods = dict(inspect.getmembers(base, inspect.isfunction))
    helpers = [name for name, method in methods.items() if not name.startswith("test") and _mentions(method, CLASS)]
    return sorted(
        name
        for name, method in methods.items()
        if name.startswith("test") and any(_mentions(method, text) for text in (CLASS, *helpers))
    )


def run(group: dist.ProcessGroup, name: str) -> int:
    """Run the test `name`; return how many modules of ours were called. Raises what the test raises."""
    suite = _suite()
    case = _case(suite)(name)
    case.rank, calls = dist.get_rank(), 0

    def count(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        nonlocal calls
        calls += isinstance(module, SyncBatchNorm)

    # Every rank draws the same numbers, and models of equal weights.
    torch.manual_seed(0)
    with _on_cpu(suite), nn.modules.module.register_module_forward_hook(count):
        _unwrapped(type(case), name)(case)
    dist.barrier()
    return calls


def _suite() -> types.ModuleType:
    # torch's file reads these when it is imported. A file:// method makes its tests save and load models on the way.
    os.environ.update(BACKEND="gloo", INIT_METHOD="file://unused", WORLD_SIZE=str(dist.get_world_size()))
    # torch's test classes derive from this package's, whose additions the SyncBatchNorm tests do not use.
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    return importlib.import_module("torch.testing._internal.distributed.distributed_test")


def _case(suite: types.ModuleType) -> type[Any]:
    from torch.testing._internal.common_utils import TestCase

    class Case(suite.DistributedTest._DistTestBase, TestCase):  # type: ignore[name-defined, misc]
        rank = 0
        world_size = property(lambda self: dist.get_world_size())

        def _barrier(self, *arguments: Any, **keywords: Any) -> None:
            dist.barrier()

    return Case


def _unwrapped(case: type, name: str) -> Callable[..., Any]:
    """The test without its decorators, which ask for GPUs or skip."""
    return inspect.unwrap(getattr(case, name))


def _mentions(method: Callable[..., Any], text: str) -> bool:
    return text in inspect.getsource(inspect.unwrap(method))


def _nested_network() -> nn.Module:
    """A network whose first batch norm has the path of torchvision's resnet50."""
    network = nn.Module()
    network.layer1 = nn.Sequential(Bottleneck(4, 4, 1, nn.BatchNorm2d), Bottleneck(16, 4, 1, nn.BatchNorm2d))
    return network


class _Torch(types.ModuleType):
    """torch as its test file sees it: a device number is the CPU."""

    cuda = types.SimpleNamespace(set_device=lambda device: None, current_device=lambda: torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(number: int) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def randn(*sizes: int, device: Any = None, **keywords: Any) -> torch.Tensor:
        return torch.randn(*sizes, **keywords)


@contextlib.contextmanager
def _on_cpu(suite: types.ModuleType) -> Iterator[None]:
    parallel = nn.parallel.DistributedDataParallel

    def without_devices(module: nn.Module, device_ids: Any = None, **keywords: Any) -> nn.Module:
        return parallel(module, **keywords)

    def itself(value: Any, device: Any = None) -> Any:
        return value

    vision = types.SimpleNamespace(models=types.SimpleNamespace(resnet50=_nested_network))
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (suite, "torch", _Torch("torch")),
            (suite, "torchvision", vision),
            (nn, CLASS, SyncBatchNorm),
            (SyncBatchNorm, "convert_sync_batchnorm", staticmethod(convert_sync_batchnorm)),
            (nn.parallel, "DistributedDataParallel", without_devices),
            (nn.Module, "cuda", itself),
            (torch.Tensor, "cuda", itself),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield
