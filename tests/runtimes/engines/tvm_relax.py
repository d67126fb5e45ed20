"""TVM's Relax, compiled for the CPU."""

from __future__ import annotations

import numpy as np
import onnx
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx


def version() -> str:
    return tvm.__version__


def run(path: str, inputs: dict[str, np.ndarray], outputs: list[str], libraries: list[str]) -> dict[str, np.ndarray]:
    model = onnx.load(path)
    held = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in held]
    shapes = {name: list(inputs[name].shape) for name in names}
    module = from_onnx(model, shape_dict=shapes, keep_params_in_input=False)
    executable = tvm.compile(module, tvm.target.Target("llvm"))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    results = machine["main"](*(tvm.runtime.tensor(inputs[name]) for name in names))
    results = [results] if hasattr(results, "numpy") else list(results)
    found = {value.name: result.numpy() for value, result in zip(model.graph.output, results)}
    return {name: found[name] for name in outputs}
