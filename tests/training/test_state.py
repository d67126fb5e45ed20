"""All that a step reads of its state flows from its inputs, whose rows vary as dynamic= says; nothing is a constant of the graph."""

import functools

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import bnexport
from bnexport import SyncBatchNorm, TrainingSession, export_training_step
from bnexport.errors import UnsupportedModelError, UsageError
from bnexport.training import verification
from tests.support.modules import compose

IMAGES, LABELS = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 4, 0])


class Net(nn.Module):
    def __init__(self, checkpointed=False, p=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(p))
        self.b = nn.Linear(288, 5)
        self.checkpointed = checkpointed

    def forward(self, x):
        y = torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=False) if self.checkpointed else self.a(x)
        return self.b(y.flatten(1))


def export(model, path, loss=nn.functional.cross_entropy, **options):
    options = {"optimizer_options": {"lr": 0.05}, **options}
    return bnexport.export_training_step(model.train(), loss, (IMAGES, LABELS), path, **options)


def test_checkpointed_modules_train_as_others(tmp_path):
    reference = Net()
    result = export(Net(checkpointed=True), tmp_path / "s.onnx")
    assert result.verification.passed
    assert result.notes and result.notes[0].startswith("a.1: running statistics are updated once in a step")
    session, rule = bnexport.TrainingSession(tmp_path / "s.onnx"), torch.optim.SGD(reference.parameters(), lr=0.05)
    for _ in range(3):
        rule.zero_grad()
        nn.functional.cross_entropy(reference(IMAGES), LABELS).backward()
        rule.step()
        session.step((IMAGES.numpy(), LABELS.numpy()))
    for name, value in reference.state_dict().items():
        assert abs(session.state_dict()[name] - value.numpy()).max() < 1e-6, name


def test_checkpointed_dropout_draws_one_mask(tmp_path):
    """Checkpoints leave no trace in the graph; of batch norms that do not update twice no note is made."""
    ours = bnexport.convert_sync_batchnorm(Net(checkpointed=True, p=0.5))
    results = [export(net, tmp_path / "s.onnx", verify=False, overwrite=True) for net in (ours, Net(p=0.5))]
    operators = [sorted(node.op_type for node in result.model.graph) for result in results]
    assert operators[0] == operators[1] and "BitwiseXor" in operators[0]
    assert not any(result.notes for result in results)


class Kept(Net):
    """It reads a weight from a list, which torch.func.functional_call does not exchange."""

    def __init__(self):
        super().__init__()
        self.kept = [self.a[0].weight]

    def forward(self, x):
        return super().forward(x) + self.kept[0].mean()


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(context, x, module):
        context.save_for_backward(x)
        context.module = module
        return module(x).detach()

    @staticmethod
    def backward(context, grad_output):
        with torch.enable_grad():
            x = context.saved_tensors[0].detach().requires_grad_()
            y = context.module(x)
        return torch.autograd.grad(y, x, grad_output)[0], None


class Recomputing(Net):
    def forward(self, x):
        return _Recomputed.apply(self.a(x).flatten(1), self.b)


@pytest.mark.parametrize(("kind", "name"), [(Kept, "a.0.weight"), (Recomputing, "b.weight")])
def test_state_read_elsewhere_is_refused_by_name(kind, name, tmp_path):
    with pytest.raises(UnsupportedModelError, match=f"^{name}: the code reads it from elsewhere than its module"):
        export(kind(), tmp_path / "s.onnx", verify=False)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_reads_the_model_is_refused(tmp_path):
    """Another model may be a constant."""
    model, other = Net(), Net().eval()

    def loss(output, target, of=model):
        return nn.functional.cross_entropy(output, target) + of.b.weight.square().sum() * output.mean()

    with pytest.raises(UnsupportedModelError, match=r"^b\.weight: .*let forward return what the loss needs"):
        export(model, tmp_path / "s.onnx", loss)
    assert export(
        model, tmp_path / "s.onnx", functools.partial(loss, of=other.requires_grad_(False))
    ).verification.passed


def test_verification_sees_state_that_does_not_flow(tmp_path, checked):
    """Each parameter and statistic as a constant of the graph, with the value of the first step."""
    result = export(Net(), tmp_path / "s.onnx", dynamic=False)
    arguments = checked[0][1:]
    for name, tensor in arguments[0].initial_state().items():
        wrong = ir.from_proto(ir.to_proto(result.model))
        value = next((each for each in wrong.graph.inputs if each.name == name), None)
        if value is None or name == "optimizer.step":
            continue
        wrong.graph.inputs.remove(value)
        value.const_value = ir.tensor(tensor.numpy(), name=name)
        wrong.graph.register_initializer(value)
        found = verification.check(wrong, *arguments)
        assert found.status == "failed" and "from other weights and statistics" in found.reason, name


