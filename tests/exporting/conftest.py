"""What several tests of exports ask for."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch.distributed as dist

from bnexport.exporting import onnx_target


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone, in which torch's own SyncBatchNorm trains on GPUs only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def wrong_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of exported convolutions are off by 5 %."""

    def wrong(model: ir.Model, *arguments: object, finish: Any = onnx_target.finish) -> None:
        finish(model, *arguments)
        weights = [value for value in model.graph.initializers.values() if len(value.shape or ()) == 4]
        assert weights
        for value in weights:
            value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.05), name=value.name)

    monkeypatch.setattr(onnx_target, "finish", wrong)
