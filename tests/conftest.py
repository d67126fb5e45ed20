from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four gloo processes with groups of 1, 2, 3 and 4 of them."""
    started = Cluster(4)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
