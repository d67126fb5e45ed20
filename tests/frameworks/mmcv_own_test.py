"""MMCV's own test of its SyncBatchNorm with ours in its place: python -m tests.frameworks.mmcv_own_test FILE REDUCTION.

FILE is tests/test_ops/test_syncbn.py of MMCV, which is in its repository and in no package. It asks for 4 GPUs and
SLURM; here 4 gloo processes run it on the CPU, so `.cuda()` does nothing. It expects an AssertionError for a stats_mode
that there is not. Prints one JSON object: for each process, what each case raised (null where it passed).
Runs in the environment of `environment`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bnexport import SyncBatchNorm
from bnexport.errors import UsageError, first_line
from tests.frameworks import stand_ins
from tests.support.cluster import Raised, join, run_once

SIZE = 4


def _cases(rank: int, size: int, port: int, path: str, reduction: str) -> Any:
    join(rank, size, port)
    stand_ins.install()
    from mmcv import ops

    def ours(channels: int, group: Any = None, stats_mode: str = "default") -> nn.Module:
        try:
            module = SyncBatchNorm(channels, group=group, stats_mode=stats_mode, grad_reduction=reduction)
        except UsageError as error:
            raise AssertionError(str(error)) from error
        return module

    ops.SyncBatchNorm = ours
    torch.Tensor.cuda = lambda self: self  # type: ignore[method-assign,assignment]
    nn.Module.cuda = lambda self: self  # type: ignore[method-assign,assignment]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    os.environ |= {"SLURM_NTASKS": str(size), "SLURM_PROCID": str(rank)}
    spec = importlib.util.spec_from_file_location("test_syncbn", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    results = {}
    for name in sorted(vars(module.TestSyncBN)):
        if name.startswith("test_"):
            try:
                getattr(module.TestSyncBN(), name)()
                results[name] = None
            except Exception as error:
                results[name] = f"{type(error).__name__}: {first_line(error)}"
            dist.barrier()
    dist.destroy_process_group()
    return results


def main(path: Path, reduction: str) -> None:
    # By its module's name, under which the processes find it.
    from tests.frameworks.mmcv_own_test import _cases as cases

    results = run_once(SIZE, cases, str(path), reduction, timeout=600)
    for result in results:
        if isinstance(result, Raised):
            raise SystemExit(result.trace)
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
