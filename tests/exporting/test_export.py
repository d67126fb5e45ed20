"""Exported models in ONNX Runtime, with the library and without, against torch; what a training forward changes is state."""

import copy

import numpy as np
import onnx
import pytest
import torch
import torch.distributed as dist
from torch import nn

import bnexport
from bnexport import SyncBatchNorm, schema, torch_versions
from bnexport.errors import NotVerifiedWarning, UnsupportedModelError, UsageError, VerificationError
from bnexport.runtime import groups
from tests.exporting.files import assert_right, operators, output, run
from tests.support.cluster import Raised
from tests.support.modules import compose


class Net(nn.Module):
    """A module used twice, no affine, cumulative momentum, different eps, a plain BatchNorm, a head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.twice = SyncBatchNorm(4, momentum=0.3)
        self.between = nn.Conv2d(4, 4, 1)
        self.bare = SyncBatchNorm(4, eps=0.1, momentum=None, affine=False)
        self.plain = nn.BatchNorm2d(4, eps=1e-3)
        self.head = nn.Linear(4, 2)
        for module in (self.twice, self.plain):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.normal_(module.bias)

    def forward(self, image):
        x = torch.relu(self.twice(self.conv(image)))
        x = torch.relu(self.twice(self.between(x)))
        return self.head(self.plain(torch.relu(self.bare(x))).mean((2, 3)))


def _trained():
    net = Net().train()
    for _ in range(2):
        net(torch.randn(4, 3, 6, 5))
    return net


def _nodes(path):
    model = onnx.load(path)
    onnx.checker.check_model(model)
    return [node for node in model.graph.node if node.op_type == "MMCVSyncBatchNorm"]


@pytest.fixture(params=["dynamo", "torchscript"])
def exporter(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.onnx"


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_deploy_runs_without_us_at_any_size(exporter, training, path):
    net = _trained().train(training)
    before = copy.deepcopy(net.state_dict())
    result = bnexport.export(net, torch.randn(2, 3, 6, 5), path, exporter=exporter)
    assert result.verification.passed
    assert (result.inputs, result.outputs, result.state) == (("image",), ("output",), ())
    assert net.training is training
    assert result.notes == ("the module is in train mode; mode 'deploy' writes it in eval mode",) * training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {opset.domain for opset in model.opset_import} <= {""}
    assert not model.functions
    assert_right(path, net.eval(), (5, 3, 9, 4))


def test_custom_op_in_eval(exporter, path):
    net, x = _trained().eval(), torch.randn(5, 3, 9, 4)
    assert bnexport.export(net, torch.randn(2, 3, 6, 5), path, mode="custom_op", exporter=exporter).verification.passed
    assert len(_nodes(path)) == 3
    for library in (True, False):
        got = torch.from_numpy(run(path, x, library=library)["output"])
        torch.testing.assert_close(got, net(x).detach(), rtol=1e-4, atol=1e-5)


def test_custom_op_in_train_returns_the_statistics(exporter, path):
    """With our library and by the portable body; the nodes are complete, and say nothing of the machine they were made on."""
    net = _trained()
    before = copy.deepcopy(net.state_dict())
    result = bnexport.export(net, torch.randn(2, 3, 6, 5), path, mode="custom_op", exporter=exporter)
    assert result.verification.passed
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    state = [name for name in before if name.split(".")[-1] in ("running_mean", "running_var", "num_batches_tracked")]
    assert list(result.outputs) == ["output", *(f"{name}.new" for name in state)]
    model, operator = onnx.load(path), schema.SYNC_BATCH_NORM
    assert set(state) <= {initializer.name for initializer in model.graph.initializer}
    for node in _nodes(path):
        assert node.domain == "mmcv"
        assert len(node.input) == 5 and all(node.input)
        assert len(node.output) == 5
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert set(attributes) == {attribute.name for attribute in operator.attributes}
        assert (attributes["group"], attributes["group_size"], attributes["training_mode"]) == (b"", 1, 1)
    (function,) = model.functions
    assert (function.domain, function.name) == (operator.domain, operator.name)
    assert str(path.parent) not in str(model) and ".py" not in str(model)
    x = torch.randn(5, 3, 9, 4) * 2 + 1
    for library in (True, False):
        reference = copy.deepcopy(net)
        wanted = {"output": reference(x).detach()} | {f"{name}.new": reference.state_dict()[name] for name in state}
        for name, value in run(path, x, library=library).items():
            loose = 10 if name == "output" else 1
            got = torch.from_numpy(np.asarray(value))
            torch.testing.assert_close(got, wanted[name], rtol=1e-5 * loose, atol=1e-5, msg=name)


def test_batch_of_one_stays_dynamic(exporter, path):
    net = _trained().eval()
    bnexport.export(net, torch.randn(1, 3, 6, 5), path, exporter=exporter)
    assert_right(path, net, (7, 3, 6, 5))


def test_batch_norms_before_the_export_are_counted_by_their_kind(exporter, path):
    """Plain ones in the graph, and twice one sync batch norm; two more sync batch norms outside of it."""

    net = compose(
        lambda self, x, scale: self.norm(torch.relu(self.norm(self.first(x)))) * scale,
        first=nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)),
        norm=nn.SyncBatchNorm(4),
        auxiliary=nn.Sequential(SyncBatchNorm(4), SyncBatchNorm(4), SyncBatchNorm(4)),
    )
    x = torch.randn(2, 3, 8, 8)
    kwargs = {"scale": torch.ones(2, 1, 1, 1)}
    result = bnexport.export(net.eval(), x, path, kwargs=kwargs, exporter=exporter, verify=False)
    assert (result.report.before.batch_norm, result.report.before.sync_batch_norm) == (2, 2)


@pytest.mark.parametrize("mode", ["deploy", "custom_op"])
def test_a_linear_on_sequences_with_a_large_weight(mode, exporter, path):
    """Both exporters write x @ w.T with the transposed view of w; from 64 KiB on it goes to the engine as an array."""
    net = nn.Linear(128, 160).eval()
    assert bnexport.export(net, torch.randn(2, 7, 128), path, mode=mode, exporter=exporter).verification.passed
    assert_right(path, net, (3, 7, 128))


def test_half_precision(exporter, path):
    net, x = nn.Sequential(nn.Conv2d(3, 4, 1), SyncBatchNorm(4), nn.ReLU()).half(), torch.randn(4, 3, 5, 5).half()
    assert bnexport.export(net, x, path, mode="custom_op", exporter=exporter).verification.passed


def test_a_module_under_two_names_updates_its_statistics_twice(exporter, path):
    norm = nn.BatchNorm2d(3, momentum=0.3)
    net, x = nn.Sequential(nn.Conv2d(3, 3, 1), norm, nn.ReLU(), norm), torch.randn(4, 3, 5, 5)
    result = bnexport.export(net, x, path, mode="custom_op", exporter=exporter)
    assert result.state == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert {f"1.{name}" for name in norm.state_dict()} <= {each.name for each in onnx.load(path).graph.initializer}
    got = run(path, x, library=True)
    net(x)
    assert got["1.num_batches_tracked.new"] == 2
    np.testing.assert_allclose(got["1.running_var.new"], norm.running_var, rtol=1e-5, atol=1e-6)


def test_torchs_own_sync_batch_norm(exporter, tmp_path):
    net, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4)), torch.randn(4, 3, 5, 5)
    assert bnexport.export(net.eval(), x, tmp_path / "e.onnx", exporter=exporter).verification.passed
    result = bnexport.export(net.train(), x, tmp_path / "t.onnx", mode="custom_op", exporter=exporter)
    assert result.verification.passed
    assert result.state == ("1.running_mean", "1.running_var", "1.num_batches_tracked")


@pytest.mark.parametrize("padding", [(1, 0, 2), "same"], ids=str)
def test_convolution_in_three_dimensions_without_a_bias(padding, path):
    net = nn.Sequential(nn.Conv3d(4, 6, (3, 1, 5), padding=padding, groups=2, bias=False), nn.BatchNorm3d(6)).eval()
    assert bnexport.export(net, torch.randn(2, 4, 3, 5, 7), path).verification.passed
    assert operators(path) == ["Conv"]


def test_several_inputs_and_named_outputs(exporter, tmp_path):
    def forward(self, left, right):
        return {"sum": self.norm(left) + right, "pair": (left, right)}

    net = compose(forward, norm=SyncBatchNorm(3)).eval()
    args, options = (torch.randn(4, 3), torch.randn(4, 3)), {"exporter": exporter}
    result = bnexport.export(net, args, tmp_path / "m.onnx", **options)
    assert (result.inputs, result.outputs) == (("left", "right"), ("sum", "pair_0", "pair_1"))
    assert not result.notes  # both have one number of rows
    options |= {"input_names": ["a", "b"], "output_names": ["x", "y", "z"]}
    named = bnexport.export(net, args, tmp_path / "n.onnx", **options)
    assert list(run(named.path, *args)) == ["x", "y", "z"]


def test_frozen_statistics_in_a_training_model(exporter, path):
    net = _trained()
    net.twice.eval()
    result = bnexport.export(net, torch.randn(2, 3, 6, 5), path, mode="custom_op", exporter=exporter)
    assert result.verification.passed
    assert not [name for name in result.state if name.startswith("twice")]


def test_dropout_in_train_mode_is_not_called_verified(path):
    net = nn.Sequential(SyncBatchNorm(3), nn.Dropout())
    result = bnexport.export(net, torch.randn(8, 3), path, mode="custom_op")
    assert result.verification.status == "not_verified"
    assert "random" in result.verification.reason


def test_bfloat16_inside_is_kept_and_not_verified(path):
    """ONNX Runtime has no convolution of this type for CPUs."""

    class Autocast(nn.Conv2d):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    with pytest.warns(NotVerifiedWarning, match="bfloat16"):
        result = bnexport.export(Autocast(3, 4, 3).eval(), torch.randn(2, 3, 8, 8), path, exporter="torchscript")
    assert result.verification.status == "not_verified" and path.exists()


@pytest.mark.skipif(not torch_versions.has((2, 9)), reason="torch.cond needs the dynamo exporter")
@pytest.mark.parametrize("fixed", [False, True])
def test_a_branch_that_returns_its_operand(fixed, path):
    """Both branches are right in the file, whichever the example takes, and later sizes and exports run after torch.cond
    was recorded. fixed: torch records the branches of this model for one size only, after failed attempts."""

    def forward(self, x):
        y = self.norm(x)
        return torch.cond(y.sum() > 0, lambda t: t.clone(), lambda t: -t, (y,))

    norm = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)) if fixed else nn.BatchNorm2d(3)
    model, x = compose(forward, norm=norm).eval(), torch.rand(2, 3, 4, 4) + 1
    for _ in range(1 + fixed):
        result = bnexport.export(model, x, path, exporter="dynamo", overwrite=True)
    assert result.verification.passed
    assert fixed or not [note for note in result.notes if "ran at no other size" in note]
    for value in (x, -x):
        np.testing.assert_allclose(output(path, value), model(value).detach(), rtol=1e-4)


def test_a_wrong_graph_is_never_written(path, wrong_weight):
    path.write_bytes(b"what was there")
    with pytest.raises(UsageError, match="exists; write to another file, or replace it with overwrite=True"):
        bnexport.export(_trained().eval(), torch.randn(2, 3, 6, 5), path)
    with pytest.raises(VerificationError, match=r"nothing was written: output 'output' in .*: differs"):
        bnexport.export(_trained().eval(), torch.randn(2, 3, 6, 5), path, overwrite=True)
    assert path.read_bytes() == b"what was there"
    assert list(path.parent.iterdir()) == [path]


def _export_in_group(group, folder, register, training=True):
    """The group's name and size in the file, the bodies, and whether it is verified.

    In eval mode the module has no running statistics: it uses the batch of its own process.
    """
    norm = SyncBatchNorm(4, group=group, track_running_stats=training)
    net = copy.deepcopy(nn.Sequential(nn.Conv1d(3, 4, 1), norm)).train(training)
    if register:
        bnexport.register_group("pair", group)
    try:
        path = f"{folder}/{dist.get_rank(group)}.onnx"
        result = bnexport.export(net, torch.randn(4, 3, 5), path, mode="custom_op", overwrite=True)
    finally:
        if register:
            groups.unregister_group("pair")
    (node,) = [node for node in result.model.graph if node.op_type == "MMCVSyncBatchNorm"]
    name, size = node.attributes["group"].as_string(), node.attributes["group_size"].as_int()
    return name, size, len(result.model.functions), result.verification.passed


def test_a_group_of_processes_is_written_by_its_public_name(cluster, tmp_path):
    for result in cluster.run(2, _export_in_group, str(tmp_path), False):
        assert isinstance(result, Raised)
        assert result.type == "UnsupportedModelError"
        assert "register_group" in result.message
    assert not list(tmp_path.iterdir())
    for result in cluster.call(3, _export_in_group, str(tmp_path), False, False):
        assert result == ("", 1, 1, True)
    for result in cluster.call(2, _export_in_group, str(tmp_path), True):
        assert result == ("pair", 2, 0, False)
    for result in cluster.run(2, _export_in_group, str(tmp_path), False):
        assert isinstance(result, Raised), "the group is not registered any more"
    for result in cluster.call(4, _export_in_group, str(tmp_path), False):
        assert result[:2] == ("world", 4)


X = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))


def stateful():
    """A buffer that a forward replaces without reading it, and one that it changes in place."""

    def forward(self, x):
        if self.training:
            self.last = x.mean((0, 2))
            self.total += self.last
        return self.norm(x) + self.total[:, None]

    return compose(forward, norm=SyncBatchNorm(3), last=torch.zeros(3), total=torch.ones(3))


def test_every_buffer_that_a_training_forward_changes_is_returned(tmp_path):
    net, x = stateful(), torch.randn(4, 3, 5)
    result = bnexport.export(net, x, tmp_path / "m.onnx", mode="custom_op")
    assert result.verification.passed
    assert set(result.state) == {name for name, _ in net.named_buffers()}
    got = run(result.path, x, library=True)
    net(x)
    for name, value in net.named_buffers():
        torch.testing.assert_close(torch.from_numpy(np.asarray(got[f"{name}.new"])), value, msg=name)
    words = "last: the forward changes this buffer, and exporter='torchscript'"
    with pytest.raises(UnsupportedModelError, match=words):
        bnexport.export(stateful(), x, tmp_path / "t.onnx", mode="custom_op", exporter="torchscript")


@pytest.mark.parametrize("momentum", [0.1, None])
def test_an_empty_batch_does_not_count(exporter, momentum, tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 3, 1), SyncBatchNorm(3, momentum=momentum))
    result = bnexport.export(net, torch.randn(4, 3, 5, 5), tmp_path / "m.onnx", mode="custom_op", exporter=exporter)
    full, empty = (run(result.path, torch.randn(size, 3, 5, 5), library=True) for size in (2, 0))
    assert (full["1.num_batches_tracked.new"], empty["1.num_batches_tracked.new"]) == (1, 0)
    np.testing.assert_array_equal(empty["1.running_var.new"], net[1].running_var)


class _Activated(nn.BatchNorm2d):
    def forward(self, x):
        return torch.relu(super().forward(x))


class _ActivatedOurs(SyncBatchNorm):
    def forward(self, x):
        return torch.relu(super().forward(x))


def test_a_subclass_that_computes_something_else_is_refused_by_name(exporter, tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 3, 1), _Activated(3))
    with pytest.raises(UnsupportedModelError, match=r"^1 \(.*_Activated changes forward\): .* mode='deploy'"):
        bnexport.export(net, X, tmp_path / "m.onnx", mode="custom_op", exporter=exporter)
    assert not list(tmp_path.iterdir())
    assert bnexport.export(net, X, tmp_path / "m.onnx", exporter=exporter).verification.passed


@pytest.mark.filterwarnings("ignore:scripting fails")
@pytest.mark.parametrize("name", ["m.pt", "m.pt2"])
def test_a_subclass_of_ours_in_torchs_formats(name, tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 3, 1), _ActivatedOurs(3))
    kind = {"m.pt": "torchscript", "m.pt2": "pt2"}[name]
    assert bnexport.export(net, X, tmp_path / name, format=kind).verification.passed


def test_batch_statistics_that_no_module_holds_are_refused(exporter, tmp_path):
    def forward(x):
        return nn.functional.batch_norm(x, norm.running_mean, norm.running_var, None, None, True)

    norm = nn.BatchNorm2d(3)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Identity())
    net[1].norm, net[1].forward = norm, forward
    with pytest.raises(UnsupportedModelError, match=r"batch.norm.*put that module into eval mode"):
        bnexport.export(net, X, tmp_path / "m.onnx", mode="custom_op", exporter=exporter)
    assert not list(tmp_path.iterdir())


def test_errors_of_an_exporter_name_the_model(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 3, 1), torch.jit.script(nn.BatchNorm2d(3))).eval()
    words = r"^1 \(.*compiled by TorchScript.*\): torch cannot export it, though it runs: "
    with pytest.raises(UnsupportedModelError, match=words):
        bnexport.export(net, X, tmp_path / "m.onnx", exporter="torchscript")
