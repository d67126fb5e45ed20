"""Each update against torch.optim, step by step, in float64."""

import numpy as np
import pytest
import torch

from bnexport import tolerances
from bnexport.errors import UsageError
from bnexport.runtime import engine
from bnexport.training.graph import finish
from bnexport.training.optimizers import OPTIMIZERS, make_optimizer
from bnexport.training.step import Problem, clip
from bnexport.training.tracing import trace
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
        lr = ours.lr / step
        # Gradients of very different sizes: the largest must matter to AMSGrad's maximum.
        grad = torch.randn(5, 3, generator=generator, dtype=torch.float64) * (10.0 if step == 2 else 0.1)
        rule.param_groups[0]["lr"] = lr
        parameter.grad = grad.clone()
        rule.step()
        scalars = ours.scalars(torch.tensor(lr, dtype=torch.float64), torch.tensor(step))
        whole = ours.update(new, grad, state, scalars, as_operator=True)
        new, state = ours.update(new, grad, state, scalars)
        assert torch.equal(whole[0], new) and whole[1].keys() == state.keys()
        assert all(torch.equal(whole[1][kind], tensor) for kind, tensor in state.items())
        pairs = {"parameter": (new, parameter)} | {
            kind: (tensor, rule.state[parameter][kind]) for kind, tensor in state.items()
        }
        for what, (got, expected) in pairs.items():
            reference = expected.detach().numpy()
            bound = tolerances.model("float64", reference).atol
            assert np.abs(got.numpy() - reference).max() <= bound, f"{what} after step {step}"
    assert not torch.equal(new, torch.zeros_like(new))


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
        kept = {
            kind: value.numpy() for kind, value in rule.state[trained].items() if kind != "step" and value is not None
        }
        references.append({"parameter": trained.detach().numpy(), **kept})

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


def test_scalars_keep_their_digits_in_early_steps():
    """1 - 0.999 in float32 would be off by 1e-5."""
    ours = make_optimizer("adam", {"lr": 1e-3})
    scalars = ours.scalars(torch.tensor(1e-3, dtype=torch.float64), torch.tensor(1))
    assert float(scalars["bias_correction2_sqrt"]) == pytest.approx((1 - 0.999) ** 0.5, rel=1e-14)
    assert float(scalars["step_size"]) == pytest.approx(1e-3 / (1 - 0.9), rel=1e-14)


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
