"""export_training_step: options, what becomes state, and one clear error for each thing that cannot be."""

import copy
import dataclasses
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import bnexport
from bnexport import model_io, tolerances
from bnexport.errors import UnsupportedModelError, UsageError, VerificationError
from bnexport.training import verification
from bnexport.training.api import TrainingExportResult
from bnexport.training.optimizers import make_optimizer
from bnexport.training.step import Problem, Step
from tests.training.torch_step import torch_step


class Net(nn.Module):
    """A stem and a head, each with a norm; `norm` chooses its class."""

    def __init__(self, norm=nn.BatchNorm2d, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), norm(4, **options), nn.ReLU())
        self.head = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), norm(4, **options), nn.ReLU())
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.head(self.stem(x)).mean((2, 3)))


def batch(size=4, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 2, 5, 5, generator=generator, dtype=torch.float64).to(dtype)
    return images, torch.randint(0, 3, (size,), generator=generator)


def export(model, path, **options):
    loss = options.pop("loss", nn.functional.cross_entropy)
    example = options.pop("batch", batch())
    result = bnexport.export_training_step(model, loss, example, path, **options)
    assert options.get("verify") is False or result.verification.passed, result.verification.summary()
    return result, bnexport.TrainingSession(path)


@dataclasses.dataclass
class Exported:
    """One export of Net with the default options, for all tests that only look at it."""

    path: Path
    result: TrainingExportResult

    def session(self, *arguments):
        return bnexport.TrainingSession(self.path, *arguments)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "s.onnx"
    return Exported(path, export(Net(), path)[0])


def everything(session, folder):
    session.save_checkpoint(folder / "everything.safetensors", overwrite=True)
    return model_io.load_tensors(folder / "everything.safetensors")[0]


def domains(model):
    return {node.domain for node in model.graph.all_nodes()}


def assert_steps_are_torchs(model, session, folder, optimizer, options, dtype=torch.float32, clip=None, steps=3):
    """Each result of some steps within the bound of whole models, or twice torch's own error."""
    for seed in range(steps):
        state, data = everything(session, folder), batch(3 + seed, seed + 1, dtype)
        own, exact = (
            torch_step(model, nn.functional.cross_entropy, optimizer, options, state, data, kind, clip)
            for kind in (dtype, torch.float64)
        )
        loss = session.step([tensor.numpy() for tensor in data])
        got = {**everything(session, folder), "loss": np.array(loss)}
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
        {
            "optimizer": "adamw",
            "optimizer_options": {"lr": 1e-3, "weight_decay": 0.1},
            "batch": batch(dtype=torch.float64),
        },
        {"", "mmcv"},
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_are_torchs(case, tmp_path):
    make, options, expected = STEPS[case]
    model = make()
    result, session = export(model, tmp_path / "s.onnx", **options)
    assert domains(result.model) == expected
    if case == "torch's sync batch norm":  # which runs on GPUs only
        model = Net()
        model.load_state_dict(make().state_dict())
    optimizer, given = options.get("optimizer", "sgd"), options.get("optimizer_options", {"lr": 1e-3})
    dtype = torch.float64 if case == "float64" else torch.float32
    assert_steps_are_torchs(model, session, tmp_path, optimizer, given, dtype, options.get("clip_grad_norm"))


def test_batch_norms_of_torch(plain, tmp_path):
    """Our nodes and kernels are in the step's graph only."""
    assert domains(plain.result.model) == {"", "mmcv", "bnexport"}
    assert domains(model_io.load(plain.result.evaluation_path)) == {""}
    assert_steps_are_torchs(Net(), plain.session(), tmp_path, "sgd", {"lr": 1e-3})


def test_standard_operators_need_no_library(tmp_path, monkeypatch):
    _, session = export(Net(), tmp_path / "s.onnx", standard_ops_only=True)
    expected = session.step([tensor.numpy() for tensor in batch()])

    def refuse(options, training):
        raise bnexport.errors.LibraryError("no library here")

    monkeypatch.setattr("bnexport.native.library.register", refuse)
    assert bnexport.TrainingSession(tmp_path / "s.onnx").step([tensor.numpy() for tensor in batch()]) == expected


