"""export_training_step: options, what becomes state, and one clear error for each thing that cannot be."""

import copy
import re

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import bnexport
from bnexport import model_io, tolerances
from bnexport.errors import UnsupportedModelError, UsageError, VerificationError
from bnexport.training import verification
from bnexport.training.optimizers import make_optimizer
from bnexport.training.step import Problem, Step
from tests.support.modules import compose
from tests.training.torch_step import state_of, torch_step


class Net(nn.Module):
    """A stem and a head, each with a norm; `norm` chooses its class, `last` a function of the scores."""

    def __init__(self, norm=nn.BatchNorm2d, last=lambda y: y, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), norm(4, **options), nn.ReLU())
        self.head = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), norm(4, **options), nn.ReLU())
        self.out, self.last = nn.Linear(4, 3), last

    def forward(self, x):
        return self.last(self.out(self.head(self.stem(x)).mean((2, 3))))


def batch(size=4, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 2, 5, 5, generator=generator, dtype=torch.float64).to(dtype)
    return images, torch.randint(0, 3, (size,), generator=generator)


def arrays(tensors):
    return [tensor.numpy() for tensor in tensors]


def export(model, path, **options):
    loss, example = options.pop("loss", cross_entropy), options.pop("batch", batch())
    result = bnexport.export_training_step(model, loss, example, path, **options)
    assert options.get("verify") is False or result.verification.passed, result.verification.summary()
    return result, bnexport.TrainingSession(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The step of Net with the default options, for all tests that only look at it."""
    path = tmp_path_factory.mktemp("plain") / "s.onnx"
    export(Net(), path)
    return path


def domains(path):
    return {node.domain for node in model_io.load(path).graph.all_nodes()}


def assert_steps_are_torchs(model, session, folder, optimizer, options, dtype=torch.float32, clip=None):
    """Each result of some steps within the bound of whole models, or twice torch's own error."""
    for seed in range(3):
        state, data = state_of(session, folder), batch(3 + seed, seed + 1, dtype)
        own, exact = (
            torch_step(model, cross_entropy, optimizer, options, state, data, kind, clip)
            for kind in (dtype, torch.float64)
        )
        loss = session.step(arrays(data))
        got = {**state_of(session, folder), "loss": np.array(loss)}
        for name, value in exact.items():
            bound = tolerances.model(str(dtype).removeprefix("torch."), value).atol
            if dtype == torch.float64:
                # eps and momentum are float32 attributes in ONNX.
                bound += tolerances.model("float32", value).atol * (".running" in name) + 1e-8
            bound = max(bound, 2 * np.abs(own[name] - value).max(initial=0.0))
            assert np.abs(got[name] - value).max(initial=0.0) <= bound, f"{name} in step {seed}"


OURS, STANDARD = {"", "mmcv", "bnexport"}, {""}


def sequence(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*layers)


# A model, how it is exported and trains, and the domains of its nodes.
STEPS = {
    "torch's sync batch norm": (lambda: Net(nn.SyncBatchNorm), {}, OURS),
    "ours": (lambda: Net(bnexport.SyncBatchNorm), {"standard_ops_only": True}, STANDARD),
    "a cumulative average": (lambda: Net(lambda channels: nn.BatchNorm2d(channels, momentum=None)), {}, OURS),
    "no weights, no statistics": (lambda: Net(nn.BatchNorm2d, affine=False, track_running_stats=False), {}, OURS),
    "without cpu kernels": (Net, {"cpu_kernels": False}, {"", "mmcv"}),
    "clipping": (Net, {"clip_grad_norm": 0.05, "optimizer_options": {"lr": 0.1, "momentum": 0.9}}, OURS),
    # ONNX Runtime has no float64 convolution on the CPU; fully connected layers it has.
    "float64": (
        lambda: sequence(nn.Flatten(), nn.Linear(50, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double(),
        {"optimizer": "adamw", "optimizer_options": {"lr": 1e-3, "weight_decay": 0.1}, "batch": batch(dtype=torch.float64)},
        {"", "mmcv"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_steps_are_torchs(case, tmp_path, monkeypatch):
    make, options, expected = STEPS[case]
    model = make()
    if expected == STANDARD:  # needs no library
        monkeypatch.setattr("bnexport.native.library.register", None)
    _, session = export(model, tmp_path / "s.onnx", **options)
    assert domains(tmp_path / "s.onnx") == expected
    if case == "torch's sync batch norm":  # which runs on GPUs only
        model = Net()
        model.load_state_dict(make().state_dict())
    optimizer, given = options.get("optimizer", "sgd"), options.get("optimizer_options", {"lr": 1e-3})
    dtype = torch.float64 if case == "float64" else torch.float32
    assert_steps_are_torchs(model, session, tmp_path, optimizer, given, dtype, options.get("clip_grad_norm"))


def test_batch_norms_of_torch(plain, tmp_path):
    """Our nodes and kernels are in the step's graph only; opset and IR version are the lowest, as those of exports."""
    assert domains(plain) == {"", "mmcv", "bnexport"}
    assert domains(plain.with_suffix(".eval.onnx")) == {""}
    for path in (plain, plain.with_suffix(".eval.onnx")):
        model = model_io.load(path)
        assert (model.opset_imports[""], model.ir_version) == (18, 8)
    assert_steps_are_torchs(Net(), bnexport.TrainingSession(plain), tmp_path, "sgd", {"lr": 1e-3})


def test_the_mask_of_a_relu_is_read_from_its_output(tmp_path):
    layers = [nn.ReLU6(), nn.Conv2d(4, 4, 1), nn.Hardtanh(-0.5, 0.25), nn.Conv2d(4, 4, 1), nn.ReLU()]
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), *layers, nn.Flatten(), nn.Linear(36, 3))
    result, _ = export(model, tmp_path / "step.onnx")
    masks = [node for node in result.model.graph if node.op_type == "ReluGrad"]
    assert sorted(mask.inputs[1].producer().op_type for mask in masks) == ["Clip", "Clip", "Relu"]


def test_cpu_kernels_on_another_provider_are_refused(plain):
    with pytest.raises(UsageError, match=r"CUDAExecutionProvider, expected CPUExecutionProvider.*cpu_kernels=False"):
        bnexport.TrainingSession(plain, ["CUDAExecutionProvider"])
    bnexport.TrainingSession(plain, [("CPUExecutionProvider", {})])


def test_frozen_parameters_and_fixed_statistics(tmp_path):
    """And a parameter that the loss does not reach. The model is left as it was."""
    model = Net().train()
    model.unused = nn.Linear(2, 2)
    model.stem.requires_grad_(False).eval()
    model.stem[1].running_mean.normal_()
    before = copy.deepcopy(model.state_dict())
    options = {"lr": 1e-3, "weight_decay": 0.1}
    result, session = export(model, tmp_path / "s.onnx", optimizer="adam", optimizer_options=options)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert (model.training, model.head.training, model.stem.training) == (True, True, False)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "stem.0.weight" in {value.name for value in result.model.graph.inputs}
    assert not [name for name in result.state if "stem" in name or "unused" in name]
    reference = copy.deepcopy(model)
    data = batch(5)
    loss = nn.functional.cross_entropy(reference(data[0]), data[1])
    assert session.step([tensor.numpy() for tensor in data]) == pytest.approx(loss.item(), rel=1e-5)
    after = session.state_dict()
    assert np.array_equal(after["stem.1.running_mean"], model.stem[1].running_mean.numpy())
    assert np.array_equal(after["unused.weight"], model.unused.weight.detach().numpy())
    np.testing.assert_allclose(after["head.1.running_mean"], reference.head[1].running_mean.numpy(), atol=1e-6)


def test_a_norm_that_no_output_needs_keeps_its_statistics(tmp_path):
    def forward(self, x):
        x = self.stem(x)
        self.head(x)
        return self.out(x.mean((2, 3)))

    model = compose(forward, **dict(Net().named_children()))
    _, session = export(model, tmp_path / "s.onnx")
    session.step(arrays(batch()))
    model(batch()[0])
    got, expected = session.state_dict()["head.1.running_mean"], model.state_dict()["head.1.running_mean"]
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{"optimizer": "adam"}, {"mode": "gradients"}], ids=["adam", "gradients"])
def test_gradients_that_are_zero_but_for_rounding(options, tmp_path):
    """A bias before batch norm has none; verification must not take its rounding errors for a wrong graph."""
    model = sequence(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    # A tensor in the loss's closure stays float32 whatever the model's type.
    weights = torch.tensor([1.0, 2.0, 0.5])
    export(model, tmp_path / "s.onnx", loss=lambda y, target: cross_entropy(y, target, weight=weights), **options)


def test_accumulation_averages_gradients(tmp_path):
    """Three batches of a model without batch norm: one update with the mean of their gradients, clipped, as torch makes it."""
    model = sequence(nn.Flatten(), nn.Linear(50, 3))
    options = {"lr": 0.1, "momentum": 0.9}
    _, session = export(model, tmp_path / "s.onnx", optimizer_options=options, accumulate=3, clip_grad_norm=0.2)
    rule = torch.optim.SGD(model.parameters(), **options)
    for call in range(7):
        data = batch(4, call)
        before = session.state_dict()
        loss = cross_entropy(model(data[0]), data[1]) / 3
        loss.backward()
        assert 3 * loss.item() == pytest.approx(session.step(arrays(data)), rel=1e-5)
        if call % 3 == 2:
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2) > 0.2
            rule.step()
            rule.zero_grad()
        else:
            assert all(np.array_equal(value, before[name]) for name, value in session.state_dict().items())
        for name, value in model.state_dict().items():
            np.testing.assert_allclose(session.state_dict()[name], value.numpy(), rtol=1e-5, atol=1e-6)
    assert state_of(session, tmp_path)["optimizer.step"] == 2


def test_gradients_only(tmp_path):
    model = Net()
    result, session = export(model, tmp_path / "s.onnx", mode="gradients", outputs=["output"])
    assert "lr" not in {value.name for value in result.model.graph.inputs}
    kept = []
    for seed, size in enumerate((4, 6)):
        data = batch(size, seed)
        reference = Net()
        reference.load_state_dict({name: torch.from_numpy(value) for name, value in session.state_dict().items()})
        scores = reference(data[0])
        loss = cross_entropy(scores, data[1])
        loss.backward()
        got, gradients = session.gradients(arrays(data))
        assert got == pytest.approx(loss.item(), rel=1e-5)
        kept.append((session.outputs["output"], scores.detach().numpy()))
        assert list(gradients) == [name for name, _ in model.named_parameters()]
        for name, parameter in reference.named_parameters():
            bound = tolerances.model("float32", parameter.grad.numpy()).atol
            np.testing.assert_allclose(gradients[name], parameter.grad.numpy(), rtol=0, atol=bound)
        weights = {
            name: value - 0.1 * gradients[name] for name, value in session.state_dict().items() if name in gradients
        }
        session.load_state_dict(weights, strict=False)
    for output, scores in kept:  # that of the first call after the second one
        np.testing.assert_allclose(output, scores, rtol=1e-5, atol=1e-6)
    assert session.state_dict()["stem.1.num_batches_tracked"] == 2
    with pytest.raises(UsageError, match=r"got a graph of mode 'gradients', expected 'step'"):
        session.step(arrays(data))


def test_a_fixed_batch_size(tmp_path):
    fixed = Net(last=lambda y: y.view(4, 3))
    with pytest.raises(UnsupportedModelError, match="dynamic=False"):
        export(fixed, tmp_path / "s.onnx")
    _, session = export(fixed, tmp_path / "s.onnx", dynamic=False)
    assert np.isfinite(session.step(arrays(batch(4))))
    with pytest.raises(UsageError, match=r"x: got shape \(5, 2, 5, 5\), expected \(4, 2, 5, 5\)"):
        session.step(arrays(batch(5)))


def test_half_precision_parameters(tmp_path):
    def loss(output, target):
        return cross_entropy(output.float(), target)

    model = Net().half()
    _, session = export(model, tmp_path / "s.onnx", batch=batch(dtype=torch.float16), loss=loss)
    data = batch(3, 1, torch.float16)
    assert session.step(arrays(data)) == pytest.approx(loss(model(data[0]), data[1]).item(), rel=1e-2)
    with pytest.raises(UnsupportedModelError, match=r"stem\.0\.weight: got bfloat16"):
        export(Net().bfloat16(), tmp_path / "b.onnx", batch=batch(dtype=torch.bfloat16))


def doubled(y):
    return 2 * y


def refuse(y):
    raise ValueError("not this batch")


# Batch sizes that go another way, and that way: what the example of 4 and its double tell, or only another size.
WAYS = {
    "odd": (lambda rows: rows % 2 == 1, doubled, pytest.mark.slow),
    "small": (lambda rows: rows < 3, doubled, ()),
    "the example": (lambda rows: rows <= 4, doubled, ()),
    "odd, an error": (lambda rows: rows % 2 == 1, refuse, ()),
    "large, an error": (lambda rows: rows > 5, refuse, pytest.mark.slow),
}


@pytest.mark.parametrize(
    ("condition", "other"), [pytest.param(*way, marks=marks, id=name) for name, (*way, marks) in WAYS.items()]
)
def test_code_that_asks_for_the_batch_size(condition, other, tmp_path):
    """Of another branch a graph keeps one; a size that the model refuses needs none."""
    path, model = tmp_path / "s.onnx", Net(last=lambda y: other(y) if condition(y.shape[0]) else y)
    if other is not refuse:
        with pytest.raises(VerificationError, match=r"the exported step differs from torch") as caught:
            export(model, path)
        words = r"with x \(\d+, .* the batch size as a number exports with dynamic=False"
        assert condition(4) or re.search(words, str(caught.value)), caught.value
        assert not list(tmp_path.iterdir())
    export(model, path, dynamic=other is refuse)


def test_several_inputs_and_a_weighted_loss(tmp_path):
    """Inputs with other numbers of rows, a dict of outputs, a loss module that holds tensors."""

    def forward(self, left, right):
        features = self.a(left) + self.b(right).mean(0)
        return {"logits": self.out(torch.tanh(features)), "features": features}

    def of_logits(self, output, target):
        return self.inner(output["logits"], target)

    torch.manual_seed(0)
    model = compose(forward, a=nn.Linear(3, 4), b=nn.Linear(2, 4), out=nn.Linear(4, 5))
    loss = compose(of_logits, inner=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])))
    data = (torch.randn(6, 3), torch.randn(5, 2), torch.randint(0, 5, (6,)))
    result, session = export(model, tmp_path / "s.onnx", loss=loss, batch=data, outputs=["features"])
    assert result.inputs == ("left", "right", "target")
    shapes = {value.name: list(value.shape) for value in session._steps.inputs.values()}
    assert (shapes["left"], shapes["right"]) == (["batch", 3], ["right_batch", 2])
    expected = loss(model(*data[:2]), data[2]).item()
    assert session.step(arrays(data)) == pytest.approx(expected, rel=1e-5)
    assert list(session.outputs) == ["features"]
    assert set(session.evaluate(arrays(data)).outputs) == {"logits", "features"}


