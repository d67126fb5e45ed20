"""Kinks of a step: operators whose value or derivative jumps where an input crosses a point or meets another input.

A ReLU whose input is zero but for rounding goes either way, and changes every gradient before it, by 1e-3 to 1e-1 of
its 2-norm. Two computations are comparable where they go the same way. So the inputs of kinks are recorded in one of
them, and another takes them over, one operator after the other, as far as its own are the same but for rounding:
what differs by more stays, and so does every difference between two kinks.

Both number the inputs in the order in which they reach torch's dispatcher: in the graph that is traced, in float32 and
in float64 alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from bnexport import tolerances
from bnexport.torch_versions import DispatchMode

Tensor = torch.Tensor

_PREFIX = "bnexport.kink."
_OF_POINTS = (
    "relu hardtanh hardswish hardsigmoid leaky_relu _prelu_kernel elu threshold hardshrink softshrink clamp clamp_min "
    "clamp_max abs sign sgn floor ceil round trunc grid_sampler_2d gt ge lt le eq ne"
)
_OF_INPUTS = (
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d max min amax amin maximum "
    "minimum fmax fmin argmax argmin aminmax topk sort kthvalue median cummax cummin"
)
_OPERATORS = {f"aten.{name}{suffix}" for name in f"{_OF_POINTS} {_OF_INPUTS}".split() for suffix in ("", "_")}


class Kinks(DispatchMode):
    """Context that sees the floating-point inputs of kinks."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(func.overloadpacket) in _OPERATORS:
            for value in args:
                if isinstance(value, Tensor) and value.is_floating_point():
                    self.reached(value)
        return func(*args, **(kwargs or {}))

    def reached(self, x: Tensor) -> None:
        raise NotImplementedError


class Recorder(Kinks):
    """Records the inputs, in order, in `values`."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def reached(self, x: Tensor) -> None:
        # An operator may work in place.
        self.values.append(x.detach().clone())

    def named(self) -> dict[str, Tensor]:
        """Return the inputs under names for outputs of a traced function (`take`)."""
        return {f"{_PREFIX}{index}": value for index, value in enumerate(self.values)}


class Follower(Kinks):
    """Sets the inputs to those that another computation had, where they differ by rounding (tolerances.model).

    values: in order; None where unknown. kept: tensors that must not change, such as parameters.
    """

    def __init__(self, values: Sequence[np.ndarray | None], kept: Iterable[Tensor]) -> None:
        super().__init__()
        self._values = list(values)
        self._kept = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self._count = 0

    def reached(self, x: Tensor) -> None:
        index, self._count = self._count, self._count + 1
        value = self._values[index] if index < len(self._values) else None
        if value is None or value.shape != tuple(x.shape) or 0 in x.stride():
            return
        if x.untyped_storage().data_ptr() in self._kept:
            return
        other = torch.from_numpy(value).to(x.dtype)
        allowed = tolerances.model(value.dtype.name, x.detach().numpy()).atol
        # In place: autograd has saved this tensor for the operator's gradient.
        x.copy_(torch.where((other - x).abs() <= allowed, other, x))


def take(model: ir.Model) -> list[ir.Value]:
    """Remove what `Recorder.named` added to the outputs; return the values recorded."""
    outputs = model.graph.outputs
    recorded = [output for output in outputs if str(output.name).startswith(_PREFIX)]
    outputs[:] = [output for output in outputs if output not in recorded]
    return [_source(value) for value in recorded]


def _source(value: ir.Value) -> ir.Value:
    producer = value.producer()
    while producer is not None and producer.op_type == "Identity" and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value


def names(model: ir.Model, values: Iterable[ir.Value]) -> list[str]:
    """Return the names of values that nodes of the graph still make; "" for others."""
    producers = [(value, value.producer()) for value in values]
    return [
        str(value.name) if producer is not None and producer.graph is model.graph else ""
        for value, producer in producers
    ]