def test_opset_and_ir_version_are_the_lowest(plain):
    """As those of exports: ONNX Runtime 1.17 reads no IR version above 9 and no opset above 20."""
    for path in (plain.path, plain.path.with_suffix(".eval.onnx")):
        model = model_io.load(path)
        assert (model.opset_imports[""], model.ir_version) == (18, 8)


def test_the_mask_of_a_relu_is_read_from_its_output(tmp_path):
    layers = [nn.ReLU6(), nn.Conv2d(4, 4, 1), nn.Hardtanh(-0.5, 0.25), nn.Conv2d(4, 4, 1), nn.ReLU()]
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), *layers, nn.Flatten(), nn.Linear(36, 3))
    result, _ = export(model, tmp_path / "step.onnx")
    masks = [node for node in result.model.graph if node.op_type == "ReluGrad"]
    assert sorted(mask.inputs[1].producer().op_type for mask in masks) == ["Clip", "Clip", "Relu"]


def test_cpu_kernels_on_another_provider_are_refused(plain):
    with pytest.raises(UsageError, match=r"CUDAExecutionProvider, expected CPUExecutionProvider.*cpu_kernels=False"):
        plain.session(["CUDAExecutionProvider"])
    plain.session([("CPUExecutionProvider", {})])


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
    class Unused(Net):
        def forward(self, x):
            x = self.stem(x)
            self.head(x)
            return self.out(x.mean((2, 3)))

    model = Unused()
    _, session = export(model, tmp_path / "s.onnx")
    images, target = batch()
    session.step([images.numpy(), target.numpy()])
    model(images)
    got, expected = session.state_dict()["head.1.running_mean"], model.state_dict()["head.1.running_mean"]
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{"optimizer": "adam"}, {"mode": "gradients"}], ids=["adam", "gradients"])
def test_gradients_that_are_zero_but_for_rounding(options, tmp_path):
    """A bias before batch norm has none; verification must not take its rounding errors for a wrong graph."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)]
    weights = torch.tensor([1.0, 2.0, 0.5])

    def loss(output, target):
        # A tensor in the loss's closure stays float32 whatever the model's type.
        return nn.functional.cross_entropy(output, target, weight=weights)

    result, _ = export(nn.Sequential(*layers), tmp_path / "s.onnx", loss=loss, **options)
    assert result.verification.passed


def test_accumulation_averages_gradients(tmp_path):
    """Three batches of a model without batch norm: one update with the mean of their gradients, as torch makes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(50, 3))
    options = {"lr": 0.1, "momentum": 0.9}
    _, session = export(model, tmp_path / "s.onnx", optimizer_options=options, accumulate=3)
    rule = torch.optim.SGD(model.parameters(), **options)
    for call in range(7):
        data = batch(4, call)
        before = session.state_dict()
        loss = nn.functional.cross_entropy(model(data[0]), data[1]) / 3
        loss.backward()
        assert 3 * loss.item() == pytest.approx(session.step([tensor.numpy() for tensor in data]), rel=1e-5)
        if call % 3 == 2:
            rule.step()
            rule.zero_grad()
        else:
            assert all(np.array_equal(value, before[name]) for name, value in session.state_dict().items())
        for name, value in model.state_dict().items():
            np.testing.assert_allclose(session.state_dict()[name], value.numpy(), rtol=1e-5, atol=1e-6)
    assert everything(session, tmp_path)["optimizer.step"] == 2


def test_gradients_only(tmp_path):
    model = Net()
    result, session = export(model, tmp_path / "s.onnx", mode="gradients", outputs=["output"])
    assert "lr" not in {value.name for value in result.model.graph.inputs}
    for seed, size in enumerate((4, 6)):
        data = batch(size, seed)
        reference = Net()
        reference.load_state_dict({name: torch.from_numpy(value) for name, value in session.state_dict().items()})
        loss = nn.functional.cross_entropy(reference(data[0]), data[1])
        loss.backward()
        got, gradients = session.gradients([tensor.numpy() for tensor in data])
        assert got == pytest.approx(loss.item(), rel=1e-5)
        assert session.outputs["output"].shape == (size, 3)
        assert list(gradients) == [name for name, _ in model.named_parameters()]
        for name, parameter in reference.named_parameters():
            bound = tolerances.model("float32", parameter.grad.numpy()).atol
            np.testing.assert_allclose(gradients[name], parameter.grad.numpy(), rtol=0, atol=bound)
        weights = {
            name: value - 0.1 * gradients[name] for name, value in session.state_dict().items() if name in gradients
        }
        session.load_state_dict(weights, strict=False)
    assert session.state_dict()["stem.1.num_batches_tracked"] == 2
    with pytest.raises(UsageError, match=r"got a graph of mode 'gradients', expected 'step'"):
        session.step([tensor.numpy() for tensor in data])