@torch.jit.script
def _scripted_swish(x):
    return x * x.sigmoid()


class Autocast(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Penalised(Net):
    def forward(self, x):
        x = x.detach().requires_grad_()
        output = super().forward(x)
        return output + torch.autograd.grad(output.sum(), x, create_graph=True)[0].sum()


def _with(function):
    model = Net()
    model.stem.add_module("odd", compose(lambda self, x: function(x)))
    return model


def _scripted_head():
    model = Net()
    model.head = torch.jit.script(model.head)
    return model


def _pairs(x):
    return x + torch.ops.aten._pdist_forward.default(x.flatten(1).detach(), 2.0).sum()


IMPOSSIBLE = {
    "a number beside": (lambda: Net(last=lambda y: (y, 3)), "the model returned a int among its outputs"),
    "branch": (lambda: _with(lambda x: x if x.sum() > 0 else -x), r"reads values of a tensor to decide .* torch\.where"),
    "item": (lambda: _with(lambda x: x * 2 if x.abs().max().item() > 1 else x), r"module 'stem\.odd': .*reads values of a ten"),
    "random": (lambda: _with(lambda x: x + torch.rand_like(x)), r"module 'stem\.odd': aten\.rand.* draws random numbers"),
    "breaks": (lambda: _with(lambda x: x.reshape(3, 3, 3)), r"module 'stem\.odd': the training step cannot be recorded"),
    "no translation": (lambda: _with(_pairs), r"module 'stem\.odd': operator aten\._pdist_forward\.default has no"),
    "autocast": (Autocast, r"computes in bfloat16, as torch\.autocast does.*float16"),
    "penalty": (Penalised, r"the forward differentiates.*torch\.is_grad_enabled\(\)"),
    "scripted function": (lambda: Net(last=lambda y: 1 * _scripted_swish(y)), r"dynamic batch size.*dynamic=False"),
    "scripted module": (_scripted_head, r"head \(Sequential\): it is compiled by TorchScript"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_models_that_no_graph_can_hold(name, tmp_path):
    make, message = IMPOSSIBLE[name]
    with pytest.raises(UnsupportedModelError, match=message):
        export(
            make(),
            tmp_path / "s.onnx",
            loss=lambda y, target: cross_entropy(y[0] if isinstance(y, tuple) else y, target),
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"loss: got a tensor of shape \(\w+,\)"),
        ({"loss": lambda y, t: 3.0}, "loss: got a float, expected a tensor"),
        ({"loss": lambda y, t: y.detach().sum()}, "loss: does not depend on any trainable parameter"),
        ({"loss": 3}, "loss: got int, expected a function"),
        ({"loss": nn.Linear(3, 1)}, "loss: has parameters to train"),
        ({"batch": (torch.zeros(4, 2, 5, 5),)}, r"batch: got 1 tensors, expected \(\*inputs, target\)"),
        ({"batch": (torch.zeros(4, 2, 5, 5), 3)}, r"batch\[1\]: got int"),
        ({"batch": (torch.zeros(0, 2, 5, 5), torch.zeros(0))}, r"batch\[0\]: got an empty batch"),
        ({"outputs": ["logits"]}, "outputs: got 'logits', expected names among the model's outputs output"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm: got 0.0"),
        ({"accumulate": 0}, "accumulate: got 0"),
        ({"mode": "gradients", "accumulate": 2}, "accumulate them yourself"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)])},
            r"^optimizer: got SGD, no name, expected one of sgd, [^\n]*$",
        ),
        ({"model": Net().eval()}, r"got a module in eval mode.*call model\.train"),
        ({"model": Net().requires_grad_(False)}, "got no parameter with requires_grad"),
        ({"model": 3}, "model: got int"),
        ({"input_names": ["x"]}, "input_names: got 1 names, expected 2"),
        ({"input_names": ["x", "loss"]}, "input 'loss': another input, or the state, has this name"),
        ({"input_names": ["x", "out.bias"]}, r"input 'out\.bias': another input"),
    ],
)
def test_wrong_arguments_are_named(change, match, tmp_path):
    with pytest.raises(UsageError, match=match):
        export(**{"model": Net(), "path": tmp_path / "s.onnx", **change})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "factor"), [("stem.0.weight.new", 1.5), ("head.1.running_mean.new", 1.0002), ("loss", 1.001)]
)
def test_a_wrong_graph_is_seen(wrong, factor, plain, monkeypatch):
    """An update that is off by half, and what the forward makes when it is off by 1e-3 or less."""
    run = onnxruntime.InferenceSession.run

    def run_wrong(self, names, feeds):
        results = dict(zip(names, run(self, names, feeds)))
        old = feeds.get(wrong.removesuffix(".new"), np.float32(0))
        results[wrong] = old + (results[wrong] - old) * np.float32(factor)
        return list(results.values())

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", run_wrong)
    model, (images, target) = Net().train(), batch()
    step = Step(Problem(model, cross_entropy, training=True), make_optimizer("sgd", None), {})
    rate = torch.tensor(1e-3, dtype=torch.float64)
    verdict = verification.check(model_io.load(plain), step, model, {"x": images, "target": target}, rate)
    assert verdict.status == "failed"
    assert [error.name for error in verdict.outputs if not error.passed] == [wrong]


