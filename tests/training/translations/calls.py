"""Single operators: a translation is called by itself, hundreds of them in one graph, without tracing.

A call is an overload with its arguments. The graph of a list of calls is run in ONNX Runtime and each
output compared with torch's in float64. Bound: as in translation_cases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnxscript import evaluator, opset18
from torch.onnx._internal.exporter._building import OpRecorder

from bnexport.training import contract
from bnexport.training.translations import translation_table
from tests.training.translations.cases import failure, one_thread, run

Tensor = torch.Tensor

BATCH = 3


@dataclasses.dataclass(frozen=True)
class Call:
    """`arguments`: the operator's; dimension 0 of the tensors at the positions `batched` is dynamic."""

    name: str
    overload: Any
    arguments: tuple[Any, ...]
    batched: tuple[int, ...] = (0,)


def graph(calls: Sequence[Call], with_cpu_kernels: bool = False) -> tuple[onnx.ModelProto, list[Tensor]]:
    """One graph of all calls, and its inputs."""
    table = translation_table(with_cpu_kernels=with_cpu_kernels)
    tensors: list[Tensor] = []
    inputs: list[ir.Value] = []
    outputs: list[ir.Value] = []

    def value(position: int, argument: Any, call: Call) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        shape: list[int | str] = list(argument.shape)
        if position in call.batched:
            shape[0] = "batch"
        dtype = ir.DataType.FLOAT if argument.is_floating_point() else ir.DataType.INT64
        made = ir.Value(name=f"x{len(inputs)}", shape=ir.Shape(shape), type=ir.TensorType(dtype))
        inputs.append(made)
        tensors.append(argument)
        return made

    recorder = OpRecorder(opset18, {})
    with evaluator.default_as(recorder):
        for call in calls:
            arguments = [value(position, argument, call) for position, argument in enumerate(call.arguments)]
            made = table[call.overload](*arguments)
            # An argument can be the result: a convolution with one tap and nothing to sum.
            outputs += [opset18.Identity(output) for output in (made if isinstance(made, tuple) else (made,))]
    for index, output in enumerate(outputs):
        output.name = f"y{index}"
    imports = {"": 18, contract.DOMAIN: contract.VERSION}
    model = ir.Model(ir.Graph(inputs, outputs, nodes=recorder.nodes, opset_imports=imports), ir_version=9)
    for index, node in enumerate(recorder.nodes):
        for number, output in enumerate(node.outputs):
            output.name = output.name or f"v{index}_{number}"
    proto = ir.to_proto(model)
    return proto, tensors


@one_thread()
def check_calls(calls: Sequence[Call], with_cpu_kernels: bool = False) -> None:
    """Fails with a list of the calls that miss the bound."""
    model, tensors = graph(calls, with_cpu_kernels)
    got = iter(run(model, tensors, library=True))
    failures = []
    for call in calls:
        single = _tuple(call.overload(*call.arguments))
        double = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in call.arguments]
        exact = _tuple(call.overload(*double))
        for index, (own, expected) in enumerate(zip(single, exact)):
            result = next(got)
            if own is not None and expected is not None and own.numel():
                failures += failure(f"{call.name}, output {index}", result, own.numpy(), expected.numpy())
    assert not failures, "\n".join(failures)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
