"""Processes with different numbers of batches against one process with the joint batches."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bnexport
from bnexport.errors import UsageError
from tests.support import cluster
from tests.support.cluster import Raised, short_group


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3)
    last = nn.BatchNorm2d(3, momentum=None), nn.Flatten(), nn.Linear(3 * 4, 2)
    return nn.Sequential(*layers, *last).double()


def _batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(2 + rank, 2, 6, 6, generator=generator, dtype=torch.float64) * (1 + step) + rank


def _tools(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def _train(group, batches, accumulate, zero, options):
    """Two epochs; the states of the model, the optimizer and the scheduler."""
    rank = dist.get_rank(group)
    model = DistributedDataParallel(bnexport.convert_sync_batchnorm(_network(), group), process_group=group, **options)
    optimizer, scheduler = _tools(model)
    for _ in range(2):
        with bnexport.join(model, optimizer, scheduler):
            for step in range(batches[rank]):
                last = step % accumulate == accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    (model(_batch(rank, step)).square().sum() * dist.get_world_size(group)).backward()
                if last:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad(set_to_none=not zero)
    return copy.deepcopy((model.module.state_dict(), optimizer.state_dict(), scheduler.state_dict()))


def _expected(batches, accumulate):
    model = _network()
    optimizer, scheduler = _tools(model)
    for _ in range(2):
        for step in range(max(batches)):
            joint = torch.cat([_batch(rank, step) for rank, count in enumerate(batches) if step < count])
            model(joint).square().sum().backward()
            if step % accumulate == accumulate - 1:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict(), scheduler.state_dict()


@pytest.mark.parametrize(
    ("batches", "accumulate", "zero", "options"),
    [
        ((5, 3, 0), 1, False, {}),
        ((0, 3, 5), 1, True, {"find_unused_parameters": True}),
        ((4, 2, 3), 1, False, {"gradient_as_bucket_view": True, "broadcast_buffers": False}),
        ((6, 3, 0), 2, False, {}),
        ((2, 6), 2, True, {}),
        ((3, 3), 1, False, {"static_graph": True}),
    ],
)
def test_every_process_ends_as_one_with_the_joint_batches(cluster, batches, accumulate, zero, options) -> None:
    state, optimizer, scheduler = _expected(batches, accumulate)
    results = cluster.call(len(batches), _train, batches, accumulate, zero, options)
    for got, got_optimizer, got_scheduler in results:
        for name, value in state.items():
            torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, msg=name)
        for key, values in optimizer["state"].items():
            momentum = got_optimizer["state"][key]["momentum_buffer"]
            torch.testing.assert_close(momentum, values["momentum_buffer"], rtol=1e-12, atol=1e-12)
        assert got_scheduler == scheduler


def _groups(group):
    """Two batch norms of which one synchronises pairs, a loop that evaluates in between; nobody waits for long."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    model = bnexport.convert_sync_batchnorm(_network(), group)
    model[4].group = pairs[rank // 2]
    model = DistributedDataParallel(model, process_group=group)
    with bnexport.join(model):
        for step in range(rank + 1):
            model.eval()
            with torch.no_grad():
                model(input=_batch(rank, step))
            model.train()
            model(_batch(rank, step)).sum().backward()
    with bnexport.join(model):
        pass
    return world, copy.deepcopy(model.module.state_dict())


def test_groups_and_evaluation(cluster) -> None:
    results = cluster.call(3, _groups)
    model = _network()
    for step in range(3):
        model[1](model[0](torch.cat([_batch(rank, step) for rank in range(step, 3)])))
    for _, state in results:
        for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
            torch.testing.assert_close(state[name], model.state_dict()[name], rtol=1e-12, atol=1e-12)


def _ends_early(rank, size, port, end):
    """The first process's block ends by `end` in its second step."""
    cluster.join(rank, size, port)
    short = short_group(size, 4)
    model = DistributedDataParallel(bnexport.convert_sync_batchnorm(_network(), short), process_group=short)
    with bnexport.join(model):
        for step in range(3):
            if rank == 0 and step == 1:
                if end == "raises":
                    raise ValueError("a broken image")
                model.eval()
            model(_batch(rank, step)).sum().backward()


@pytest.mark.parametrize("end", ["raises", "evaluates"])
def test_a_process_that_does_something_else_ends_all(end) -> None:
    results = cluster.run_once(2, _ends_early, end)
    assert all(isinstance(result, Raised) for result in results)
    if end == "raises":
        assert results[0].message == "a broken image"
        assert [result.type for result in results[1:]] == ["GroupError"]
    else:
        assert all("training: rank 0 False, rank 1 True" in result.message for result in results)


def test_only_a_parallel_model() -> None:
    with pytest.raises(UsageError, match="got Sequential, expected a torch"), bnexport.join(_network()):
        pass
