"""Environment of every test process: one thread for each, nothing sent, interrupts heard, the expensive things shared."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

# Before torch and ONNX Runtime are imported, here and in every process that a test starts. Two workers share the cores:
# tests of threads ask for as many as they need, and threads that wait do not spin. ONNX Runtime's telemetry is a
# database that all processes would write to.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# A shell without job control lets what it runs in the background ignore interrupts, and so would every program that a
# test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

from tests.support import torch_registry, warm
from tests.support.cluster import Cluster

torch.set_num_threads(1)
if not warm.COLD:
    torch_registry.remember()


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: no collection of garbage walks over it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four gloo processes with groups of 1, 2, 3 and 4 of them."""
    started = Cluster(4)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
