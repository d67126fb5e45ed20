"""Gradients of convolutions in ONNX Runtime, in the forms of our translations, against torch's own on CPU.

    python -m benchmarks.bench_conv_gradient [--json PATH] [--threads N] [--rounds N]

For the layers of ResNet-18 (width 64, batch 4, 112 x 112) and MobileNetV2 (batch 8, 96 x 96): the time of
torch's gradients by weight and input, and that of each form as a multiple of it. "library" is our kernel. The
form that an export of standard operators chooses is marked. Each form is verified before it is timed: its error
against float64 is at most that of tolerances.py for a whole model. Forms and torch run in turn; the figure is the
smallest time of a round, of CPU time with one thread, so that a busy machine tells forms apart too.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from onnxscript import evaluator, opset18
from rich.console import Console
from rich.table import Table
from torch.onnx._internal.exporter._building import OpRecorder

from benchmarks import machine, records
from bnexport import tolerances
from bnexport.native import library
from bnexport.training import contract
from bnexport.training.translations import convolution
from bnexport.training.translations.convolution import Geometry

BACKWARD = torch.ops.aten.convolution_backward.default

# (batch, channels, outputs, size, kernel, stride, groups), padding kernel // 2.
RESNET = [
    (4, 3, 64, 112, 7, 2, 1),
    (4, 64, 64, 28, 3, 1, 1),
    (4, 64, 128, 28, 3, 2, 1),
    (4, 64, 128, 28, 1, 2, 1),
    (4, 128, 128, 14, 3, 1, 1),
    (4, 256, 256, 7, 3, 1, 1),
    (4, 512, 512, 4, 3, 1, 1),
]
MOBILENET = [
    (8, 3, 32, 96, 3, 2, 1),
    (8, 32, 32, 48, 3, 1, 32),
    (8, 32, 16, 48, 1, 1, 1),
    (8, 16, 96, 48, 1, 1, 1),
    (8, 96, 96, 48, 3, 2, 96),
    (8, 144, 144, 24, 3, 1, 144),
    (8, 144, 32, 12, 1, 1, 1),
    (8, 192, 192, 12, 3, 1, 192),
    (8, 384, 384, 6, 3, 1, 384),
    (8, 384, 96, 6, 1, 1, 1),
    (8, 160, 960, 3, 1, 1, 1),
    (8, 960, 960, 3, 3, 1, 960),
]
Layer = tuple[int, int, int, int, int, int, int]


def geometry(layer: Layer) -> Geometry:
    _, C, O, size, k, s, groups = layer  # noqa: E741
    plane = (size + 2 * (k // 2) - k) // s + 1
    return Geometry(C, O, (size,) * 2, (plane,) * 2, (k,) * 2, (s,) * 2, (k // 2,) * 2, (1, 1), groups)


def session(build: Callable[..., Any], arrays: list[np.ndarray], threads: int) -> Callable[[], np.ndarray]:
    """Runs the graph that `build` records for inputs of these shapes, the batch dynamic."""
    inputs = [
        ir.Value(name=f"x{index}", shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.FLOAT))
        for index, array in enumerate(arrays)
    ]
    recorder = OpRecorder(opset18, {})
    with evaluator.default_as(recorder):
        output = build(*inputs)
    for index, node in enumerate(recorder.nodes):
        node.outputs[0].name = f"v{index}"
    graph = ir.Graph(inputs, [output], nodes=recorder.nodes, opset_imports={"": 18, contract.DOMAIN: contract.VERSION})
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    library.register(options, training=True)
    loaded = onnxruntime.InferenceSession(
        ir.to_proto(ir.Model(graph, ir_version=9)).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = {value.name: array for value, array in zip(inputs, arrays)}
    return lambda: loaded.run(None, feeds)[0]


def candidates(
    layer: Layer, tensors: list[torch.Tensor], threads: int
) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]]]:
    """Verified forms of the gradients by weight and by input, torch's among them."""
    shape = geometry(layer)
    x, w, g = tensors
    window = (shape.stride, shape.padding, (1, 1), False, (0, 0), shape.groups)

    def torch_gradient(index: int, *operands: torch.Tensor) -> torch.Tensor:
        gradient, value, weight = operands
        return BACKWARD(gradient, value, weight, None, *window, [index == 0, index == 1, False])[index]

    def verified(name: str, build: Callable[..., Any], arrays: list[torch.Tensor], index: int) -> Callable[[], Any]:
        function = session(build, [array.numpy() for array in arrays], threads)
        exact = torch_gradient(index, g.double(), x.double(), w.double()).numpy()
        error, bound = float(np.abs(function() - exact).max()), tolerances.model("float32", exact).atol
        if error > bound:
            raise SystemExit(f"{layer} {name}: error {error:.1e}, allowed {bound:.1e}; nothing was timed")
        return function

    by_weight: dict[str, Callable[[], Any]] = {"torch": lambda: torch_gradient(1, g, x, w)}
    for form in convolution.WeightGradientForm:
        if convolution.weight_form_fits(shape, form):
            build = functools.partial(convolution.weight_gradient, shape=shape, form=form)
            by_weight[form.value] = verified(form.value, build, [x, g], 1)
    window_attributes = {
        "strides": shape.stride,
        "pads": shape.padding,
        "dilations": shape.dilation,
        "group": shape.groups,
    }
    of_weight, of_input = contract.node(contract.CONV_WEIGHT_GRAD), contract.node(contract.CONV_INPUT_GRAD)
    build = lambda x, g: of_weight(g, x, kernel_shape=shape.kernel, **window_attributes)  # noqa: E731
    by_weight["library"] = verified("library", build, [x, g], 1)
    by_input: dict[str, Callable[[], Any]] = {"torch": lambda: torch_gradient(0, g, x, w)}
    build = functools.partial(convolution.input_gradient, shape=shape)
    by_input["transposed"] = verified("transposed", build, [g, w], 0)
    build = lambda g, w: of_input(g, w, input_shape=shape.extents, **window_attributes)  # noqa: E731
    by_input["library"] = verified("library", build, [g, w], 0)
    return by_weight, by_input