def scaled(factor=lambda x: 1):
    """Takes a factor for each class beside the images."""
    torch.manual_seed(0)
    parts = {"norm": nn.BatchNorm2d(2), "out": nn.Linear(2, 3)}
    return compose(lambda self, x, scale: self.out(self.norm(x).mean((2, 3))) * scale * factor(x), **parts)


def batch(rows, classes=3):
    generator = torch.Generator().manual_seed(rows)
    images = torch.randn(rows, 2, 5, 5, generator=generator)
    return images, torch.full((classes,), 0.5), torch.randint(0, 3, (rows,), generator=generator)


def export_scaled(path, dynamic, rows=4, **options):
    return export_training_step(scaled(**options), nn.functional.cross_entropy, batch(rows), path, dynamic=dynamic)


def rows_of(result):
    return {value.name: str(value.shape[0]) for value in result.model.graph.inputs if value.name in result.inputs}


# One row is doubled for the export_scaled; it must not double the factors.
@pytest.mark.parametrize(("rows", "named", "name"), [(4, [0], "batch"), (1, [0], "batch"), (4, {0: "rows"}, "rows")])
def test_the_rows_of_named_arrays_vary(tmp_path, rows, named, name):
    path = tmp_path / "s.onnx"
    result = export_scaled(path, {"x": named, "target": named}, rows)
    assert result.verification.passed
    assert rows_of(result) == {"x": name, "scale": "3", "target": name}
    session = TrainingSession(path)
    assert np.isfinite(session.step([tensor.numpy() for tensor in batch(7)]))
    with pytest.raises(UsageError, match=r"scale: got shape \(7,\), expected \(3,\)"):
        session.step([tensor.numpy() for tensor in batch(7, classes=7)])


@pytest.mark.parametrize(
    "dynamic, message",
    [
        ({"x": [0, 2]}, r"dynamic: x: got dimension 2, expected 0: only the rows .* one step for each image size"),
        ({"y": [0]}, r"dynamic: got y, expected inputs among x, scale, target"),
        ({"x": [0], "target": {0: "rows"}}, r"dynamic: target: got 'rows' .* one name for each size .*: batch 4$"),
        ({"x": {0: "n"}, "scale": {0: "n"}}, r"dynamic: scale: got 'n' .* one name for each size .*: n 4, n 3$"),
    ],
)
def test_a_dimension_that_cannot_be_dynamic(tmp_path, dynamic, message):
    with pytest.raises(UsageError, match=message):
        export_scaled(tmp_path / "s.onnx", dynamic)
    assert not list(tmp_path.iterdir())


def test_one_row_and_two_rows_share_a_size(tmp_path):
    """One row is doubled before the export_scaled, and torch gives equal sizes one symbol."""

    def loss(got, y):
        return (got.mean() - y).square().mean()

    made = export_training_step(nn.Linear(3, 1), loss, (torch.ones(1, 3), torch.ones(2)), tmp_path / "s.onnx")
    assert rows_of(made) == {"input": "batch", "target": "batch"}


def test_half_of_the_rows_rounded_up(tmp_path):
    """ONNX rounds an integer division towards zero; 5 // -2 is -3 in Python, and the example's 4 // -2 is -2 in both."""

    def factor(x):
        return -(x.shape[0] // -2)

    export_scaled(tmp_path / "s.onnx", {"x": [0], "target": [0]}, factor=factor)
    *inputs, target = batch(5)
    loss = TrainingSession(tmp_path / "s.onnx").step([tensor.numpy() for tensor in batch(5)])
    assert loss == pytest.approx(float(nn.functional.cross_entropy(scaled(factor)(*inputs), target)), rel=1e-5)


@pytest.mark.parametrize("standard", [True, False])
def test_one_value_a_channel_has_no_unbiased_variance(tmp_path, standard):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), SyncBatchNorm(3)).train()
    rows = (torch.randn(4, 4), torch.randint(0, 3, (4,)))
    export_training_step(net, nn.functional.cross_entropy, rows, tmp_path / "s.onnx", standard_ops_only=standard)
    session = TrainingSession(tmp_path / "s.onnx")
    session.step([tensor[:1].numpy() for tensor in rows])
    state = session.state_dict()
    np.testing.assert_allclose(state["1.running_mean"], 0.1 * net[0](rows[0][:1]).detach()[0], rtol=1e-5)
    np.testing.assert_allclose(state["1.running_var"], np.full(3, 0.9), rtol=1e-6)
