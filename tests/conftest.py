"""Environment of every test process: one thread for each, nothing sent, the expensive things shared."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch and ONNX Runtime are imported, here and in every process that a test starts. Two workers share the cores:
# tests of threads ask for as many as they need, and threads that wait do not spin. ONNX Runtime's telemetry is a
# database that all processes would write to.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import pytest
import torch

from tests.support import torch_registry, warm
from tests.support.cluster import Cluster

torch.set_num_threads(1)
if not warm.COLD:
    torch_registry.remember()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four gloo processes with groups of 1, 2, 3 and 4 of them."""
    started = Cluster(4)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
