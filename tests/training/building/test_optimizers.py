"""Each update against torch.optim, step by step, in float64; parameter groups; ranges of labels and indices."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import bnexport
from bnexport import model_io, tolerances
from bnexport.errors import UsageError
from bnexport.runtime import engine
from bnexport.training import translations
from bnexport.training.graph import finish
from bnexport.training.optimizers import OPTIMIZERS, make_groups, make_optimizer
from bnexport.training.step import Problem, clip
from bnexport.training.tracing import index_ranges, trace
from tests.training.torch_step import OPTIMIZERS as TORCH

CASES = [
    ("sgd", {"lr": 0.1}),
    ("sgd", {"lr": 0.1, "weight_decay": 0.01}),
    ("sgd", {"lr": 0.1, "momentum": 0.9}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("adam", {}),
    ("adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    ("adam", {"amsgrad": True}),
    ("adamw", {}),
    ("adamw", {"lr": 0.01, "weight_decay": 0.3, "amsgrad": True, "betas": [0.5, 0.9]}),
    ("adamw", {"weight_decay": 0.0}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_updates_are_torchs(name, options):
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5, 3, generator=generator, dtype=torch.float64))
    rule = TORCH[name]([parameter], **options)
    ours = make_optimizer(name, options)
    new = parameter.detach().clone()
    state = {kind: torch.zeros_like(new) for kind in ours.state_kinds()}
    assert ours.lr == rule.defaults["lr"] and ours.weight_decay == rule.defaults["weight_decay"]
    for step in range(1, 8):
        rule.param_groups[0]["lr"] = lr = ours.lr / step
        # Gradients of very different sizes: the largest must matter to AMSGrad's maximum.
        grad = torch.randn(5, 3, generator=generator, dtype=torch.float64) * (10.0 if step == 2 else 0.1)
        parameter.grad = grad.clone()
        rule.step()
        scalars = ours.scalars(torch.tensor(lr, dtype=torch.float64), torch.tensor(step))
        whole = ours.update(new, grad, state, scalars, as_operator=True)
        new, state = ours.update(new, grad, state, scalars)
        assert torch.equal(whole[0], new) and whole[1].keys() == state.keys()
        assert all(torch.equal(whole[1][kind], tensor) for kind, tensor in state.items())
        expected = {"parameter": parameter.detach(), **rule.state[parameter]}
        for what, got in {"parameter": new, **state}.items():
            bound = tolerances.model("float64", expected[what].numpy()).atol
            assert (got - expected[what]).abs().max() <= bound, f"{what} after step {step}"


@pytest.mark.parametrize("kernels", [False, True], ids=["standard", "kernels"])
def test_updates_in_a_graph_are_torchs(kernels):
    """One update by every case, from warm state, within 2e-7 of its size: constants keep their digits in the file."""
    generator = torch.Generator().manual_seed(0)
    parameter, grad = (0.01 * torch.randn(200, generator=generator), torch.randn(200, generator=generator))
    named, references, rules = {"parameter": parameter, "grad": grad}, [], [make_optimizer(*case) for case in CASES]
    for index, (ours, (name, options)) in enumerate(zip(rules, CASES)):
        state = {kind: torch.rand(200, generator=generator) for kind in ours.state_kinds()}
        named |= {f"{index}.{kind}": tensor for kind, tensor in state.items()}
        trained = torch.nn.Parameter(parameter.double())
        trained.grad = grad.double()
        rule = TORCH[name]([trained], **options)
        rule.state[trained] = {kind: tensor.double() for kind, tensor in state.items()}
        if name != "sgd":
            rule.state[trained]["step"] = torch.tensor(2.0)
        rule.step()
        kept = {"parameter": trained.detach(), **rule.state[trained]}
        references.append({kind: kept[kind].numpy() for kind in ("parameter", *state)})

    def updates(given):
        results = {}
        for index, ours in enumerate(rules):
            state = {kind: given[f"{index}.{kind}"] for kind in ours.state_kinds()}
            scalars = ours.scalars(torch.full((), ours.lr, dtype=torch.float64), torch.tensor(3))
            scalars = {name: value.float() for name, value in scalars.items()}
            new, state = ours.update(given["parameter"], given["grad"], state, scalars, as_operator=kernels)
            results |= {f"{index}.{name}.new": value for name, value in {"parameter": new, **state}.items()}
        return results

    problem = Problem(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, training=False)
    model, _ = trace(updates, named, {}, problem, differentiates=False, standard_ops_only=False, cpu_kernels=kernels)
    finish(model, {})
    runtime = engine.open(model, options=engine.default_options(True if kernels else None))
    values = runtime.run({name: named[name].numpy() for name in runtime.inputs}, runtime.outputs)
    got = dict(zip(runtime.outputs, values))
    for index, (case, reference) in enumerate(zip(CASES, references)):
        for name, exact in reference.items():
            old = named[name if name == "parameter" else f"{index}.{name}"].numpy()
            error, size = np.linalg.norm(got[f"{index}.{name}.new"] - exact), np.linalg.norm(exact - old)
            assert error <= 2e-7 * size + 6e-8 * np.linalg.norm(exact), f"{case}: {name} is off by {error / size:.1e}"


@pytest.mark.parametrize("max_norm", [0.1, 1e6], ids=["clipped", "kept"])
def test_clipping_is_torchs(max_norm):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((4, 3), (7,), ())]
    grads = {}
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        grads[str(index)] = parameter.grad.clone()
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    for parameter, got in zip(parameters, clip(grads, max_norm).values()):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("lamb", {}, "got 'lamb', expected one of sgd, adam, adamw; .* mode=\"gradients\""),
        ("sgd", {"betas": (0.9, 0.99)}, "got 'betas', which sgd does not have; it has dampening, lr,"),
        ("adam", {"lr": -1.0}, "lr: got -1.0, expected a finite number >= 0"),
        ("adam", {"lr": float("nan")}, "lr: got nan"),
        ("adam", {"betas": (0.9, 1.0)}, "betas: got"),
        ("adam", {"betas": 3}, "optimizer_options: "),
        ("sgd", {"nesterov": True}, "nesterov needs a momentum > 0"),
        ("sgd", {"lr": "fast"}, "optimizer_options: "),
    ],
)
def test_wrong_options_are_named(name, options, match):
    with pytest.raises(UsageError, match=match):
        make_optimizer(name, options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_defaults_are_torchs(name):
    rule = TORCH[name]([torch.nn.Parameter(torch.zeros(1))])
    ours = make_optimizer(name, None)
    for field in ours.__dataclass_fields__:
        assert getattr(ours, field) == rule.defaults[field], field


LOSS = nn.functional.cross_entropy


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 3)
    return nn.Sequential(*layers).train()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 1, 4, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)


@pytest.mark.parametrize(
    ("optimizer", "rule", "options", "cpu_kernels"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, True),
        ("adamw", torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.3, "eps": 1e-4}, False),
    ],
    ids=["sgd-kernels", "adamw-standard"],
)
def test_updates_are_torchs_with_the_same_groups(optimizer, rule, options, cpu_kernels, tmp_path):
    """The head has its own rate and decay, norms and biases have no decay, and the rate changes between steps."""
    model = network()
    head = {"params": ["5.*"], "lr": 0.5 * options["lr"], "weight_decay": 0.7}
    given = {**options, "groups": [head], "decay_norms_and_biases": False}
    chosen = {"optimizer": optimizer, "optimizer_options": given, "cpu_kernels": cpu_kernels}
    assert bnexport.export_training_step(model, LOSS, batch(0), tmp_path / "s.onnx", **chosen).verification.passed
    session = bnexport.TrainingSession(tmp_path / "s.onnx")
    named = dict(model.named_parameters())
    theirs = rule(
        [
            {"params": [named["0.weight"]]},
            {"params": [named["5.weight"]], "lr": head["lr"], "weight_decay": 0.7},
            {"params": [named["5.bias"]], "lr": head["lr"], "weight_decay": 0.0},
            {"params": [named[f"{i}.{kind}"] for i in (1, 4) for kind in ("weight", "bias")], "weight_decay": 0.0},
            {"params": [named["0.bias"]], "weight_decay": 0.0},
        ],
        **options,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 1.0 / (1 + step))
    for step in range(4):
        inputs, target = batch(step)
        session.learning_rate = options["lr"] / (1 + step)
        session.step((inputs.numpy(), target.numpy()))
        theirs.zero_grad()
        LOSS(model(inputs), target).backward()
        theirs.step()
        schedule.step()
    for name, tensor in model.state_dict().items():
        bound = 4 * tolerances.model("float32", tensor.numpy()).atol
        assert np.abs(session.state_dict()[name] - tensor.numpy()).max() <= bound, name
    metadata = model_io.load(tmp_path / "s.onnx").metadata_props["bnexport.training"]
    assert '"params": ["5.weight"], "lr": ' + str(head["lr"]) in metadata


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"groups": [{"params": "hed.*"}]}, r"groups\[0\]: params: 'hed.\*' matches no trained parameter"),
        ({"groups": [{"params": "head.wight"}]}, "did you mean 'head.weight'"),
        ({"groups": [{"params": "head.*"}, {"params": "*.bias"}]}, r"groups\[1\]: head.bias is in an earlier group"),
        ({"groups": [{"params": "head.*", "momentum": 0.5}]}, "got 'momentum', expected 'params', 'lr' or"),
        ({"groups": [{"params": "head.*", "lr": -1.0}]}, r"groups\[0\]: optimizer_options: lr: got -1.0"),
        ({"groups": [{"params": "head.*", "lr": "fast"}]}, r"groups\[0\]: "),
        ({"groups": [{"lr": 1.0}]}, "expected a dict with 'params'"),
        ({"groups": {"params": "head.*"}}, "groups: got dict, expected a list"),
        ({"lr": 0.0, "groups": [{"params": "head.*", "lr": 1.0}]}, "where the optimizer's own is 0"),
        ({"decay_norms_and_biases": 0.0}, "got 0.0, expected True or False"),
        ({"decay": 0.1}, "got 'decay', which sgd does not have"),
    ],
)
def test_wrong_groups_are_named(options, match):
    parameters = {"head.weight": torch.zeros(2, 2), "head.bias": torch.zeros(2)}
    with pytest.raises(UsageError, match=match):
        make_groups("sgd", options, parameters)


SCORES, LABELS = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 4])


def recorded(function, *tensors):
    def of_two(x, target):
        return function(x, target)

    return make_fx(of_two, decomposition_table=translations.decompositions(), tracing_mode="fake")(*tensors).graph


RANGES = {
    "labels": (F.cross_entropy, LABELS, [[0, 4, -100]]),
    "ignored": (lambda x, t: F.cross_entropy(x, t, ignore_index=255), LABELS, [[0, 4, 255]]),
    "smoothed": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), LABELS, [[0, 4, -100]]),
    "from one": (lambda x, t: F.cross_entropy(x, t - 1), LABELS + 1, [[1, 5, -99]]),
    "column": (lambda x, t: F.cross_entropy(x, t.squeeze(1).long()), LABELS[:, None].to(torch.uint8), [[0, 4, -100]]),
    "pixels": (lambda x, t: F.cross_entropy(x.T.reshape(1, 5, 2, 2), t), LABELS.reshape(1, 2, 2), [[0, 4, -100]]),
    "tokens": (lambda x, t: F.embedding(t, x).sum(), LABELS[:3], [[0, 3]]),
    "gathered": (lambda x, t: x.gather(1, t[:, None]).sum(), LABELS, [[0, 4]]),
    "both": (lambda x, t: F.embedding(t, x).sum() + F.cross_entropy(x, t), LABELS, [[0, 3], [0, 4, -100]]),
    "numbers": (lambda x, t: (x * t[:, None]).sum(), LABELS, []),
    "half of them": (lambda x, t: F.cross_entropy(x[:2], t[:2]), LABELS, []),
    "clamped": (lambda x, t: F.cross_entropy(x, t.clamp(0, 4)), LABELS, []),
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges(name):
    function, labels, expected = RANGES[name]
    graph = recorded(function, SCORES, labels)
    assert index_ranges(graph, ["x", "target"]) == ({"target": expected} if expected else {})
    if expected and name != "both":
        first, last, *_ = expected[0]
        assert function(SCORES, labels).isfinite()
        for wrong in (first - 1, last + 1):
            with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
                function(SCORES, torch.full_like(labels, 0).long() + wrong)