def times(functions: dict[str, Callable[[], Any]], threads: int, rounds: int) -> dict[str, float]:
    """Seconds; the smallest of all rounds, in which the functions take turns."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    best = dict.fromkeys(functions, math.inf)
    for _ in range(rounds):
        for name, function in functions.items():
            if threads > 1:
                machine.rest()
                function()  # wakes the threads
            start = clock()
            function()
            best[name] = min(best[name], clock() - start)
    return best


def measure(layer: Layer, threads: int, rounds: int) -> dict[str, Any]:
    shape = geometry(layer)
    x = torch.randn(layer[0], shape.channels, *shape.extents)
    w = torch.randn(shape.outputs, shape.channels // shape.groups, *shape.kernel)
    g = torch.randn(layer[0], shape.outputs, *shape.plane)
    by_weight, by_input = (times(forms, threads, rounds) for forms in candidates(layer, [x, w, g], threads))
    return {
        "layer": layer,
        "by_weight": by_weight,
        "by_input": by_input,
        "chosen": [convolution.choose_weight_form(shape).value, "transposed"],
    }


def show(title: str, results: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=title)
    for heading in (
        "N, C, O, size, k, s, groups",
        "dw torch ms",
        "dw forms, x torch",
        "dx torch ms",
        "dx forms, x torch",
    ):
        table.add_column(heading)
    for result in results:
        cells = [", ".join(str(number) for number in result["layer"])]
        for gradient, chosen in zip(("by_weight", "by_input"), result["chosen"]):
            forms = dict(result[gradient])
            own = forms.pop("torch")
            ratios = [f"{name}{'*' if name == chosen else ''} {seconds / own:.2f}" for name, seconds in forms.items()]
            cells += [f"{own * 1e3:.2f}", "  ".join(ratios)]
        table.add_row(*cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/conv_gradient.json"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    console = Console(width=140)
    report = {}
    for title, layers in (("ResNet-18", RESNET), ("MobileNetV2", MOBILENET)):
        report[title] = [measure(layer, arguments.threads, arguments.rounds) for layer in layers]
        show(f"{title}, {arguments.threads} threads; * is the chosen form", report[title], console)
    result = {"machine": machine.describe(), "threads": arguments.threads, "layers": report}
    records.write(arguments.json, result)


if __name__ == "__main__":
    main()
