"""index.html: the trained network with its nodes kept, compared with torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import bnexport
from models.digits import load_digits
from models.resnet import digits_resnet
from models.training import train

SHOWN, EPOCHS = 40, 6
DIFFERENCE_BELOW = 1e-4


def build(folder: Path) -> list[int]:
    """Trains, and writes kept.onnx and samples.json; torch's predictions."""
    digits, checkpoint = load_digits(), folder / "digits.pt"
    if not checkpoint.exists():
        train(digits_resnet, digits, checkpoint, epochs=EPOCHS)
    model = digits_resnet()
    model.load_state_dict(torch.load(checkpoint, weights_only=True))
    model.eval()
    images = torch.from_numpy(digits.test_images)
    bnexport.export(model, images[:SHOWN], folder / "kept.onnx", mode="custom_op", overwrite=True)
    with torch.no_grad():
        logits = model(images)
    samples = {
        "images": images[:SHOWN].flatten().tolist(),
        "labels": digits.test_labels[:SHOWN].tolist(),
        "logits": logits[:SHOWN].flatten().tolist(),
        "shape": list(images[:SHOWN].shape),
        "accuracy": float((logits.argmax(1).numpy() == digits.test_labels).mean()),
    }
    (folder / "samples.json").write_text(json.dumps(samples))
    predictions: list[int] = logits[:SHOWN].argmax(1).tolist()
    return predictions


def check(expected: list[int], result: dict[str, Any]) -> None:
    """Raises SystemExit where the page's predictions or logits are not torch's."""
    print(
        f"{len(expected)} digits, largest difference from torch {result['difference']:.1e},"
        f" {result['milliseconds']:.2f} ms"
    )
    if result["predictions"] != expected or not result["difference"] < DIFFERENCE_BELOW:
        raise SystemExit(f"index.html: expected {expected} within {DIFFERENCE_BELOW}, got {result}")
