"""training.html: a network that learns from its initial weights on, compared with the same steps in Python.

Page and reference are two float32 computations that round differently. The bound for their losses and logits
is tolerances.model, that of a whole model, and errors stay far below it as long as the network is smooth: after
66 steps those of the reference against float64 torch are 1.5e-7 and 7e-6. A ReLU whose argument lies within
rounding of 0 has a gradient in one computation and none in the other. In a ResNet of this size that happened
at step 20, with an argument of 1.2e-8: losses differed by 10^-2 in the end, both being right, and no bound
tells that from a mistake.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn

import bnexport
from bnexport import tolerances
from models.digits import Digits, load_digits

BATCH, EPOCHS, PEAK = 64, 3, 0.1
OPTIONS = {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}


@dataclasses.dataclass(frozen=True)
class Run:
    """losses: (steps,), each before its update. logits: of the test images after the last one, (images, 10)."""

    losses: np.ndarray
    logits: np.ndarray
    labels: np.ndarray

    @property
    def accuracy(self) -> float:
        return float((self.logits.argmax(1) == self.labels).mean())


def network() -> nn.Module:
    """8 x 8 grey digits (N, 1, 8, 8) to logits (N, 10)."""

    def layer(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        return [convolution, bnexport.SyncBatchNorm(outputs), nn.SiLU()]

    return nn.Sequential(
        *layer(1, 16, 1), *layer(16, 32, 2), *layer(32, 32, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


def build(folder: Path) -> Run:
    """Writes the step's three files and training_data.safetensors; what the page should find."""
    digits = load_digits()
    torch.manual_seed(0)
    model = network().train()
    batches = _batches(len(digits.train_images))
    bnexport.export_training_step(
        model,
        nn.functional.cross_entropy,
        (torch.from_numpy(digits.train_images[:BATCH]), torch.from_numpy(digits.train_labels[:BATCH])),
        folder / "step.onnx",
        overwrite=True,
        optimizer="sgd",
        optimizer_options=OPTIONS,
        standard_ops_only=True,
        input_names=("images", "labels"),
    )
    reference = _train(folder / "step.onnx", digits, batches)
    data = {
        **dataclasses.asdict(digits),
        "indices": np.stack([indices for indices, _ in batches]),
        "rates": np.array([rate for _, rate in batches]),
        "losses": reference.losses,
    }
    save_file({name: np.ascontiguousarray(array) for name, array in data.items()}, folder / "training_data.safetensors")
    return reference


def check(reference: Run, result: dict[str, Any]) -> None:
    """Raises SystemExit where the page's losses or logits lie outside the bound."""
    logits = np.array(result["logits"]).reshape(reference.logits.shape)
    page = Run(np.array(result["losses"]), logits, reference.labels)
    print(
        f"{len(page.losses)} training steps, loss {page.losses[0]:.3f} to {page.losses[-1]:.3f},"
        f" {result['milliseconds']:.0f} ms a step; accuracy {page.accuracy:.2%} of {len(page.labels)} test digits,"
        f" in Python {reference.accuracy:.2%}"
    )
    for name, got, expected in (("losses", page.losses, reference.losses), ("logits", logits, reference.logits)):
        difference, bound = float(np.abs(got - expected).max()), tolerances.model("float32", expected).atol
        print(f"  {name}: largest difference from ONNX Runtime in Python {difference:.1e}, bound {bound:.1e}")
        if not difference <= bound:
            raise SystemExit(f"training.html: {name}: expected {expected}, got {got}")
    if result["accuracy"] != page.accuracy:
        raise SystemExit(f"training.html: shows the accuracy {result['accuracy']}, expected {page.accuracy}")


def _batches(images: int) -> list[tuple[np.ndarray, float]]:
    """Indices (BATCH,) and the learning rate of each step, which rises to PEAK and falls as a cosine."""
    order, each = np.random.default_rng(0), images // BATCH
    indices = np.concatenate([order.permutation(images)[: each * BATCH].reshape(each, BATCH) for _ in range(EPOCHS)])
    phase = np.arange(len(indices)) / len(indices)
    rates = PEAK * np.minimum(1.0, 10.0 * phase + 0.1) * 0.5 * (1.0 + np.cos(math.pi * phase))
    return list(zip(indices, rates.tolist()))


def _train(step: Path, digits: Digits, batches: list[tuple[np.ndarray, float]]) -> Run:
    session = bnexport.TrainingSession(step)
    losses = []
    for indices, session.learning_rate in batches:
        losses.append(session.step((digits.train_images[indices], digits.train_labels[indices])))
    evaluation = session.evaluate((digits.test_images, digits.test_labels))
    return Run(np.array(losses), evaluation.outputs["output"], digits.test_labels)
