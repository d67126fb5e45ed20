"""Accuracy of the digits network in float16 and in INT8, with its batch norms folded and kept.

    python -m benchmarks.lower_precision [--checkpoint demo_output/digits.pt]

Trains the network of `make demo` unless a checkpoint is given, exports it twice (folded, and with BatchNormalization
nodes), quantizes both with ONNX Runtime's static quantizer (QDQ, activations as unsigned and weights as signed 8-bit
integers, calibrated on training images), and runs all files over the test images. Writes
benchmarks/results/lower_precision.json, from which `python -m benchmarks.page` makes the table of docs/guides/quantization.md.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import bnexport
from benchmarks import machine, records
from benchmarks.page import RESULTS
from models.digits import load_digits
from models.resnet import digits_resnet
from models.training import train


class Images(CalibrationDataReader):  # type: ignore[misc]
    """Feeds images to the calibration, a batch at a time."""

    def __init__(self, name: str, images: np.ndarray, batch: int = 32) -> None:
        self.feeds: Iterator[dict[str, np.ndarray]] = (
            {name: images[start : start + batch]} for start in range(0, len(images), batch)
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


def quantize(source: Path, target: Path, images: np.ndarray, per_channel: bool) -> None:
    """Writes an INT8 file in QDQ form."""
    quantize_static(
        source,
        target,
        Images("x", images),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=per_channel,
    )


def logits(path: Path, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": images})[0].astype(np.float64)


def measure(checkpoint: Path | None, epochs: int) -> dict[str, Any]:
    """Exports, quantizes and runs every variant."""
    warnings.simplefilter("ignore")
    digits = load_digits()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        if checkpoint is None:
            checkpoint = folder / "digits.pt"
            train(digits_resnet, digits, checkpoint, epochs=epochs)
        model = digits_resnet()
        model.load_state_dict(torch.load(checkpoint, weights_only=True))
        model.eval()
        example = torch.from_numpy(digits.test_images[:2])
        folded, kept, half = (folder / f"{name}.onnx" for name in ("folded", "kept", "half"))
        bnexport.export(model, example, folded)
        bnexport.export(model, example, kept, fold=False)
        bnexport.export(digits_resnet_half(model), example.half(), half)
        files = {("float32", "folded"): folded, ("float32", "kept"): kept, ("float16", "folded"): half}
        calibration = digits.train_images[:256]
        for norms, source in (("folded", folded), ("kept", kept)):
            for scales, per_channel in (("per tensor", False), ("per channel", True)):
                files["INT8, " + scales, norms] = target = folder / f"{norms} {scales}.onnx"
                quantize(source, target, calibration, per_channel)
        reference = logits(folded, digits.test_images)
        rows = []
        for (precision, norms), path in files.items():
            images = digits.test_images.astype(np.float16 if precision == "float16" else np.float32)
            got = logits(path, images)
            rows.append(
                {
                    "precision": precision,
                    "batch_norms": norms,
                    "nodes": sum(node.op_type == "BatchNormalization" for node in onnx.load(path).graph.node),
                    "accuracy": float((got.argmax(1) == digits.test_labels).mean()),
                    "same_predictions": float((got.argmax(1) == reference.argmax(1)).mean()),
                    "rms_difference": float(np.sqrt(np.square(got - reference).mean() / np.square(reference).mean())),
                    "kib": path.stat().st_size / 1024,
                }
            )
        return {"machine": machine.describe(), "images": len(digits.test_images), "rows": rows}


def digits_resnet_half(model: torch.nn.Module) -> torch.nn.Module:
    """Returns a float16 copy."""
    copy = digits_resnet()
    copy.load_state_dict(model.state_dict())
    return copy.eval().half()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="trained weights; without them the network is trained")
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    report = measure(arguments.checkpoint, arguments.epochs)
    records.write(RESULTS / "lower_precision.json", report)
    for row in report["rows"]:
        print(row)


if __name__ == "__main__":
    main()
