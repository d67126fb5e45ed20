"""Statistics re-estimated on data: what it does for accuracy, and what it costs.

    python -m benchmarks.bench_recalibration [--epochs 12]

Accuracy: the network of `make demo` trained with batches of 4 and of 32, the latter also with its weights rounded to few
bits and on images of other contrast; test accuracy with the statistics of training, re-estimated on the training images,
and folded then.
Cost: `together` over the same batches as inference, in ONNX Runtime (ResNets, opening the file left out: the difference of
two lengths) and in torch. The file's part runs in a process without torch, as users of files do.
"""

from __future__ import annotations

import argparse
import copy
import functools
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, records

IMAGES, BATCH, BATCHES = 112, 8, 6
RESULT = Path("benchmarks/results/recalibration.json")


def least(function: Callable[[], Any], runs: int = 5) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def rounded(model: Any, bits: int) -> Any:
    """A copy whose convolutions and linear layers have weights of `bits` bits, one scale for each output channel."""
    import torch
    from torch import nn

    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                flat = layer.weight.flatten(1)
                step = flat.abs().amax(1).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
                layer.weight.copy_(((flat / step[:, None]).round() * step[:, None]).view_as(layer.weight))
    return model


def accuracy_rows(epochs: int, folder: Path) -> list[dict[str, Any]]:
    import onnxruntime
    import torch

    import bnexport
    from models.digits import load_digits
    from models.resnet import digits_resnet
    from models.training import train

    digits = load_digits()
    labels = digits.test_labels
    nets = {}
    for batch in (4, 32):
        checkpoint = folder / f"{batch}.pt"
        train(digits_resnet, digits, checkpoint, epochs=epochs, batch=batch, processes=1)
        nets[batch] = digits_resnet()
        nets[batch].load_state_dict(torch.load(checkpoint, weights_only=True))
    cases = [("trained with batches of 4", nets[4], 1.0, 0.0), ("trained with batches of 32", nets[32], 1.0, 0.0)]
    cases += [(f"weights rounded to {bits} bits", rounded(nets[32], bits), 1.0, 0.0) for bits in (4, 3, 2)]
    cases.append(("images of a third of the contrast, darker", copy.deepcopy(nets[32]), 0.3, -0.5))
    rows = []
    for name, model, scale, shift in cases:
        images = scale * torch.from_numpy(digits.test_images) + shift
        batches = list((scale * torch.from_numpy(digits.train_images) + shift).split(100))

        def share(model: Any, images: Any = images) -> float:
            with torch.no_grad():
                return float((model.eval()(images).argmax(1).numpy() == labels).mean())

        before = share(model)
        report = bnexport.recalibrate(model, batches)
        after = share(model)
        path = folder / "folded.onnx"
        bnexport.export(model, (images[:2],), path, overwrite=True)
        session = onnxruntime.InferenceSession(str(path))
        (got,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        folded = float((got.argmax(1) == labels).mean())
        rows.append({"network": name, "before": before, "after": after, "folded": folded, "largest": report.largest})
        print(f"{name:42} {before:.1%} before, {after:.1%} re-estimated, {folded:.1%} folded")
    return rows


def file_cost(path: str) -> dict[str, float]:
    import onnxruntime

    from bnexport.recalibration.files import recalibrate_file

    session = onnxruntime.InferenceSession(path)
    name = session.get_inputs()[0].name
    generator = np.random.default_rng(0)
    batches = [{name: generator.standard_normal((BATCH, 3, IMAGES, IMAGES)).astype(np.float32)} for _ in range(BATCHES)]
    short, long, inference = [], [], []
    for _ in range(5):  # in turn
        inference.append(least(lambda: [session.run(None, batch) for batch in batches], 1))
        short.append(least(lambda: recalibrate_file(path, None, batches, layers="together"), 1))
        long.append(least(lambda: recalibrate_file(path, None, batches * 3, layers="together"), 1))
    one_by_one = least(lambda: recalibrate_file(path, None, batches * 3), 2)
    seconds = (min(long) - min(short)) / 2
    return {
        "inference": min(inference),
        "together": seconds,
        "ratio": seconds / min(inference),
        "one_by_one_ratio": (one_by_one - min(short) + seconds) / (3 * min(inference)),
    }


def largest_deviation(exact: Any, got: Any) -> float:
    """The largest difference of a mean, or of a standard deviation, in standard deviations."""
    found = []
    for a, b in zip(exact.layers, got.layers, strict=True):
        std = np.sqrt(a.new_var + a.eps)
        found.append(max(np.abs(a.new_mean - b.new_mean) / std))
        found.append(max(np.abs(np.sqrt(b.new_var + b.eps) / std - 1)))
    return float(max(found))


def forwards(model: Any, batches: list[Any]) -> None:
    import torch

    with torch.no_grad():
        for batch in batches:
            model(batch)


def costs(folder: Path) -> list[dict[str, Any]]:
    import torch

    import bnexport
    from models.deep_resnet import resnet18, resnet50

    rows = []
    for name, make in (("ResNet-18", resnet18), ("ResNet-50", resnet50)):
        torch.manual_seed(0)
        model = make().eval()
        batches = [torch.randn(BATCH, 3, IMAGES, IMAGES) for _ in range(BATCHES)]
        path = folder / f"{name}.onnx"
        bnexport.export(model, (batches[0],), path, fold=False, simplify=False, verify=False)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            in_file = pool.apply(file_cost, (str(path),))
        plain = functools.partial(forwards, model, batches)
        ours = functools.partial(bnexport.recalibrate, model, batches, layers="together")
        forward, together = zip(*((least(plain, 1), least(ours, 1)) for _ in range(5)), strict=True)
        exact = copy.deepcopy(model).double()
        report = bnexport.recalibrate(exact, [batch.double() for batch in batches], layers="together")
        deviation = largest_deviation(report, bnexport.recalibrate(model, batches, layers="together"))
        rows.append(
            {
                "network": name,
                "deviation": deviation,
                "file": in_file,
                "module": {"ratio": min(together) / min(forward)},
            }
        )
        print(
            f"{name}: {in_file['ratio']:.2f} of inference in ONNX Runtime, {rows[-1]['module']['ratio']:.2f} in torch"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        rows = accuracy_rows(arguments.epochs, Path(folder))
        cost = costs(Path(folder))
    setting = {"image": IMAGES, "batch": BATCH, "epochs": arguments.epochs}
    records.write(RESULT, {"machine": machine.describe(), **setting, "rows": rows, "costs": cost})


if __name__ == "__main__":
    main()
