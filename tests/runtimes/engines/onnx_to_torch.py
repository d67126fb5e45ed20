"""onnx2torch: the graph as a torch module.

It imports torchvision, whose wheel for CUDA does not load next to a CPU build of torch; nothing of it is used here.
"""

from __future__ import annotations

import sys
import types
from importlib.metadata import version as version_of

import numpy as np
import onnx
import torch

sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
torch.library.define("torchvision::nms", "(Tensor boxes, Tensor scores, float limit) -> Tensor")
import onnx2torch  # noqa: E402


def version() -> str:
    return version_of("onnx2torch")


def run(path: str, inputs: dict[str, np.ndarray], outputs: list[str], libraries: list[str]) -> dict[str, np.ndarray]:
    model = onnx.load(path)
    module = onnx2torch.convert(model)
    held = {tensor.name for tensor in model.graph.initializer}
    feeds = [torch.from_numpy(inputs[value.name]) for value in model.graph.input if value.name not in held]
    with torch.no_grad():
        results = module(*feeds)
    results = results if isinstance(results, (tuple, list)) else (results,)
    found = {value.name: result.numpy() for value, result in zip(model.graph.output, results)}
    return {name: found[name] for name in outputs}
