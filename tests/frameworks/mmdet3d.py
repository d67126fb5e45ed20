"""mmdet3d's own batch norms (1.4.0, out of its wheel) against their conversion, in two processes of gloo."""

import importlib.util
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

import bnexport
from tests.sync_bn import lookalikes

SHAPES = {"NaiveSyncBatchNorm1d": (6, 4, 9), "NaiveSyncBatchNorm2d": (3, 4, 5, 5)}


def load(folder: str) -> types.ModuleType:
    """Import its file of batch norms, which needs nothing of mmengine but a decorator."""
    registry = types.ModuleType("mmengine.registry")
    registry.MODELS = types.SimpleNamespace(register_module=lambda _: lambda cls: cls)
    sys.modules |= {"mmengine": types.ModuleType("mmengine"), "mmengine.registry": registry}
    path = Path(folder) / "mmdet3d/models/layers/norm.py"
    spec = importlib.util.spec_from_file_location("mmdet3d.models.layers.norm", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mmdet3d.models.layers.norm"] = module
    spec.loader.exec_module(module)
    return module


def member(rank: int, folder: str, name: str, shape: tuple[int, ...]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)
    torch.manual_seed(0)
    theirs = getattr(load(folder), name)(shape[1])
    torch.nn.init.uniform_(theirs.weight, 0.5, 2)
    ours = bnexport.convert_sync_batchnorm(theirs)
    assert type(ours) is bnexport.SyncBatchNorm
    torch.manual_seed(rank + 1)
    value, slope, results = torch.randn(shape) * 2 + 1, torch.randn(shape), []
    for norm in (theirs, ours):
        x = value.clone().requires_grad_()
        y = norm(x)
        (y * slope).sum().backward()
        results.append((y, x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6)
    dist.destroy_process_group()


def two_processes(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "mmdet3d==1.4.0", "-d", str(folder)]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extract("mmdet3d/models/layers/norm.py", folder)
    for name, shape in SHAPES.items():
        multiprocessing.spawn(member, (str(folder), name, shape), nprocs=2)
        real, stand_in = (getattr(each, name)(4) for each in (load(str(folder)), lookalikes))
        assert type(real).__mro__[1] is type(stand_in).__mro__[1] and vars(real).keys() == vars(stand_in).keys()
