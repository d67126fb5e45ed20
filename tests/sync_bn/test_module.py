"""The module, and copies of it: functions that refer to it refer to the copy, and a group is shared, or lost in a pickle."""

import copy
import functools
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bnexport
from bnexport import SyncBatchNorm
from bnexport.errors import GroupError, UnsupportedModelError, UsageError
from bnexport.modules.copies import copy_model
from bnexport.sync_bn import convert_sync_batchnorm, distributed
from bnexport.sync_bn import module as module_of
from tests.sync_bn import lookalikes


@pytest.mark.parametrize(
    "change",
    [{"track_running_stats": False}, {"num_batches_tracked": None}, {"num_batches_tracked": None, "momentum": None}],
)
def test_changed_after_construction_like_batch_norm(change):
    ours, plain = SyncBatchNorm(3), nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5) * 2 + 1
    for module in (ours, plain):
        module(x)
        for name, value in change.items():
            setattr(module, name, value)
        module(x + 1)
    for one, two in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, two)
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x))


def test_autocast_takes_the_inputs_type():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = SyncBatchNorm(3)(nn.Conv2d(3, 3, 1)(torch.randn(2, 3, 4, 4)))
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.cpp)])
def test_compiles_without_graph_breaks(backend):
    module = SyncBatchNorm(3)
    other = copy.deepcopy(module)
    compiled = torch.compile(other, fullgraph=True, backend=backend)
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    module(x).square().sum().backward()
    compiled(z).square().sum().backward()
    torch.testing.assert_close(z.grad, x.grad)
    torch.testing.assert_close(other.running_var, module.running_var)


@pytest.mark.parametrize("strict", [True, False])
def test_torch_export(strict):
    module = SyncBatchNorm(3)
    program = torch.export.export(module, (torch.randn(4, 3, 5),), strict=strict)
    calls = [str(node.target) for node in program.graph.nodes if "sync_batch_norm" in str(node.target)]
    assert calls == ["bnexport.sync_batch_norm.default"]


def test_checkpointing_updates_the_statistics_once():
    for reentrant in (True, False):
        plain, recomputed = SyncBatchNorm(3), SyncBatchNorm(3)
        x = torch.randn(4, 3, 5, requires_grad=True)
        plain(x).square().sum().backward()
        checkpoint(recomputed, x, use_reentrant=reentrant).square().sum().backward()
        assert recomputed.num_batches_tracked == 1
        torch.testing.assert_close(recomputed.running_var, plain.running_var)


def test_repr_names_what_differs():
    assert repr(SyncBatchNorm(3)) == repr(nn.BatchNorm1d(3)).replace("BatchNorm1d", "SyncBatchNorm")
    ours = SyncBatchNorm(3, stats_mode="N", grad_reduction="mean")
    assert repr(ours).endswith("stats_mode='N', grad_reduction='mean')")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_features": -1}, "num_features: got -1"),
        ({"num_features": 3, "eps": -1.0}, "eps: got -1.0"),
        ({"num_features": 3, "eps": float("nan")}, "eps: got nan"),
        ({"num_features": 3, "eps": float("inf")}, "eps: got inf"),
        ({"num_features": 3, "momentum": 1.5}, "momentum: got 1.5"),
        ({"num_features": 3, "stats_mode": "all"}, "stats_mode: got 'all'"),
        ({"num_features": 3, "grad_reduction": "max"}, "grad_reduction: got 'max'"),
    ],
)
def test_constructor_errors(arguments, message):
    with pytest.raises(UsageError, match=message):
        SyncBatchNorm(**arguments)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3), "got rank 1"),
        (torch.zeros(2, 4), r"got 4 channels, expected 3 \(num_features\)"),
        (torch.zeros(1, 3), "Expected more than 1 value per channel when training"),
        (torch.zeros(2, 3, dtype=torch.int64), "got torch.int64"),
    ],
)
def test_forward_errors(x, message):
    module = SyncBatchNorm(3)
    with pytest.raises(ValueError, match=message):
        module(x)
    assert module.num_batches_tracked == 0


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("shape", [(0, 3, 4), (4, 3, 0)], ids=str)
def test_an_empty_batch_changes_nothing(shape, momentum):
    module, plain = (cls(3, momentum=momentum) for cls in (SyncBatchNorm, nn.BatchNorm1d))
    x = torch.randn(4, 3, 5)
    for given in (torch.zeros(shape), x, torch.zeros(shape), x + 1):
        before = {name: value.clone() for name, value in module.state_dict().items()}
        assert module(given).shape == given.shape
        if given.numel():
            plain(given)
        else:
            assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def test_fx_sees_a_leaf_as_it_does_of_torch():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    want = [(node.op, str(node.target)) for node in torch.fx.symbolic_trace(model).graph.nodes]
    traced = torch.fx.symbolic_trace(bnexport.convert_sync_batchnorm(model))
    assert [(node.op, str(node.target)) for node in traced.graph.nodes] == want
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(traced(x), model(x))
    assert model[1].num_batches_tracked == 2


