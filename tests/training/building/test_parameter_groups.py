"""Parameter groups in a step: updates are torch.optim's with the same groups, and wrong groups are named."""

import numpy as np
import pytest
import torch
from torch import nn

import bnexport
from bnexport import model_io, tolerances
from bnexport.errors import UsageError
from bnexport.training.optimizers import make_groups

LOSS = nn.functional.cross_entropy


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 3)
    ).train()


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
    made = bnexport.export_training_step(
        model,
        LOSS,
        batch(0),
        tmp_path / "s.onnx",
        optimizer=optimizer,
        optimizer_options=given,
        cpu_kernels=cpu_kernels,
    )
    assert made.verification.passed
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
