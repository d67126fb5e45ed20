"""torch's own SyncBatchNorm tests, run on our module by gloo groups of two and three processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, Raised
from tests.sync_bn import torch_suite

pytestmark = pytest.mark.slow

CASES = [
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
    "test_DistributedDataParallel_SyncBatchNorm_half",
    "test_SyncBatchNorm_process_group",
    "test_ddp_inference",
    "test_ddp_sync_bn_training_vs_eval",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
]
# It asks DistributedDataParallel whether a module is an instance of torch's own class, which ours is not.
LEFT_OUT = ["test_sync_bn_logged"]
# It compares an attribute and runs no module.
NO_FORWARD = ["test_SyncBatchNorm_process_group"]


class Clusters:
    """A cluster of each size, started when it is needed."""

    def __init__(self) -> None:
        self.started: dict[int, Cluster] = {}

    def of(self, size: int) -> Cluster:
        if size not in self.started:
            self.started[size] = Cluster(size)
        return self.started[size]

    def drop(self, size: int) -> None:
        self.started.pop(size).close()


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    for size in list(clusters.started):
        clusters.drop(size)


def test_every_case_is_listed(clusters: Clusters) -> None:
    (found, _) = clusters.of(2).call(2, torch_suite.names)
    assert found == sorted(CASES + LEFT_OUT)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_case(clusters: Clusters, size: int, name: str) -> None:
    results = clusters.of(size).run(size, torch_suite.run, name)
    failed = [f"rank {rank}: {result.trace}" for rank, result in enumerate(results) if isinstance(result, Raised)]
    if failed:
        clusters.drop(size)  # its ranks may be in different places now
    assert not failed, "\n".join(failed)
    # Rank 0 called our module: torch's class was replaced.
    assert results[0] > 0 or name in NO_FORWARD
