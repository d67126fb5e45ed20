"""Groups of gloo processes against the closed forms and the joint batch."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import weakref
from concurrent import futures

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from bnexport import SyncBatchNorm, torch_versions
from bnexport.schema import GRAD_REDUCTIONS, STATS_MODES
from bnexport.sync_bn import distributed, kernels, operators
from tests.support import kernel_reference
from tests.support.cluster import Raised, join, run_once, short_group

C = 3


def _data(shapes, dtype="float64", mean=1.0, seed=0):
    generator = np.random.default_rng(seed)
    xs = [(generator.standard_normal(shape) * 2 + mean) for shape in shapes]
    dys = [generator.standard_normal(shape) for shape in shapes]
    kind = getattr(torch, dtype)
    return [torch.tensor(x).to(kind) for x in xs], [torch.tensor(dy).to(kind) for dy in dys]


@dataclasses.dataclass(frozen=True)
class How:
    """A layer and its input; what all tests below leave as it is."""

    dtype: str = "float64"
    stats_mode: str = "exact"
    grad_reduction: str = "local"
    layout: str = "contiguous"
    affine: bool = True
    needs_input: bool = True  # the gradient by the input
    training: bool = True
    backend: str = ""


WEIGHT, BIAS = torch.tensor([0.5, -1.5, 2.0]), torch.tensor([0.1, 0.2, -0.3])
OLD = torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64), torch.tensor([2.0, 0.75, 1.0], dtype=torch.float64)


def _step(group, xs, dys, how):
    """One step of one layer; everything it yields."""
    rank = dist.get_rank(group)
    x, dy = xs[rank].clone(), dys[rank]
    if how.layout == "channels_last" and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    S = torch.float64 if x.dtype == torch.float64 else torch.float32
    options = {"stats_mode": how.stats_mode, "grad_reduction": how.grad_reduction, "affine": how.affine}
    module = SyncBatchNorm(x.shape[1], group=group, **options).to(S).train(how.training)
    given = {"weight": WEIGHT, "bias": BIAS} if how.affine else {}
    module.load_state_dict(given | dict(zip(("running_mean", "running_var"), OLD)), strict=False)
    x.requires_grad_(how.needs_input)
    kernels.backend = how.backend
    try:
        y = module(x)
        y.backward(dy)
    finally:
        kernels.backend = ""
    assert y.stride() == torch.empty_like(x).stride()
    return {
        "output": y.detach().double().numpy(),
        **({"grad_input": x.grad.double().numpy()} if how.needs_input else {}),
        **{f"grad_{name}": parameter.grad.double().numpy() for name, parameter in module.named_parameters()},
        "running_mean": module.running_mean.numpy(),
        "running_var": module.running_var.numpy(),
    }


def _check(cluster, shapes, mean=1.0, **options):
    how = How(**options)
    xs, dys = _data(shapes, how.dtype, mean)
    results = cluster.call(len(shapes), _step, xs, dys, how)
    weight, bias = (WEIGHT, BIAS) if how.affine else (None, None)
    modes = {"stats_mode": how.stats_mode, "training": how.training}
    expected = kernel_reference.group_forward(xs, weight, bias, *OLD, **modes)
    statistics = expected[0].mean, expected[0].invstd
    reduction = how.grad_reduction if how.training else "local"  # evaluation asks no peer
    gradients = kernel_reference.group_backward(dys, xs, weight, *statistics, grad_reduction=reduction, **modes)
    everyones = torch.cat([dy.flatten() for dy in dys])
    for result, forward, gradient in zip(results, expected, gradients):
        got = {name: result[name] for name in ("output", "running_mean", "running_var")}
        kernel_reference.check_forward(how.dtype, forward, weight, OLD, **got)
        got = {name: value for name, value in result.items() if name.startswith("grad_")}
        assert len(got) == how.needs_input + 2 * how.affine
        kernel_reference.check_backward(how.dtype, gradient, weight, *statistics, everyones, **got)
    if how.stats_mode == "exact":
        # The same statistics on every rank, bit for bit.
        for result in results[1:]:
            assert result["running_mean"].tobytes() == results[0]["running_mean"].tobytes()
            assert result["running_var"].tobytes() == results[0]["running_var"].tobytes()


SPLITS = {
    "one process": [(4, C, 5)],
    "even": [(4, C, 5), (4, C, 5)],
    "uneven batch": [(1, C, 5), (6, C, 5)],
    "uneven sizes": [(2, C, 3, 4), (3, C, 5, 2)],
    "one empty": [(4, C, 5), (0, C, 5), (2, C, 5)],
    "all empty": [(0, C, 5), (0, C, 5)],
    "one value each": [(1, C), (1, C), (1, C), (1, C)],
    "four uneven": [(3, C, 2), (1, C, 2), (0, C, 2), (5, C, 2)],
}


@pytest.mark.parametrize("backend", ["", "torch"], ids=["kernels", "torch"])
@pytest.mark.parametrize("grad_reduction", GRAD_REDUCTIONS)
@pytest.mark.parametrize("stats_mode", STATS_MODES)
@pytest.mark.parametrize("shapes", SPLITS.values(), ids=SPLITS)
def test_group_equals_the_closed_form(cluster, shapes, stats_mode, grad_reduction, backend):
    for training in (True, False):
        how = {"stats_mode": stats_mode, "grad_reduction": grad_reduction, "training": training}
        _check(cluster, shapes, backend=backend, **how)


@pytest.mark.parametrize("grad_reduction", GRAD_REDUCTIONS)
def test_a_first_layer_reduces_its_gradients_too(cluster, grad_reduction):
    _check(cluster, SPLITS["uneven batch"], grad_reduction=grad_reduction, needs_input=False)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shapes", [SPLITS["uneven sizes"], SPLITS["one empty"]], ids=["uneven sizes", "one empty"])
def test_other_types(cluster, shapes, dtype):
    _check(cluster, shapes, dtype=dtype)


@pytest.mark.parametrize("mean", [1e3, 1e6])
def test_large_means(cluster, mean):
    _check(cluster, [(8, C, 16), (3, C, 16)], mean, dtype="float32")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_groups(cluster, data):
    size = data.draw(st.integers(1, 4), label="processes")
    rank = data.draw(st.integers(2, 5), label="rank of the input")
    spatial = [st.integers(1, 4) for _ in range(rank - 2)]
    shapes = [(data.draw(st.integers(0, 5)), C, *(data.draw(s) for s in spatial)) for _ in range(size)]
    if sum(int(np.prod(shape)) for shape in shapes) == C:
        shapes[0] = (2, *shapes[0][1:])
    choices = {
        "dtype": ("float16", "bfloat16", "float32", "float64"), "layout": ("contiguous", "channels_last"),
        "stats_mode": STATS_MODES, "grad_reduction": GRAD_REDUCTIONS, "affine": (True, False), "training": (True, False),
        "backend": ("", "torch"),
    }  # fmt: skip
    _check(cluster, shapes, **{name: data.draw(st.sampled_from(each), label=name) for name, each in choices.items()})


def _count_collectives(group):
    calls = []
    original = torch_versions.gather_single

    def counting(*arguments, **keywords):
        calls.append(arguments[1].numel())
        return original(*arguments, **keywords)

    torch_versions.gather_single = counting
    try:
        module = SyncBatchNorm(C, group=group)
        for _ in range(3):
            x = torch.randn(4, C, 5, requires_grad=True)
            before = len(calls)
            y = module(x)
            forward = len(calls) - before
            y.square().sum().backward()
            backward = len(calls) - before - forward
    finally:
        torch_versions.gather_single = original
    return forward, backward, calls[-1] == distributed._membership(distributed.name_of(group)).row_length


def test_one_collective_each_way_after_the_first_step(cluster):
    assert cluster.call(2, _count_collectives) == [(1, 1, True)] * 2


def _without_the_operators(group):
    """A step in a group whose operators may not be called."""
    backward, forward = torch.ops.bnexport.sync_batch_norm_backward, operators.sync_batch_norm
    default = backward.default
    operators.sync_batch_norm = backward.default = None
    try:
        module = SyncBatchNorm(C, group=group)
        module(torch.randn(4, C, 5, requires_grad=True)).square().sum().backward()
    finally:
        operators.sync_batch_norm, backward.default = forward, default
    return module.weight.grad is not None


def test_a_group_takes_the_short_way(cluster):
    assert cluster.call(2, _without_the_operators) == [True] * 2


def _disagree(group, what):
    rank = dist.get_rank(group)
    channels = 3 + rank if what == "C" else 3
    mode = ("exact", "N")[rank] if what == "stats_mode" else "exact"
    dtype = (torch.float32, torch.float64)[rank] if what == "dtype" else torch.float32
    ways = {"momentum": (0.25, 0.5), "eps": (0.25, 0.5), "grad_reduction": ("local", "mean")}
    options = {what: ways[what][rank]} if what in ways else {}
    module = SyncBatchNorm(channels, group=group, stats_mode=mode, **options).to(dtype)
    module(torch.randn(4, channels, 5, dtype=dtype))


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("C", "C: rank 0 has 3, rank 1 has 4"),
        ("stats_mode", "stats_mode: rank 0 has 'exact', rank 1 has 'N'"),
        ("grad_reduction", "grad_reduction: rank 0 has 'local', rank 1 has 'mean'"),
        ("dtype", "dtype: rank 0 has 'float32', rank 1 has 'float64'"),
        ("momentum", "momentum: rank 0 has 0.25, rank 1 has 0.5"),
        ("eps", "eps: rank 0 has 0.25, rank 1 has 0.5"),
    ],
)
def test_disagreement_is_an_error_on_every_rank(cluster, what, values):
    for result in cluster.run(2, _disagree, what):
        assert isinstance(result, Raised)
        assert result.type == "GroupError"
        assert values in result.message


def test_agreements_leave_nothing_in_a_store_that_outlives_the_group(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(distributed, "store_of", lambda _: store)

    def agree(rank, channels):
        membership = distributed._Membership("world", weakref.ref(store), 2, rank)
        return distributed._agree(membership, {"C": channels, "length": 2 * channels + 1})

    for channels in (3, 4):  # the first rank comes before the second in each group
        with futures.ThreadPoolExecutor(1) as first:
            waiting = first.submit(agree, 0, channels)
            with contextlib.suppress(futures.TimeoutError):
                waiting.exception(0.2)
            assert agree(1, channels) == 0
        assert waiting.result() == 0
    assert store.num_keys() == 0


def _empty_batches(group, shares, momentum):
    """Statistics after steps in which each process has so many rows."""
    rank = dist.get_rank(group)
    x = torch.arange(60.0, dtype=torch.float64).reshape(10, C, 2).sin()
    module = SyncBatchNorm(C, momentum=momentum, group=group).double()
    for step, rows in enumerate(shares):
        first = sum(rows[:rank])
        module(x[first : first + rows[rank]] + step)
    return [buffer.numpy() for buffer in module.buffers()]


def _zero_mean(group):
    """Batches counted by a process without values, where those of the others have a mean of exactly 0."""
    module = SyncBatchNorm(C, group=group)
    module(torch.tensor([[1.0], [-1.0]]).expand(2, C)[: 0 if dist.get_rank(group) else 2])
    return int(module.num_batches_tracked)


def test_a_batch_whose_mean_is_zero_counts_where_it_is_empty(cluster):
    assert cluster.call(2, _zero_mean) == [1, 1]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_an_empty_joint_batch_changes_nothing(cluster, momentum):
    shares = [(0, 0), (4, 6), (0, 0), (0, 10), (10, 0), (0, 0)]
    want = nn.BatchNorm1d(C, momentum=momentum).double()
    x = torch.arange(60.0, dtype=torch.float64).reshape(10, C, 2).sin()
    for step, rows in enumerate(shares):
        if sum(rows):
            want(x + step)
    for buffers in cluster.call(2, _empty_batches, shares, momentum):
        for got, buffer in zip(buffers, want.buffers(), strict=True):
            np.testing.assert_allclose(got, buffer, rtol=1e-12)


def _single_value(group):
    x = torch.randn(1 if dist.get_rank(group) == 0 else 0, C)
    SyncBatchNorm(C, group=group)(x)


def test_total_count_of_one_is_torchs_error(cluster):
    for result in cluster.run(2, _single_value):
        assert isinstance(result, Raised)
        assert "Expected more than 1 value per channel when training" in result.message


def _gradcheck(group, stats_mode, reduction, empty=False):
    """Numerical derivatives across processes: every rank perturbs in turn, all ranks evaluate."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(rank)
    shape = (2 + rank, 2, 2) if stats_mode == "exact" else (2, 2, 2)
    shape = (0, 2, 2) if empty and rank == 1 else shape
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    dy = torch.randn(shape, generator=generator, dtype=torch.float64)
    v = torch.randn(shape, generator=generator, dtype=torch.float64)
    w, p, q = torch.randn(3, 2, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    arguments = (
        distributed.name_of(group),
        size,
        stats_mode,
        reduction,
        10_000 + hash((stats_mode, reduction, empty)) % 997,
    )

    def loss(x, dy, w):
        """A function of the first derivative, so that its gradient is the second."""
        b = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        w = w.clone().requires_grad_() if not w.requires_grad else w
        x = x if x.requires_grad else x.clone().requires_grad_()
        y = operators.sync_batch_norm(x, None, None, w, b, True, 0.1, 1e-5, *arguments)[0]
        dx, dw, db = torch.autograd.grad(y, (x, w, b), dy, create_graph=True)
        return (dx * v).sum() + (dw * p).sum() + (db * q).sum()

    x, dy = x.requires_grad_(), dy.requires_grad_()
    analytic = torch.autograd.grad(loss(x, dy, w.clone().requires_grad_()), (x, dy))

    step, errors = 1e-6, []
    for owner in range(size):
        for index, analytic_part in ((0, analytic[0]), (1, analytic[1])):
            elements = torch.tensor(x.numel())
            dist.broadcast(elements, owner, group=group)
            for element in range(0, int(elements), 3):
                values = []
                for sign in (1, -1):
                    moved = [x.detach().clone(), dy.detach().clone()]
                    if rank == owner:
                        moved[index].view(-1)[element] += sign * step
                    total = loss(moved[0], moved[1].requires_grad_(), w).detach()
                    dist.all_reduce(total, group=group)
                    values.append(float(total))
                if rank == owner:
                    errors.append(abs((values[0] - values[1]) / (2 * step) - float(analytic_part.reshape(-1)[element])))
    return max(errors, default=0.0)


@pytest.mark.parametrize("reduction", ["local", "sum", "mean"])
@pytest.mark.parametrize("stats_mode", ["exact", "default", "N"])
def test_double_backward_across_processes(cluster, stats_mode, reduction):
    assert max(cluster.call(2, _gradcheck, stats_mode, reduction)) < 1e-6


@pytest.mark.parametrize("stats_mode", ["exact", "default", "N"])
def test_double_backward_with_an_empty_process(cluster, stats_mode):
    assert max(cluster.call(2, _gradcheck, stats_mode, "local", True)) < 1e-6


def _third_derivative(group):
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    x = torch.randn(3, C, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    loss = SyncBatchNorm(C, group=group).double()(x).pow(3).sum()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = gradient.square().sum()
    loss.backward()


def test_a_group_refuses_the_third_derivative(cluster):
    for result in cluster.run(2, _third_derivative):
        assert isinstance(result, Raised) and result.type == "NotImplementedError"
        assert "no derivatives beyond the second" in result.message


def _ddp(group, xs, variant):
    torch.manual_seed(0)
    rank = dist.get_rank(group)
    net = nn.Sequential(nn.Conv1d(C, 4, 3, padding=1), SyncBatchNorm(4, group=group), nn.ReLU(), nn.Conv1d(4, 2, 1))
    inner = torch.compile(net, backend="aot_eager", fullgraph=True) if variant == "one graph" else net
    model = nn.parallel.DistributedDataParallel(inner, process_group=group)
    run = torch.compile(model, backend="aot_eager") if variant == "compiled" else model
    x = xs[rank]
    y = checkpoint(run, x, use_reentrant=False) if variant == "checkpointed" else run(x)
    y.square().mean().backward()
    return (
        {name: p.grad.numpy() for name, p in net.named_parameters()},
        net[1].running_var.numpy(),
        int(net[1].num_batches_tracked),
    )


@pytest.mark.parametrize("variant", ["plain", "compiled", "one graph", "checkpointed"])
def test_ddp_equals_the_joint_batch(cluster, variant):
    xs, _ = _data([(4, C, 6), (4, C, 6)], "float32")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(C, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 2, 1))
    net(torch.cat(xs)).square().mean().backward()
    for grads, running_var, batches in cluster.call(2, _ddp, xs, variant):
        for name, parameter in net.named_parameters():
            np.testing.assert_allclose(grads[name], parameter.grad, rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(running_var, net[1].running_var, rtol=1e-5)
        assert batches == 1


def _evaluates_alone(group):
    """Rank 0 evaluates a module without running statistics; the others never call it."""
    if dist.get_rank(group) != 0:
        return None
    module = SyncBatchNorm(C, group=group, track_running_stats=False).eval()
    x = torch.randn(4, C, 5)
    torch.testing.assert_close(module(x), nn.functional.batch_norm(x, None, None, training=True))
    return "done"


def test_eval_without_running_statistics_asks_no_peer(cluster):
    assert cluster.call(2, _evaluates_alone) == ["done", None]


def _destroyed_group(group):
    """Trains in a group of two and destroys it; whether anything keeps the group, and with it its threads, alive."""
    own = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return False
    SyncBatchNorm(C, group=own)(torch.randn(4, C, 5, requires_grad=True)).square().mean().backward()
    watched = weakref.ref(own)
    dist.barrier(own)
    dist.destroy_process_group(own)
    del own
    gc.collect()
    return watched() is not None


def test_a_destroyed_group_is_freed(cluster):
    # A gloo thread that outlives its group may end the process while the interpreter shuts down.
    assert cluster.call(4, _destroyed_group) == [False] * 4


# A member that dies closes its connections, so that the others see it at once; one that is elsewhere is waited for.
DIES, SKIPS = 60, 5  # seconds


def _dies(rank, size, port):
    join(rank, size, port)
    module = SyncBatchNorm(C, group=short_group(size, DIES))
    module(torch.randn(4, C, 5))
    if rank == 1:
        os._exit(0)
    try:
        module(torch.randn(4, C, 5))
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return None


def test_a_member_that_dies_is_an_error():
    kind, message = run_once(2, _dies)[0]
    assert kind == "GroupError"
    assert "the exchange of statistics failed on rank 0" in message and "go on with empty ones" in message


def _skips(rank, size, port):
    join(rank, size, port)
    group = short_group(size, SKIPS)
    first, second = SyncBatchNorm(3, group=group), SyncBatchNorm(8, group=group)
    for module, channels in ((first, 3), (second, 8)):
        module(torch.randn(4, channels, 5))
    try:
        if rank == 0:
            first(torch.randn(4, 3, 5))
        second(torch.randn(4, 8, 5))
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return None


def test_a_member_that_skips_a_layer_is_an_error():
    for result in run_once(2, _skips):
        assert result is not None, "a process died or went on"
        assert result[0] == "GroupError"
