"""Groups of gloo processes against the closed forms and the joint batch."""

import contextlib
import dataclasses
import gc
import os
import weakref
from concurrent import futures
from unittest import mock

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


def joint_normalised(xs, stats_mode):
    """The normalised inputs of the ranks of a group, in operations that autograd differentiates; empty ones included."""
    counts = [x.shape[0] * x.shape[2] for x in xs]
    shares = {
        "exact": [1 / sum(counts)] * len(xs),
        "default": [1 / (len(xs) * max(n, 1)) for n in counts],
        "N": [1 / (x.shape[2] * sum(each.shape[0] for each in xs)) for x in xs],
    }[stats_mode]
    mean = sum(share * x.sum((0, 2)) for share, x in zip(shares, xs))
    var = sum(share * ((x - mean[:, None]) ** 2).sum((0, 2)) for share, x in zip(shares, xs))
    return [(x - mean[:, None]) * (var + 1e-5)[:, None] ** -0.5 for x in xs]


@pytest.mark.parametrize("split", [(3, 3), (1, 5, 2), (0, 4, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("stats_mode", STATS_MODES)
def test_the_closed_forms(split, stats_mode):
    """Those of tests/support against autograd through the formula of the mode."""
    xs, dys = _data([(n, 2, 3 if stats_mode == "default" else 3 + rank) for rank, n in enumerate(split)])
    w, b = torch.tensor([[0.5, -2.0], [1.0, 3.0]], dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (*xs, w, b)]
    ys = [y * w[:, None] + b[:, None] for y in joint_normalised(xs, stats_mode)]
    *dxs, dw, db = torch.autograd.grad(sum((y * dy).sum() for y, dy in zip(ys, dys)), leaves)
    values = torch.cat([x.transpose(0, 1).flatten(1) for x in xs], 1).detach()
    *xs, w, b = (leaf.detach() for leaf in leaves)
    forward = kernel_reference.group_forward(xs, w, b, np.zeros(2), np.ones(2), stats_mode=stats_mode, momentum=1.0)
    statistics = forward[0].mean, forward[0].invstd
    if stats_mode == "exact":
        np.testing.assert_allclose(forward[0].running_mean, values.mean(1), rtol=1e-11)
        np.testing.assert_allclose(forward[0].running_var, values.var(1), rtol=1e-11)
    for reduction, share in (("local", None), ("sum", 1), ("mean", len(split))):
        options = {"stats_mode": stats_mode, "grad_reduction": reduction}
        backward = kernel_reference.group_backward(dys, xs, w, *statistics, **options)
        for rank, result in enumerate(backward):
            np.testing.assert_allclose(forward[rank].output, ys[rank].detach(), atol=1e-11)
            np.testing.assert_allclose(result.grad_input, dxs[rank], atol=1e-11)
        found = [(each.grad_weight, each.grad_bias) for each in backward]
        for got in [np.sum(found, 0)] if share is None else found:
            np.testing.assert_allclose(got, torch.stack([dw, db]) / (share or 1), rtol=1e-11)


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


@pytest.mark.parametrize(
    ("split", "mean", "options"),
    [
        *((SPLITS["uneven batch"], 1, {"grad_reduction": each, "needs_input": False}) for each in GRAD_REDUCTIONS),
        *(([(8, C, 16), (3, C, 16)], mean, {"dtype": "float32"}) for mean in (1e3, 1e6)),
    ],
    ids=[*(f"first layer, {each}" for each in GRAD_REDUCTIONS), "large mean", "larger mean"],
)
def test_a_first_layer_and_large_means(cluster, split, mean, options):
    _check(cluster, split, mean, **options)


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
    with mock.patch.object(torch_versions, "gather_single", wraps=torch_versions.gather_single) as gather:
        module = SyncBatchNorm(C, group=group)
        for _ in range(3):
            gather.reset_mock()
            y = module(torch.randn(4, C, 5, requires_grad=True))
            forward = gather.call_count
            y.square().sum().backward()
    length = distributed._membership(distributed.name_of(group)).row_length
    return forward, gather.call_count - forward, gather.call_args.args[1].numel() == length


def test_one_collective_each_way_after_the_first_step(cluster):
    assert cluster.call(2, _count_collectives) == [(1, 1, True)] * 2


def _without_the_operators(group):
    """A step in a group whose operators may not be called."""
    backward, module = torch.ops.bnexport.sync_batch_norm_backward, SyncBatchNorm(C, group=group)
    with mock.patch.object(operators, "sync_batch_norm", None), mock.patch.object(backward, "default", None):
        module(torch.randn(4, C, 5, requires_grad=True)).square().sum().backward()
    return module.weight.grad is not None


def test_a_group_takes_the_short_way(cluster):
    assert cluster.call(2, _without_the_operators) == [True] * 2


def _disagree(group, what, values):
    value = values[dist.get_rank(group)]
    channels, dtype = value if what == "C" else 3, getattr(torch, value) if what == "dtype" else torch.float32
    module = SyncBatchNorm(channels, group=group, **({} if what in ("C", "dtype") else {what: value})).to(dtype)
    module(torch.randn(4, channels, 5, dtype=dtype))


DIFFERENCES = {
    "C": (3, 4),
    "stats_mode": ("exact", "N"),
    "grad_reduction": ("local", "mean"),
    "dtype": ("float32", "float64"),
    "momentum": (0.25, 0.5),
    "eps": (0.25, 0.5),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_disagreement_is_an_error_on_every_rank(cluster, what):
    first, second = DIFFERENCES[what]
    for result in cluster.run(2, _disagree, what, DIFFERENCES[what]):
        assert isinstance(result, Raised) and result.type == "GroupError"
        assert f"{what}: rank 0 has {first!r}, rank 1 has {second!r}" in result.message


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


def _double_backward(group, xs, dys, vs, w, p, q, modes):
    """The gradients by x and dy of a function of the first derivative."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    arguments = (distributed.name_of(group), size, *modes, 10_000 + hash((modes, xs[1].shape)) % 997)
    x, dy, w, b = (t.clone().requires_grad_() for t in (xs[rank], dys[rank], w, torch.zeros(2, dtype=torch.float64)))
    y = operators.sync_batch_norm(x, None, None, w, b, True, 0.1, 1e-5, *arguments)[0]
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy, create_graph=True)
    return torch.autograd.grad((dx * vs[rank]).sum() + (dw * p).sum() + (db * q).sum(), (x, dy))


@pytest.mark.parametrize("rows", [(2, 3), (2, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("reduction", GRAD_REDUCTIONS)
@pytest.mark.parametrize("stats_mode", STATS_MODES)
def test_double_backward_across_processes(cluster, stats_mode, reduction, rows):
    """Against autograd through the formula of the joint batch; each process adds its own share of the function."""
    xs, dys = _data([(n, 2, 2) for n in rows])
    vs, _ = _data([(n, 2, 2) for n in rows], seed=1)
    w, p, q = torch.randn(3, 2, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    got = cluster.call(2, _double_backward, xs, dys, vs, w, p, q, (stats_mode, reduction))
    leaves = [tensor.requires_grad_() for tensor in (*xs, *dys)]
    normalised = joint_normalised(xs, stats_mode)
    dxs = torch.autograd.grad(sum((y * w[:, None] * dy).sum() for y, dy in zip(normalised, dys)), xs, create_graph=True)
    share = {"local": 1, "sum": 2, "mean": 1}[reduction]  # of two processes that take the sum, or half of it, each
    parameters = sum((dy * y).sum((0, 2)) @ p + dy.sum((0, 2)) @ q for y, dy in zip(normalised, dys))
    value = sum((dx * v).sum() for dx, v in zip(dxs, vs)) + share * parameters
    expected = torch.autograd.grad(value, leaves)
    for rank, result in enumerate(got):
        for found, wanted in zip(result, expected[rank::2]):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def _third_derivative(group):
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    x = torch.randn(3, C, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    loss = SyncBatchNorm(C, group=group).double()(x).pow(3).sum()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = gradient.square().sum()
    loss.backward()


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (_single_value, "ValueError", "Expected more than 1 value per channel when training"),
        (_third_derivative, "NotImplementedError", "no derivatives beyond the second"),
    ],
)
def test_what_a_group_refuses(cluster, function, kind, message):
    for result in cluster.run(2, function):
        assert isinstance(result, Raised) and message in result.message
        assert result.type in (kind, "UsageError")


def _network(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(C, 4, 3, padding=1), norm, nn.ReLU(), nn.Conv1d(4, 2, 1))


def _ddp(group, xs, variant):
    net = _network(SyncBatchNorm(4, group=group))
    inner = torch.compile(net, backend="aot_eager", fullgraph=True) if variant == "one graph" else net
    model = nn.parallel.DistributedDataParallel(inner, process_group=group)
    run = torch.compile(model, backend="aot_eager") if variant == "compiled" else model
    x = xs[dist.get_rank(group)]
    y = checkpoint(run, x, use_reentrant=False) if variant == "checkpointed" else run(x)
    y.square().mean().backward()
    grads = {name: parameter.grad.numpy() for name, parameter in net.named_parameters()}
    return grads, net[1].running_var.numpy(), int(net[1].num_batches_tracked)


@pytest.mark.parametrize("variant", ["plain", "compiled", "one graph", "checkpointed"])
def test_ddp_equals_the_joint_batch(cluster, variant):
    xs, _ = _data([(4, C, 6), (4, C, 6)], "float32")
    net = _network(nn.BatchNorm1d(4))
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


def _dies(rank, size, port):
    join(rank, size, port)
    module = SyncBatchNorm(C, group=short_group(size, 60))  # its connections close, so that the others see it at once
    module(torch.randn(4, C, 5))
    if rank == 1:
        os._exit(0)
    module(torch.randn(4, C, 5))


def test_a_member_that_dies_is_an_error():
    result = run_once(2, _dies)[0]
    assert isinstance(result, Raised) and result.type == "GroupError"
    words = "the exchange of statistics failed on rank 0", "go on with empty ones"
    assert all(text in result.message for text in words)


def _skips(rank, size, port):
    join(rank, size, port)
    group = short_group(size, 5)  # it is waited for
    modules = [SyncBatchNorm(channels, group=group) for channels in (3, 8)]
    for module in modules + modules[rank:]:
        module(torch.randn(4, module.num_features, 5))


def test_a_member_that_skips_a_layer_is_an_error():
    for result in run_once(2, _skips):
        assert isinstance(result, Raised) and result.type == "GroupError", "a process died or went on"
