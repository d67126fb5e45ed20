"""The training demo keeps its promise."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from models import demo_train
from models.digits import load_digits


class Quick(demo_train.Task):
    """The demo's task with a network that exports in a second."""

    def model(self, seed):
        torch.manual_seed(seed)
        layers = nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
        model = nn.Sequential(*layers)
        model(torch.from_numpy(self.digits.train_images[:2]))
        return model.train()


def test_two_seeds_run(tmp_path):
    """A few steps of one task, as in `make demo-train`."""
    digits = load_digits()
    few = dataclasses.replace(digits, train_images=digits.train_images[:128], train_labels=digits.train_labels[:128])
    task = Quick("from scratch", few, 1, "sgd", {"lr": 0.1, "momentum": 0.9})
    runs, _ = demo_train.compare(task, 2, tmp_path)
    assert [(run.engine, run.seed) for run in runs] == [
        (engine, seed) for seed in range(2) for engine in ("torch", "onnxruntime")
    ]
    for own, other in zip(runs[::2], runs[1::2]):
        assert len(own.losses) == 2 and own.losses == pytest.approx(other.losses, rel=1e-4)
    demo_train.print_table(runs)


@pytest.mark.slow
def test_accuracies_agree(tmp_path):
    """It exits with 1 where the mean accuracies of torch and ONNX Runtime differ by more than half a point."""
    command = [sys.executable, "-m", "models.demo_train", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((tmp_path / "training.json").read_text())
    assert len(runs) == 2 * 2 * 3 and min(run["accuracy"] for run in runs) > 0.9
    assert (tmp_path / "training.png").stat().st_size > 10_000
