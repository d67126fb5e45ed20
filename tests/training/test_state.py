"""All that a step reads of its state flows from its inputs: nothing is a constant of the graph."""

import copy

import onnx_ir as ir
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import bnexport
from bnexport.errors import UnsupportedModelError
from bnexport.training import verification

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
    model = Net(checkpointed=True)
    reference = copy.deepcopy(model)
    reference.checkpointed = False
    result = export(model, tmp_path / "s.onnx")
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
    model = Net()

    def loss(output, target):
        return nn.functional.cross_entropy(output, target) + model.b.weight.square().sum()

    with pytest.raises(UnsupportedModelError, match=r"^b\.weight: .*let forward return what the loss needs"):
        export(model, tmp_path / "s.onnx", loss)


def test_other_models_may_be_constants(tmp_path):
    teacher = Net().eval()

    def loss(output, target):
        return nn.functional.cross_entropy(output, target) + (output * teacher.b.bias.detach()).mean()

    assert export(Net(), tmp_path / "s.onnx", loss).verification.passed


def test_verification_sees_state_that_does_not_flow(tmp_path, monkeypatch):
    """Each parameter and statistic as a constant of the graph, with the value of the first step."""
    calls, check = [], verification.check
    monkeypatch.setattr(verification, "check", lambda *arguments: calls.append(arguments) or check(*arguments))
    result = export(Net(), tmp_path / "s.onnx", dynamic=False)
    step = calls[0][1]
    for name, tensor in step.initial_state().items():
        wrong = ir.from_proto(ir.to_proto(result.model))
        value = next((each for each in wrong.graph.inputs if each.name == name), None)
        if value is None or name == "optimizer.step":
            continue
        wrong.graph.inputs.remove(value)
        value.const_value = ir.tensor(tensor.numpy(), name=name)
        wrong.graph.register_initializer(value)
        found = verification.check(wrong, *calls[0][1:])
        assert found.status == "failed" and "from other weights and statistics" in found.reason, name
