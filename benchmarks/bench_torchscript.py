"""The exported TorchScript file of a network of ResNet-50's shape against torch's own ways to speed it up.

    python -m benchmarks.bench_torchscript [--rounds 8] [--json PATH]

Processor time on one thread, which what else the machine does hardly changes; the candidates run in turn.
The ratio is that of the least times, to torch.jit.optimize_for_inference of the unfolded module. Each
candidate is compared with eager first.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import bnexport
from benchmarks import machine, records

REFERENCE = "optimize_for_inference of the unfolded module"
WARM_UP, RUNS = 1, 3


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.reduce = nn.Sequential(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.conv = nn.Sequential(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.expand = nn.Sequential(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.expand(self.conv(self.reduce(x))) + self.shortcut(x))


def network() -> nn.Module:
    """ResNet-50's topology (He et al. 2016) with random weights, in eval mode."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return net.eval()


def candidates(net: nn.Module, x: torch.Tensor, path: Path) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    bnexport.export(net, x, path, format="torchscript", verify=False, overwrite=True)
    return {
        "eager": net,
        REFERENCE: torch.jit.optimize_for_inference(torch.jit.script(net)),
        "freeze of the unfolded module": torch.jit.freeze(torch.jit.script(net)),
        "our file": torch.jit.load(str(path)),
        "our file, optimize_for_inference after loading": torch.jit.optimize_for_inference(torch.jit.load(str(path))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/torchscript.json"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, x = network(), torch.randn(1, 3, 224, 224)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        models = candidates(net, x, Path(folder, "m.pt"))
        expected = net(x)
        for name, model in models.items():
            torch.testing.assert_close(
                model(x), expected, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(arguments.rounds):
            for name, model in models.items():
                for step in range(WARM_UP + RUNS):
                    start = time.process_time()
                    model(x)
                    if step >= WARM_UP:
                        times[name].append(time.process_time() - start)
    rows = [
        {
            "candidate": name,
            "median_ms": statistics.median(values) * 1e3,
            "least_ms": min(values) * 1e3,
            "ratio": min(values) / min(times[REFERENCE]),
        }
        for name, values in times.items()
    ]
    for row in rows:
        print("{candidate:50} median {median_ms:6.1f} ms  least {least_ms:6.1f} ms  x {ratio:.2f}".format(**row))
    records.write(arguments.json, {"machine": machine.describe(), "rows": rows})


if __name__ == "__main__":
    main()