def test_a_fixed_batch_size(tmp_path):
    class Fixed(Net):
        def forward(self, x):
            return super().forward(x.view(4, 2, 5, 5))

    with pytest.raises(UnsupportedModelError, match="dynamic=False"):
        export(Fixed(), tmp_path / "s.onnx")
    _, session = export(Fixed(), tmp_path / "s.onnx", dynamic=False)
    assert np.isfinite(session.step([tensor.numpy() for tensor in batch(4)]))
    with pytest.raises(UsageError, match=r"x: got shape \(5, 2, 5, 5\), expected \(4, 2, 5, 5\)"):
        session.step([tensor.numpy() for tensor in batch(5)])


@torch.jit.script
def _scripted_swish(x):
    return x * x.sigmoid()


def test_a_branch_that_the_doubled_batch_takes(tmp_path):
    class Branches(Net):
        def forward(self, x):
            return super().forward(x if x.shape[0] > 4 else 2 * x)

    with pytest.raises(VerificationError, match="the exported step differs from torch"):
        export(Branches(), tmp_path / "s.onnx")
    assert not list(tmp_path.iterdir())


def test_half_precision_parameters(tmp_path):
    def loss(output, target):
        return nn.functional.cross_entropy(output.float(), target)

    model = Net().half()
    _, session = export(model, tmp_path / "s.onnx", batch=batch(dtype=torch.float16), loss=loss)
    data = batch(3, 1, torch.float16)
    expected = loss(model(data[0]), data[1]).item()
    assert session.step([tensor.numpy() for tensor in data]) == pytest.approx(expected, rel=1e-2)
    with pytest.raises(UnsupportedModelError, match=r"stem\.0\.weight: got bfloat16"):
        export(Net().bfloat16(), tmp_path / "b.onnx", batch=batch(dtype=torch.bfloat16))


class Asks(Net):
    """Code that asks for the batch size; a graph keeps one branch of it."""

    def __init__(self, condition, other):
        super().__init__()
        self.condition, self.other = condition, other

    def forward(self, x):
        return self.other(super().forward(x)) if self.condition(x.shape[0]) else super().forward(x)


def refuse(x):
    raise ValueError("not this batch")


OTHER_BRANCHES = pytest.mark.parametrize(
    "condition",
    [
        pytest.param(lambda rows: rows % 2 == 1, marks=pytest.mark.slow, id="odd"),
        pytest.param(lambda rows: rows < 3, id="small"),
    ],
)


@OTHER_BRANCHES
def test_a_branch_on_the_batch_size(condition, tmp_path):
    """The example and its double take the other branch."""
    path = tmp_path / "s.onnx"
    with pytest.raises(
        VerificationError, match=r"with x \(\d+, .* the batch size as a number exports with dynamic=False"
    ):
        export(Asks(condition, lambda y: 2 * y), path)
    assert not path.exists()


@OTHER_BRANCHES
def test_a_branch_on_a_fixed_batch_size(condition, tmp_path):
    result, _ = export(Asks(condition, lambda y: 2 * y), tmp_path / "s.onnx", dynamic=False)
    assert result.verification.passed


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param(lambda rows: rows % 2 == 1, id="odd"),
        pytest.param(lambda rows: rows > 5, marks=pytest.mark.slow, id="large"),
    ],
)
def test_a_batch_size_that_the_model_refuses(condition, tmp_path):
    result, _ = export(Asks(condition, refuse), tmp_path / "s.onnx")
    assert result.verification.passed


def test_a_batch_of_one(tmp_path):
    _, session = export(Net(), tmp_path / "s.onnx", batch=batch(1))
    data = batch(1, 5)
    loss = nn.functional.cross_entropy(Net()(data[0]), data[1])
    assert session.step([tensor.numpy() for tensor in data]) == pytest.approx(loss.item(), rel=1e-4)