def test_files_are_replaced_on_request_only(plain, tmp_path):
    path, session = tmp_path / "s.onnx", bnexport.TrainingSession(plain)
    for taken in ("s.onnx", "s.eval.onnx", "s.safetensors"):
        (tmp_path / taken).write_bytes(b"kept")
        words = rf"{taken}' exists; write to another file, or replace it with overwrite=True"
        with pytest.raises(UsageError, match=words):
            export(Net(), path)
        assert (tmp_path / taken).read_bytes() == b"kept"
        (tmp_path / taken).unlink()
    for write in (session.export_inference, session.save_checkpoint):
        path.write_bytes(b"kept")
        with pytest.raises(UsageError, match=r"exists.*overwrite=True"):
            write(path)
        assert path.read_bytes() == b"kept"
        write(path, overwrite=True)
        assert path.read_bytes() != b"kept"


def test_a_step_is_no_inference_model(plain, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"s\.onnx: it is a training step, .*export_inference"):
        bnexport.fold(plain, tmp_path / "folded.onnx")
    assert not list(tmp_path.iterdir())


def test_a_gradient_penalty_trains(tmp_path):
    class Guarded(nn.Sequential):
        def forward(self, x):
            if not torch.is_grad_enabled():
                return super().forward(x), torch.zeros_like(x)
            x = x.detach().requires_grad_()
            output = super().forward(x)
            return output, torch.autograd.grad(output.sum(), x, create_graph=True)[0]

    def loss(output, target):
        return cross_entropy(output[0], target) + output[1].square().sum()

    torch.manual_seed(0)
    model = Guarded(nn.Flatten(), nn.Linear(50, 8), nn.Tanh(), nn.Linear(8, 3))
    export(model, tmp_path / "s.onnx", loss=loss)
