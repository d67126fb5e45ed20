"""Groups of real processes over gloo, against the joint batch in float64."""

import os
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from bnexport.errors import GroupError, UsageError
from bnexport.runtime import groups
from tests.support import kernel_reference as reference
from tests.support.cluster import join, run_once
from tests.support.node_models import forward_feeds, forward_model, grad_model, run, session


def run_steps(group: Any, model: bytes, feeds: list) -> list | str:
    """The outputs of each step of this rank, or the error that ended them."""
    groups.register_group("world", group)
    try:
        opened = session(model)
        return [run(opened, step) for step in feeds[dist.get_rank(group)]]
    except Exception as error:
        return str(error)
    finally:
        groups.unregister_group("world")


def run_until_a_peer_dies(rank: int, size: int, port: int, model: bytes, step: dict) -> list | str:
    """Two steps, before the second of which rank 1 is gone."""
    join(rank, size, port)
    groups.register_group("world", dist.group.WORLD)
    opened = session(model)
    run(opened, step)
    if rank == 1:
        os._exit(0)
    try:
        return [run(opened, step)]
    except Exception as error:
        return str(error)


def run_group(cluster, size: int, feeds, *, model: bytes):
    """Runs `size` processes; what each returned for its steps `feeds[rank]`, or the text of its error."""
    return cluster.call(size, run_steps, model, feeds)


def check_forward(results, xs, common, **options):
    vectors = [common[name] for name in ("weight", "bias", "running_mean", "running_var")]
    expected = reference.group_forward(xs, *vectors, **options)
    for got, want in zip(results, expected, strict=True):
        named = {name.removesuffix("_out").removeprefix("saved_"): value for name, value in got.items()}
        reference.check_forward("float32", want, vectors[0], vectors[2:], **named)


# Every step is another split of the batch.
SPLITS = {
    2: [
        ((3, 5, 4, 6), (3, 5, 4, 6)),
        ((1, 5, 4, 6), (6, 5, 4, 6)),
        ((2, 5, 3, 3), (2, 5, 8, 7)),
        ((0, 5, 4, 6), (3, 5, 4, 6)),
        ((0, 5, 4, 6), (0, 5, 4, 6)),
    ],
    3: [((2, 5, 4, 4), (1, 5, 9, 9), (0, 5, 4, 4))],
}


@pytest.mark.parametrize(("size", "stats_mode"), [(2, "exact"), (2, "default"), (2, "N"), (3, "exact"), (3, "default")])
def test_forward_equals_joint_batch(cluster, size, stats_mode):
    rng = np.random.default_rng(size)
    common = forward_feeds(rng, (1, 5, 1, 1))
    inputs = [
        [(rng.normal(size=shape) + rank).astype(np.float32) for rank, shape in enumerate(shapes)]
        for shapes in SPLITS[size]
    ]
    feeds = [[common | {"input": xs[rank]} for xs in inputs] for rank in range(size)]
    model = forward_model(group="world", group_size=size, stats_mode=stats_mode, momentum=0.25)
    results = run_group(cluster, size, feeds, model=model)
    assert not any(isinstance(result, str) for result in results), results
    for step, xs in enumerate(inputs):
        check_forward([result[step] for result in results], xs, common, stats_mode=stats_mode, momentum=0.25)


@pytest.mark.parametrize(
    ("size", "stats_mode", "reduction"),
    [(2, "exact", "sum"), (2, "N", "mean"), (3, "default", "local"), (3, "exact", "mean")],
)
def test_backward_equals_joint_batch(cluster, size, stats_mode, reduction):
    rng = np.random.default_rng(10 + size)
    shapes = [(3, 5, 4, 6), (1, 5, 7, 2), (0, 5, 4, 6)][:size]
    xs = [(rng.normal(size=shape) + rank).astype(np.float32) for rank, shape in enumerate(shapes)]
    dys = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    weight = rng.normal(size=5).astype(np.float32)
    statistics = reference.group_forward(xs, weight, stats_mode=stats_mode)[0]
    mean, invstd = statistics.mean.astype(np.float32), statistics.invstd.astype(np.float32)
    feeds = [
        [{"grad_output": dy, "input": x, "weight": weight, "saved_mean": mean, "saved_invstd": invstd}]
        for dy, x in zip(dys, xs, strict=True)
    ]
    model = grad_model(group="world", group_size=size, stats_mode=stats_mode, grad_reduction=reduction)
    results = run_group(cluster, size, feeds, model=model)
    assert not any(isinstance(result, str) for result in results), results
    options = {"stats_mode": stats_mode, "grad_reduction": reduction}
    expected = reference.group_backward(dys, xs, weight, mean, invstd, **options)
    for (got,), want in zip(results, expected, strict=True):
        reference.check_backward(
            "float32", want, weight, mean, invstd, np.concatenate([dy.ravel() for dy in dys]), **got
        )


def test_dead_peer_is_an_error():
    """It closes its connections: the others need not wait for the group's timeout of minutes."""
    step = forward_feeds(np.random.default_rng(7), (2, 4, 3, 3))
    results = run_once(2, run_until_a_peer_dies, forward_model(group="world", group_size=2), step, timeout=100)
    assert results[1] is None
    assert "MMCVSyncBatchNorm" in results[0] and "the collective failed" in results[0], results


def test_unregistered_group_is_an_error_and_says_what_to_call():
    feeds = forward_feeds(np.random.default_rng(8), (2, 4, 3, 3))
    with pytest.raises(Exception, match=r"bn1.*'nowhere'.*bnexport\.register_group"):
        run(forward_model(group="nowhere", group_size=2), feeds)


def test_unregistered_group_does_not_matter_in_inference():
    feeds = forward_feeds(np.random.default_rng(8), (2, 4, 3, 3))
    alone = run(forward_model(training_mode=0), feeds)
    for name, value in run(forward_model(group="nowhere", group_size=2, training_mode=0), feeds).items():
        np.testing.assert_array_equal(value, alone[name], err_msg=name)


@pytest.mark.parametrize("name", ["", None, 3, "a\0b"])
def test_bad_group_names(name):
    with pytest.raises(UsageError, match="register_group: name"):
        groups.register_group(name)


def test_without_torch_distributed():
    with pytest.raises(GroupError, match="init_process_group"):
        groups.register_group("world")
    with pytest.raises(GroupError, match="unregister_group"):
        groups.unregister_group("world")


def _register_without_a_cpu_backend(group) -> str:
    from unittest import mock

    from bnexport.sync_bn import distributed

    with mock.patch.object(distributed, "backend_of", lambda name, device: None if device == "cpu" else "nccl"):
        try:
            groups.register_group("on-gpus", group)
        except GroupError as error:
            return str(error)
    return "registered"


def test_a_group_without_a_backend_for_cpu_tensors_is_refused(cluster):
    (message,) = cluster.run(1, _register_without_a_cpu_backend)
    assert message.startswith("register_group('on-gpus'): got a group without a backend for CPU tensors, expected one")
    assert "cpu:gloo,cuda:nccl" in message