def test_several_inputs_and_a_weighted_loss(tmp_path):
    """Inputs with other numbers of rows, a dict of outputs, a loss module that holds tensors."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 5)

        def forward(self, left, right):
            features = self.a(left) + self.b(right).mean(0)
            return {"logits": self.out(torch.tanh(features)), "features": features}

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0]))

        def forward(self, output, target):
            return self.inner(output["logits"], target)

    torch.manual_seed(0)
    model, loss = Two(), Loss()
    data = (torch.randn(6, 3), torch.randn(5, 2), torch.randint(0, 5, (6,)))
    result, session = export(model, tmp_path / "s.onnx", loss=loss, batch=data, outputs=["features"])
    assert result.inputs == ("left", "right", "target")
    shapes = {value.name: list(value.shape) for value in session._steps.inputs.values()}
    assert (shapes["left"], shapes["right"]) == (["batch", 3], ["right_batch", 2])
    expected = loss(model(*data[:2]), data[2]).item()
    assert session.step([tensor.numpy() for tensor in data]) == pytest.approx(expected, rel=1e-5)
    assert list(session.outputs) == ["features"]
    assert set(session.evaluate([tensor.numpy() for tensor in data]).outputs) == {"logits", "features"}


class Branches(Net):
    def forward(self, x):
        y = self.stem(x)
        return super().forward(x) if y.sum() > 0 else super().forward(-x)


class Reads(nn.Module):
    def forward(self, x):
        return x * 2 if x.abs().max().item() > 1 else x


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Breaks(nn.Module):
    def forward(self, x):
        return x.reshape(3, 3, 3)


class Odd(nn.Module):
    def forward(self, x):
        return x + torch.ops.aten._pdist_forward.default(x.flatten(1).detach(), 2.0).sum()


class Autocast(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Penalised(Net):
    def forward(self, x):
        x = x.detach().requires_grad_()
        output = super().forward(x)
        return output + torch.autograd.grad(output.sum(), x, create_graph=True)[0].sum()


class Scripted(Net):
    def forward(self, x):
        return _scripted_swish(super().forward(x))


def _with(layer):
    model = Net()
    model.stem.add_module("odd", layer)
    return model


def _scripted_head():
    model = Net()
    model.head = torch.jit.script(model.head)
    return model


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (Branches, r"reads values of a tensor to decide .* torch\.where"),
        (lambda: _with(Reads()), r"module 'stem\.odd': .*reads values of a tensor"),
        (lambda: _with(Noisy()), r"module 'stem\.odd': aten\.rand.* draws random numbers"),
        (lambda: _with(Breaks()), r"module 'stem\.odd': the training step cannot be recorded"),
        (lambda: _with(Odd()), r"module 'stem\.odd': operator aten\._pdist_forward\.default has no"),
        (Autocast, r"computes in bfloat16, as torch\.autocast does.*float16"),
        (Penalised, r"the forward differentiates.*torch\.is_grad_enabled\(\)"),
        (Scripted, r"dynamic batch size.*dynamic=False"),
        (_scripted_head, r"head \(Sequential\): it is compiled by TorchScript"),
    ],
    ids=[
        "branch",
        "item",
        "random",
        "breaks",
        "no translation",
        "autocast",
        "penalty",
        "scripted function",
        "scripted module",
    ],
)
def test_models_that_no_graph_can_hold(model, match, tmp_path):
    with pytest.raises(UnsupportedModelError, match=match):
        export(model(), tmp_path / "s.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"loss": lambda y, t: nn.functional.cross_entropy(y, t, reduction="none")},
            r"loss: got a tensor of shape \(\w+,\)",
        ),
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
        ({"input_names": ["x"]}, "input_names: got 1 names, expected 2"),
        ({"input_names": ["x", "loss"]}, "input 'loss': another input, or the state, has this name"),
        ({"input_names": ["x", "out.bias"]}, r"input 'out\.bias': another input"),
    ],
)
def test_wrong_arguments_are_named(change, match, tmp_path):
    with pytest.raises(UsageError, match=match):
        export(Net(), tmp_path / "s.onnx", **change)
    assert not list(tmp_path.iterdir())


def test_modules_that_do_not_train_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"got a module in eval mode.*call model\.train"):
        export(Net().eval(), tmp_path / "s.onnx")
    with pytest.raises(UsageError, match="got no parameter with requires_grad"):
        export(Net().requires_grad_(False), tmp_path / "s.onnx")
    with pytest.raises(UsageError, match="model: got int"):
        export(3, tmp_path / "s.onnx")


@pytest.fixture
def wrong(request, monkeypatch):
    """The name of a result that ONNX Runtime gets wrong, by a factor."""
    wrong, factor = request.param
    make = onnxruntime.InferenceSession

    def make_wrong(*arguments, **options):
        session = make(*arguments, **options)
        run = session.run

        def run_wrong(names, feeds):
            results = dict(zip(names, run(names, feeds)))
            old = feeds.get(wrong.removesuffix(".new"), np.float32(0))
            results[wrong] = old + (results[wrong] - old) * np.float32(factor)
            return list(results.values())

        session.run = run_wrong
        return session

    monkeypatch.setattr(onnxruntime, "InferenceSession", make_wrong)
    return wrong


WRONG = [("stem.0.weight.new", 1.5), ("head.1.running_mean.new", 1.001), ("loss", 1.001)]


@pytest.mark.parametrize("wrong", WRONG, indirect=True)
def test_a_wrong_graph_is_seen(wrong, plain):
    """An update that is off by half, and what the forward makes when it is off by 1e-3."""
    model = Net().train()
    step = Step(Problem(model, nn.functional.cross_entropy, training=True), make_optimizer("sgd", None), {})
    images, target = batch()
    rate = torch.tensor(1e-3, dtype=torch.float64)
    verdict = verification.check(model_io.load(plain.path), step, model, {"x": images, "target": target}, rate)
    assert verdict.status == "failed"
    assert [error.name for error in verdict.outputs if not error.passed] == [wrong]


@pytest.mark.parametrize("wrong", WRONG[-1:], indirect=True)
def test_a_wrong_graph_is_not_written(wrong, tmp_path):
    with pytest.raises(VerificationError, match=f"{wrong!r} in .*: differs"):
        export(Net(), tmp_path / "s.onnx")
    assert not list(tmp_path.iterdir())


def test_files_are_replaced_on_request_only(plain, tmp_path):
    path = tmp_path / "s.onnx"
    for taken in ("s.onnx", "s.eval.onnx", "s.safetensors"):
        (tmp_path / taken).write_bytes(b"kept")
        with pytest.raises(
            UsageError, match=rf"{taken}' exists; write to another file, or replace it with overwrite=True"
        ):
            bnexport.export_training_step(Net(), nn.functional.cross_entropy, batch(), path)
        assert (tmp_path / taken).read_bytes() == b"kept"
        (tmp_path / taken).unlink()
    session = plain.session()
    for write in (session.export_inference, session.save_checkpoint):
        path.write_bytes(b"kept")
        with pytest.raises(UsageError, match=r"exists.*overwrite=True"):
            write(path)
        assert path.read_bytes() == b"kept"
        write(path, overwrite=True)
        assert path.read_bytes() != b"kept"


def test_a_step_is_no_inference_model(plain, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"s\.onnx: it is a training step, .*export_inference"):
        bnexport.fold(plain.path, tmp_path / "folded.onnx")
    assert not list(tmp_path.iterdir())


def test_an_optimizer_of_torch_is_named_in_one_line(tmp_path):
    model = Net()
    with pytest.raises(UsageError, match=r"^optimizer: got SGD, no name, expected one of sgd, [^\n]*$"):
        bnexport.export_training_step(
            model,
            nn.functional.cross_entropy,
            batch(),
            tmp_path / "s.onnx",
            optimizer=torch.optim.SGD(model.parameters()),
        )


class Guarded(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(50, 8), nn.Linear(8, 3)

    def forward(self, x):
        if not torch.is_grad_enabled():
            return self.b(torch.tanh(self.a(x.flatten(1)))), torch.zeros_like(x)
        x = x.detach().requires_grad_()
        output = self.b(torch.tanh(self.a(x.flatten(1))))
        return output, torch.autograd.grad(output.sum(), x, create_graph=True)[0]


def test_a_gradient_penalty_trains(tmp_path):
    def loss(output, target):
        return nn.functional.cross_entropy(output[0], target) + output[1].square().sum()

    torch.manual_seed(0)
    export(Guarded(), tmp_path / "s.onnx", loss=loss)
