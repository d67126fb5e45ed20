import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bnexport
from bnexport import SyncBatchNorm
from bnexport.errors import UsageError
from tests.support.checks import needs_dynamo


def test_state_dict_is_batch_norms():
    ours, plain = SyncBatchNorm(3), nn.BatchNorm2d(3)
    assert list(ours.state_dict()) == list(plain.state_dict())
    plain(torch.randn(4, 3, 5, 5))
    ours.load_state_dict(plain.state_dict())
    plain.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("track", [True, False])
def test_trains_and_evaluates_like_batch_norm(affine, momentum, track):
    arguments = {"affine": affine, "momentum": momentum, "track_running_stats": track, "eps": 1e-3}
    ours, plain = SyncBatchNorm(3, **arguments), nn.BatchNorm2d(3, **arguments)
    for step in range(3):
        x = torch.randn(4, 3, 5, 5) * (step + 1) + step
        torch.testing.assert_close(ours(x), plain(x))
    for (name, one), two in zip(ours.state_dict().items(), plain.state_dict().values()):
        torch.testing.assert_close(one, two, msg=name)
    ours.eval(), plain.eval()
    torch.testing.assert_close(ours(x), plain(x))


def _switch_tracking_off(module):
    module.track_running_stats = False


def _drop_the_count(module):
    module.num_batches_tracked = None


def _drop_the_count_of_an_average(module):
    module.num_batches_tracked, module.momentum = None, None


@pytest.mark.parametrize("change", [_switch_tracking_off, _drop_the_count, _drop_the_count_of_an_average])
def test_changed_after_construction_like_batch_norm(change):
    ours, plain = SyncBatchNorm(3), nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5) * 2 + 1
    for module in (ours, plain):
        module(x)
        change(module)
        module(x + 1)
    for one, two in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, two)
    torch.testing.assert_close(ours.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 5, 5), (2, 3, 2, 2, 2)], ids=str)
def test_every_rank(shape):
    assert SyncBatchNorm(3)(torch.randn(shape)).shape == shape


def test_half_module_keeps_its_type():
    module = SyncBatchNorm(3).half()
    y = module(torch.randn(8, 3, 4, 4).half())
    y.float().sum().backward()
    assert (y.dtype, module.weight.grad.dtype, module.running_mean.dtype) == (torch.float16,) * 3


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


def test_copies_and_pickles():
    module = SyncBatchNorm(3, stats_mode="N")
    module(torch.randn(4, 3, 5))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)):
        assert other.stats_mode == "N"
        assert torch.equal(other.running_mean, module.running_mean)
        assert other._layer != module._layer


def test_repr_names_what_differs():
    assert repr(SyncBatchNorm(3)) == repr(nn.BatchNorm1d(3)).replace("BatchNorm1d", "SyncBatchNorm")
    assert repr(SyncBatchNorm(3, stats_mode="N", grad_reduction="mean")).endswith(
        "stats_mode='N', grad_reduction='mean')"
    )


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


def test_public_names():
    for name in bnexport.__all__:
        assert getattr(bnexport, name) is not None
    assert callable(bnexport.export)


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


@pytest.mark.parametrize("exporter", [pytest.param("dynamo", marks=needs_dynamo), "torchscript"])
def test_an_empty_batch_is_not_averaged_in_onnx_runtime(exporter, tmp_path):
    module, x = SyncBatchNorm(3, momentum=None), torch.randn(4, 3, 5)
    module(x)
    bnexport.export(module, (x,), tmp_path / "m.onnx", mode="custom_op", exporter=exporter)
    session = bnexport.InferenceSession(tmp_path / "m.onnx")
    for given in (x[:0], x + 1):
        module_after = copy.deepcopy(module)
        module_after(given)
        _, *new = session.run(None, {"input": given.numpy()})
        for value, want in zip(new, module_after.buffers(), strict=True):
            torch.testing.assert_close(torch.from_numpy(value), want)


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


def test_process_group_is_another_name_of_group() -> None:
    module = SyncBatchNorm(2)
    assert module.process_group is None
    module.process_group = group = object()
    assert module.group is group
    assert module.process_group is group
