"""Exported models in ONNX Runtime, with the library and without, against torch."""

import copy
import io

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import bnexport
from bnexport import SyncBatchNorm, schema, torch_versions
from bnexport.errors import NotVerifiedWarning, UnsupportedModelError, UsageError, VerificationError
from bnexport.exporting import onnx_target
from bnexport.runtime import groups
from tests.support.cluster import Raised

EXPORTERS = ["dynamo", "torchscript"]


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


def _run(path, feeds, library):
    session = bnexport.InferenceSession(path) if library else onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds)))


def _snapshot(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.fixture(params=EXPORTERS)
def exporter(request):
    return request.param


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_deploy_runs_without_us_at_any_size(exporter, training, tmp_path):
    net = _trained().train(training)
    before = _snapshot(net)
    path = tmp_path / "m.onnx"
    result = bnexport.export(net, torch.randn(2, 3, 6, 5), path, exporter=exporter)
    assert result.verification.passed
    assert (result.inputs, result.outputs, result.state) == (("image",), ("output",), ())
    assert net.training is training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {opset.domain for opset in model.opset_import} <= {""}
    assert not model.functions
    x = torch.randn(5, 3, 9, 4)
    got = _run(path, {"image": x.numpy()}, library=False)["output"]
    torch.testing.assert_close(torch.from_numpy(got), net.eval()(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("library", [True, False], ids=["library", "portable body"])
def test_custom_op_in_eval(exporter, library, tmp_path):
    net = _trained().eval()
    path = tmp_path / "m.onnx"
    assert bnexport.export(net, torch.randn(2, 3, 6, 5), path, mode="custom_op", exporter=exporter).verification.passed
    model = onnx.load(path)
    onnx.checker.check_model(model)
    nodes = [node for node in model.graph.node if node.op_type == "MMCVSyncBatchNorm"]
    assert len(nodes) == 3
    x = torch.randn(5, 3, 9, 4)
    got = _run(path, {"image": x.numpy()}, library)["output"]
    torch.testing.assert_close(torch.from_numpy(got), net(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("library", [True, False], ids=["library", "portable body"])
def test_custom_op_in_train_returns_the_statistics(exporter, library, tmp_path):
    net = _trained()
    before = _snapshot(net)
    path = tmp_path / "m.onnx"
    result = bnexport.export(net, torch.randn(2, 3, 6, 5), path, mode="custom_op", exporter=exporter)
    assert result.verification.passed
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    state = [name for name in before if name.split(".")[-1] in ("running_mean", "running_var", "num_batches_tracked")]
    assert list(result.outputs) == ["output", *(f"{name}.new" for name in state)]
    model = onnx.load(path)
    onnx.checker.check_model(model)
    assert set(state) <= {initializer.name for initializer in model.graph.initializer}

    x = torch.randn(5, 3, 9, 4) * 2 + 1
    got = _run(path, {"image": x.numpy()}, library)
    expected = net(x).detach()
    torch.testing.assert_close(torch.from_numpy(got["output"]), expected, rtol=1e-4, atol=1e-5)
    after = net.state_dict()
    for name in state:
        torch.testing.assert_close(
            torch.from_numpy(np.asarray(got[f"{name}.new"])), after[name], rtol=1e-5, atol=1e-5, msg=name
        )


def test_complete_nodes_and_body(exporter, tmp_path):
    path = tmp_path / "m.onnx"
    bnexport.export(_trained(), torch.randn(2, 3, 6, 5), path, mode="custom_op", exporter=exporter)
    model = onnx.load(path)
    operator = schema.SYNC_BATCH_NORM
    for node in (node for node in model.graph.node if node.op_type == operator.name):
        assert node.domain == "mmcv"
        assert len(node.input) == 5 and all(node.input)
        assert len(node.output) == 5
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert set(attributes) == {attribute.name for attribute in operator.attributes}
        assert (attributes["group"], attributes["group_size"], attributes["training_mode"]) == (b"", 1, 1)
    (function,) = model.functions
    assert (function.domain, function.name) == (operator.domain, operator.name)
    # Nothing of the machine it was made on.
    assert str(tmp_path) not in str(model) and ".py" not in str(model)


def test_onnx_reference_runs_the_body(tmp_path):
    net = _trained().eval()
    path = tmp_path / "m.onnx"
    bnexport.export(net, torch.randn(2, 3, 6, 5), path, mode="custom_op")
    x = torch.randn(2, 3, 6, 5)
    (got,) = onnx.reference.ReferenceEvaluator(onnx.load(path)).run(None, {"image": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), net(x).detach(), rtol=1e-4, atol=1e-5)


def test_static_shapes(exporter, tmp_path):
    path = tmp_path / "m.onnx"
    bnexport.export(_trained().eval(), torch.randn(2, 3, 6, 5), path, dynamic=False, exporter=exporter)
    assert onnxruntime.InferenceSession(path).get_inputs()[0].shape == [2, 3, 6, 5]


def test_batch_of_one_stays_dynamic(exporter, tmp_path):
    path = tmp_path / "m.onnx"
    net = _trained().eval()
    bnexport.export(net, torch.randn(1, 3, 6, 5), path, exporter=exporter)
    x = torch.randn(7, 3, 6, 5)
    torch.testing.assert_close(
        torch.from_numpy(_run(path, {"image": x.numpy()}, False)["output"]), net(x).detach(), rtol=1e-4, atol=1e-5
    )


def test_batch_norms_outside_the_graph_are_not_counted(tmp_path):
    """An auxiliary head, as in MMSegmentation, trains and is not exported."""

    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), SyncBatchNorm(4), nn.Conv2d(4, 4, 1), SyncBatchNorm(4))
            self.auxiliary = nn.Sequential(nn.Conv2d(4, 2, 1), SyncBatchNorm(2))

        def forward(self, x):
            return self.body(x)

    result = bnexport.export(Auxiliary().eval(), torch.randn(2, 3, 8, 8), tmp_path / "m.onnx", exporter="torchscript")
    assert (result.report.before.batch_norm, result.report.before.sync_batch_norm) == (0, 2)
    assert result.report.summary() == "2 of 2 batch norms folded into convolutions"


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_batch_norms_before_the_export_are_counted_by_their_kind(exporter, tmp_path):
    """Plain ones in the graph, and twice one sync batch norm; two more sync batch norms outside of it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
            self.norm = nn.SyncBatchNorm(4)
            self.auxiliary = nn.Sequential(SyncBatchNorm(4), SyncBatchNorm(4), SyncBatchNorm(4))

        def forward(self, x, scale):
            return self.norm(torch.relu(self.norm(self.first(x)))) * scale

    x, path = torch.randn(2, 3, 8, 8), tmp_path / "m.onnx"
    kwargs = {"scale": torch.ones(2, 1, 1, 1)}
    result = bnexport.export(Net().eval(), x, path, kwargs=kwargs, exporter=exporter, verify=False)
    assert (result.report.before.batch_norm, result.report.before.sync_batch_norm) == (2, 2)


def test_a_dimension_that_the_model_fixes_is_noted(tmp_path):
    net = nn.Sequential(nn.Conv1d(1, 2, 3), SyncBatchNorm(2), nn.Flatten(), nn.Linear(2 * 4, 3)).eval()
    result = bnexport.export(net, torch.randn(2, 1, 6), tmp_path / "m.onnx")
    assert [note for note in result.notes if "stays 6" in note]
    assert onnxruntime.InferenceSession(result.path).get_inputs()[0].shape == ["batch", 1, 6]


@pytest.mark.parametrize("mode", ["deploy", "custom_op"])
def test_a_linear_on_sequences_with_a_large_weight(mode, exporter, tmp_path):
    """Both exporters write x @ w.T with the transposed view of w; from 64 KiB on it goes to the engine as an array."""
    net = nn.Linear(128, 160).eval()
    path = tmp_path / "m.onnx"
    assert bnexport.export(net, torch.randn(2, 7, 128), path, mode=mode, exporter=exporter).verification.passed
    x = torch.randn(3, 7, 128)
    (got,) = onnxruntime.InferenceSession(path).run(None, {"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), net(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("convert", ["torch", "converted"])
def test_torchs_own_sync_batch_norm(convert, exporter, tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4))
    net = bnexport.convert_sync_batchnorm(net) if convert == "converted" else net
    x = torch.randn(4, 3, 5, 5)
    assert bnexport.export(net.eval(), x, tmp_path / "e.onnx", exporter=exporter).verification.passed
    result = bnexport.export(net.train(), x, tmp_path / "t.onnx", mode="custom_op", exporter=exporter)
    assert result.verification.passed
    assert result.state == ("1.running_mean", "1.running_var", "1.num_batches_tracked")


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_half_precision(exporter, training, tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 1), SyncBatchNorm(4), nn.ReLU()).half().train(training)
    result = bnexport.export(
        net, torch.randn(4, 3, 5, 5).half(), tmp_path / "m.onnx", mode="custom_op", exporter=exporter
    )
    assert result.verification.passed, result.verification.summary()


def test_double_precision(exporter, tmp_path):
    net = nn.Sequential(nn.Linear(3, 4), SyncBatchNorm(4)).double()
    result = bnexport.export(net, torch.randn(6, 3).double(), tmp_path / "m.onnx", mode="custom_op", exporter=exporter)
    assert result.verification.passed


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 6), (2, 3, 4, 3, 3)], ids=str)
@pytest.mark.parametrize("library", [True, False], ids=["library", "portable body"])
def test_other_ranks_in_train_mode(shape, library, exporter, tmp_path):
    net = SyncBatchNorm(3)
    path = tmp_path / "m.onnx"
    assert bnexport.export(net, torch.randn(shape), path, mode="custom_op", exporter=exporter).verification.passed
    x = torch.randn(shape)
    got = _run(path, {"input": x.numpy()}, library)
    torch.testing.assert_close(torch.from_numpy(got["output"]), net(x).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(got["running_var.new"]), net.running_var, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", [(1, 0, 2), "same"], ids=str)
def test_convolution_in_three_dimensions_without_a_bias(padding, tmp_path):
    net = nn.Sequential(nn.Conv3d(4, 6, (3, 1, 5), padding=padding, groups=2, bias=False), nn.BatchNorm3d(6)).eval()
    result = bnexport.export(net, torch.randn(2, 4, 3, 5, 7), tmp_path / "model.onnx")
    assert result.verification.passed
    assert [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node] == ["Conv"]


def test_several_inputs_and_named_outputs(exporter, tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = SyncBatchNorm(3)

        def forward(self, left, right):
            return {"sum": self.norm(left) + right, "pair": (left, right)}

    args = (torch.randn(4, 3), torch.randn(4, 3))
    result = bnexport.export(Two().eval(), args, tmp_path / "m.onnx", exporter=exporter)
    assert (result.inputs, result.outputs) == (("left", "right"), ("sum", "pair_0", "pair_1"))
    named = bnexport.export(
        Two().eval(), args, tmp_path / "n.onnx", exporter=exporter, input_names=["a", "b"], output_names=["x", "y", "z"]
    )
    assert [value.name for value in onnxruntime.InferenceSession(named.path).get_outputs()] == ["x", "y", "z"]


def test_frozen_statistics_in_a_training_model(exporter, tmp_path):
    net = _trained()
    net.twice.eval()
    result = bnexport.export(net, torch.randn(2, 3, 6, 5), tmp_path / "m.onnx", mode="custom_op", exporter=exporter)
    assert result.verification.passed
    assert not [name for name in result.state if name.startswith("twice")]


def test_dropout_in_train_mode_is_not_called_verified(tmp_path):
    net = nn.Sequential(SyncBatchNorm(3), nn.Dropout())
    result = bnexport.export(net, torch.randn(8, 3), tmp_path / "m.onnx", mode="custom_op")
    assert result.verification.status == "not_verified"
    assert "random" in result.verification.reason


def test_bfloat16_inside_is_kept_and_not_verified(tmp_path):
    """ONNX Runtime has no convolution of this type for CPUs."""

    class Autocast(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.conv(x).float()

    with pytest.warns(NotVerifiedWarning, match="bfloat16"):
        result = bnexport.export(
            Autocast().eval(), torch.randn(2, 3, 8, 8), tmp_path / "m.onnx", exporter="torchscript"
        )
    assert result.verification.status == "not_verified" and result.path.exists()


@pytest.mark.skipif(not torch_versions.has((2, 9)), reason="torch.cond needs the dynamo exporter")
@pytest.mark.parametrize("fixed", [False, True])
def test_a_branch_that_returns_its_operand(fixed, tmp_path):
    """Both branches are right in the file, whichever the example takes, and later sizes and exports run after torch.cond
    was recorded. fixed: torch records the branches of this model for one size only, after failed attempts."""

    class Conditional(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)) if fixed else nn.BatchNorm2d(3)

        def forward(self, x):
            y = self.norm(x)
            return torch.cond(y.sum() > 0, lambda t: t.clone(), lambda t: -t, (y,))

    model, x = Conditional().eval(), torch.rand(2, 3, 4, 4) + 1
    for _ in range(1 + fixed):
        result = bnexport.export(model, x, tmp_path / "m.onnx", exporter="dynamo", overwrite=True)
    assert result.verification.passed
    assert fixed or not [note for note in result.notes if "ran at no other size" in note]
    session = onnxruntime.InferenceSession(result.path)
    for value in (x, -x):
        np.testing.assert_allclose(session.run(None, {"x": value.numpy()})[0], model(value).detach(), rtol=1e-4)


def test_functional_batch_statistics_with_a_state_are_refused(tmp_path):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.var = nn.Buffer(torch.zeros(3)), nn.Buffer(torch.ones(3))

        def forward(self, x):
            return nn.functional.batch_norm(x, self.mean, self.var, training=True)

    path = tmp_path / "m.onnx"
    with pytest.raises(UnsupportedModelError, match="training mode would be exported with inference semantics"):
        bnexport.export(Functional(), torch.randn(4, 3, 5, 5), path, mode="custom_op")
    assert not path.exists()


def test_a_wrong_graph_is_never_written(tmp_path, monkeypatch):
    def wrong(model, *arguments, finish=onnx_target.finish):
        finish(model, *arguments)
        bias = model.graph.initializers["head.bias"]
        bias.const_value = ir.tensor(bias.const_value.numpy() + np.float32(1e-2), name="head.bias")

    monkeypatch.setattr(onnx_target, "finish", wrong)
    path = tmp_path / "m.onnx"
    path.write_bytes(b"what was there")
    with pytest.raises(VerificationError, match=r"nothing was written: output 'output' in .*: differs"):
        bnexport.export(_trained().eval(), torch.randn(2, 3, 6, 5), path, overwrite=True)
    assert path.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exporter": "jit"}, "exporter: got 'jit'"),
        ({"args": (1,)}, "args: got no tensor"),
        ({"model": torch.relu}, "model: got builtin_function_or_method"),
        (
            {"path": torch.zeros(2), "args": nn.ReLU(), "model": "m.onnx"},
            r"path: got Tensor.*export\(model, args, path\)",
        ),
        (
            {"path": io.BytesIO()},
            "path: got BytesIO, expected the name of a file.*; export to a file and read its bytes",
        ),
        ({"input_names": ["a", "b"]}, "input_names: got 2 names, expected 1"),
        ({"output_names": ["a", "b"]}, "output_names: got 2 names, expected 1"),
        ({"format": "pt2", "path": "m.pt2", "input_names": ["a"]}, "input_names, output_names: given with format"),
    ],
)
def test_usage_errors(change, message, tmp_path):
    arguments = {"model": _trained().eval(), "args": torch.randn(2, 3, 6, 5), "path": tmp_path / "m.onnx"} | change
    with pytest.raises(UsageError, match=message):
        bnexport.export(**arguments)
    assert not list(tmp_path.iterdir())


def _export_in_group(group, folder, register, training=True):
    """In eval mode the module has no running statistics: it uses the batch of its own process."""
    norm = SyncBatchNorm(4, group=group, track_running_stats=training)
    net = copy.deepcopy(nn.Sequential(nn.Conv1d(3, 4, 1), norm)).train(training)
    if register:
        bnexport.register_group("pair", group)
    import torch.distributed as dist

    try:
        result = bnexport.export(
            net, torch.randn(4, 3, 5), f"{folder}/{dist.get_rank(group)}.onnx", mode="custom_op", overwrite=True
        )
    finally:
        if register:
            groups.unregister_group("pair")
    (node,) = [node for node in result.model.graph if node.op_type == "MMCVSyncBatchNorm"]
    return {
        "group": node.attributes["group"].as_string(),
        "size": node.attributes["group_size"].as_int(),
        "functions": len(result.model.functions),
        "verified": result.verification.passed,
    }


def test_a_group_of_processes_is_written_by_its_public_name(cluster, tmp_path):
    for result in cluster.run(2, _export_in_group, str(tmp_path), False):
        assert isinstance(result, Raised)
        assert result.type == "UnsupportedModelError"
        assert "register_group" in result.message
    assert not list(tmp_path.iterdir())
    for result in cluster.call(3, _export_in_group, str(tmp_path), False, False):
        assert result == {"group": "", "size": 1, "functions": 1, "verified": True}
    for result in cluster.call(2, _export_in_group, str(tmp_path), True):
        assert result == {"group": "pair", "size": 2, "functions": 0, "verified": False}
    for result in cluster.run(2, _export_in_group, str(tmp_path), False):
        assert isinstance(result, Raised), "the group is not registered any more"
    for result in cluster.call(4, _export_in_group, str(tmp_path), False):
        assert (result["group"], result["size"]) == ("world", 4)