def test_fx_is_refused_where_a_leaf_would_lose_a_hook():
    model = nn.Sequential(SyncBatchNorm(3))
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(model)


def test_the_names_of_torchs_class():
    group = object()
    assert SyncBatchNorm(3, process_group=group).group is group
    with pytest.raises(UsageError, match="group and process_group: got both"):
        SyncBatchNorm(3, group=group, process_group=group)
    converted = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)), group)
    assert type(converted[0]) is SyncBatchNorm and converted[0].process_group is group
    module = SyncBatchNorm(2)
    assert module.process_group is None
    module.process_group = group
    assert module.group is module.process_group is group


NORM = nn.BatchNorm2d(3)
_plain = NORM.forward


def _of_the_globals(x):
    return 2 * _plain(x)


def _nested(plain):
    def inner(x):
        return plain(x)

    return lambda x: 2 * inner(x)


def _keyword(plain):
    def forward(x, *, plain=plain):
        return 2 * plain(x)

    return forward


# Ways in which a forward of the norm refers to the norm's own one.
FORWARDS = {
    "closure": lambda plain: lambda x: 2 * plain(x),
    "nested closure": _nested,
    "default": lambda plain: lambda x, plain=plain: 2 * plain(x),
    "keyword": _keyword,
    "partial": lambda plain: functools.partial(lambda plain, x: 2 * plain(x), plain),
    "global": lambda _: _of_the_globals,
}


def _net(way):
    NORM.__dict__.pop("forward", None)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), NORM if way == "global" else nn.BatchNorm2d(3))
    if way == "hook":
        weight = net[0].weight
        net[1].register_forward_hook(lambda module, args, output: output * weight.mean())
    else:
        net[1].forward = FORWARDS[way](net[1].forward)
    return net


@pytest.mark.parametrize("way", [*FORWARDS, "hook"])
def test_a_copy_runs_its_own_modules_and_tensors(way):
    net, x = _net(way), torch.randn(4, 3, 5, 5)
    copied = copy_model(copy_model(net))  # also a copy of a copy
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.no_grad():
        copied[0].weight.mul_(3)
        y = copied.eval()(x)
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        net[0].weight.mul_(3)
        torch.testing.assert_close(y, net.eval()(x))


def test_other_functions_stay_themselves():
    calls = []
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    hook = lambda *_: calls.append("hook")  # noqa: E731
    net[1].register_forward_hook(hook)
    copied = copy_model(net)
    assert list(copied[1]._forward_hooks.values()) == [hook]
    copied(torch.randn(2, 3, 4, 4))
    assert calls == ["hook"]


def test_an_attribute_that_is_called_group_is_the_copys_own(tmp_path):
    """Only a process group, and what a sync batch norm calls its group, are shared."""

    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
            self.group, self.process_group = [], {"calls": 0}

        def forward(self, x):
            self.group.append(x.shape)
            self.process_group["calls"] += 1
            return super().forward(x)

    net, connection = Net(), object()
    net.append(SyncBatchNorm(4, group=connection))
    copied = copy_model(net.eval())
    copied(torch.randn(2, 3, 8, 8))
    assert len(copied.group) == 1 and copied[2].group is connection
    net[2].group = None
    bnexport.export(net, torch.randn(2, 3, 8, 8), tmp_path / "m.onnx", exporter="torchscript")
    assert net.group == [] and net.process_group == {"calls": 0}


class Connection:
    """Stands for a process group: it can be neither copied nor pickled."""

    def __deepcopy__(self, memo):
        raise AssertionError("a group was copied")


def test_a_copy_has_its_own_parameters_and_the_same_group():
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2), SyncBatchNorm(2), lookalikes.MmcvSyncBatchNorm(2))
    model[1].process_group, model[2].group, model[3].group = (Connection() for _ in range(3))
    made, norm = copy_model(model), copy.deepcopy(model[2])
    assert made[1].process_group is model[1].process_group and made[2].group is norm.group is model[2].group
    assert made[3].group is model[3].group
    assert norm.running_mean is not model[2].running_mean and norm._layer != model[2]._layer
    for one, two in zip(model.parameters(), made.parameters(), strict=True):
        assert one is not two and torch.equal(one, two)


def test_a_copy_may_share_parameters_but_no_buffers():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LazyLinear(3))
    made = copy_model(model, share_parameters=True)
    assert made[0].weight is model[0].weight and made[1].bias is model[1].bias
    assert made[1].running_mean is not model[1].running_mean
    made(torch.ones(2, 2))  # makes the lazy parameters, in place: of the copy alone
    assert isinstance(model[2].weight, nn.parameter.UninitializedParameter)


def test_results_of_a_forward_are_copied_without_their_history():
    model = nn.Linear(2, 2)
    model.last = model(torch.ones(1, 2))
    made = copy_model(model)
    assert torch.equal(made.last, model.last) and made.last.is_leaf and made.last is not model.last


def test_what_cannot_be_copied_is_named():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(UnsupportedModelError, match=r"Linear: cannot be copied, .*lock"):
        copy_model(model)


def test_a_copy_takes_lists_and_unfilled_closures_as_they_are():
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.my_hooks = [len]

    def hook(module, args, output):
        return later(output) if module is model else output

    model.register_forward_hook(hook)
    made = copy_model(model)
    assert made.my_hooks == [len]
    later = torch.relu
    for one in (made, model):  # the hook of each knows its own model
        y = one(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
        assert torch.equal(y > 0, torch.tensor([[False, False], [True, True]])) and y.min() == 0


def test_a_group_is_lost_in_a_pickle_until_another_is_set(monkeypatch):
    monkeypatch.setattr(module_of.distributed, "name_of", lambda group: "" if group is None else "some group")
    module = SyncBatchNorm(3)
    module.group = Connection()
    made = pickle.loads(pickle.dumps(module))
    assert made.group is None and module.group is not None
    made.eps = 1e-3
    with pytest.raises(GroupError, match="'some group' did not survive pickling"):
        made(torch.ones(2, 3))
    assert made.eval()(torch.ones(2, 3)).shape == (2, 3)
    made.train().group = None
    monkeypatch.setattr(distributed, "size_of", lambda group: 1)
    assert made(torch.ones(2, 3)).shape == (2, 3)


def test_the_number_of_channels_of_a_module_that_does_not_say_it():
    """As a state_dict has it: that of the statistics or of the weight, and where there is neither, an error."""
    for options in ({"affine": False}, {"track_running_stats": False}, {}):
        module = nn.BatchNorm1d(4, **options)
        del module.num_features
        assert convert_sync_batchnorm(nn.Sequential(module))[0].num_features == 4
    module = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    del module.num_features
    with pytest.raises(UsageError, match="BatchNorm1d: cannot tell its number of channels"):
        convert_sync_batchnorm(module)


@pytest.mark.parametrize("kind", [SyncBatchNorm, nn.BatchNorm2d])
def test_statistics_that_no_layer_may_write(kind):
    """Those made in inference mode, and those that ask for gradients."""
    with torch.inference_mode():
        made = kind(3, affine=False)
    leaf = kind(3, affine=False)
    leaf.running_mean.requires_grad_()
    for norm in (made, leaf):
        with pytest.raises(RuntimeError):
            norm(torch.randn(4, 3, 5, 5))
