"""Search for the operator that an exporter most likely wrote for the example's sizes only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bnexport.errors import VerificationError
from bnexport.exporting.dimensions.other_sizes import Fault, OtherSizes
from bnexport.exporting.dynamo import Shapes
from bnexport.exporting.wrapper import Traced
from bnexport.verification.reference import Reference

Tensors = tuple[torch.Tensor, ...]

# Exporters reduce it to fixed windows; the one of torch.nn.functional is written out (adaptive_pooling.py).
_ADAPTIVE = ("adaptive_avg_pool", "adaptive_max_pool")
# Operators that exporters reduce to fixed scales.
_RESAMPLING = ("upsample_", "grid_sampler")
# Operators whose numbers a model computes from sizes; a traced graph keeps those of the example.
_SIZED = (
    *("view", "reshape", "expand", "repeat", "slice", "select", "split", "as_strided", "unfold", "roll", "cat"),
    *("arange", "linspace", "new_", "zeros", "ones", "full", "mul", "div", "add", "sub", "pow"),
    *("constant_pad", "reflection_pad", "replication_pad", "avg_pool", "max_pool", "im2col", "col2im"),
)


@dataclasses.dataclass(frozen=True)
class _RecordedCall:
    """A recorded call: the operator, the module that called it, and its numeric arguments."""

    operator: str
    module: str
    numbers: tuple[float, ...]

    @property
    def is_adaptive_pooling(self) -> bool:
        """Adaptive pooling to more than one value along some dimension: a global pooling is right at any size."""
        return self.operator.startswith(_ADAPTIVE) and set(self.numbers) != {1}

    def __str__(self) -> str:
        name = "interpolate" if self.operator.startswith("upsample_") else self.operator
        return f"{name} in {self.module!r}" if self.module else name


_Test = Callable[[_RecordedCall, _RecordedCall | None], bool]


def name_operator(module: nn.Module, inputs: Tensors, others: Tensors) -> str:
    """Return the operator and its module, as "adaptive_avg_pool2d in 'head.pool'"; empty if none is known to depend
    on size.

    module: runs on both inputs; it may change by it. others: inputs of other sizes.
    """
    try:
        calls, changed = _record(module, inputs), _record(module, others)
    except Exception:  # what the model's code raises; a name is a help, not a result
        return ""
    tests: list[_Test] = [
        lambda call, _: call.operator.startswith(_RESAMPLING),
        lambda call, other: other is not None and call.operator.startswith(_SIZED) and call.numbers != other.numbers,
        lambda call, _: call.is_adaptive_pooling,
    ]
    aligned = [(one.operator, one.module) for one in calls] == [(two.operator, two.module) for two in changed]
    pairs: list[tuple[_RecordedCall, _RecordedCall | None]] = [(call, None) for call in calls]
    if aligned:
        pairs = list(zip(calls, changed))
    return next((str(call) for test in tests for call, other in pairs if test(call, other)), "")


def fix_dimensions(
    shapes: Shapes, faults: Sequence[Fault], names: Sequence[str], inputs: Tensors, reference: Reference
) -> list[str]:
    """Remove the dimensions at fault from `shapes`, the dynamic ones of each input by name. Return a note for each.

    Raises VerificationError where none of them is there: the exported model has sizes that were not asked for.
    """
    notes = []
    for fault in faults:
        operator = "" if fault.run is None else name_operator(reference.module(), inputs, fault.run.inputs)
        for index, dimension in fault.axes:
            name = shapes[index].pop(dimension, None)
            if name is not None:
                notes.append(
                    f"input {names[index]!r}: dimension {dimension} ({name}) stays {inputs[index].shape[dimension]}:"
                    f" {fault.reason}{operator and f' ({operator})'}"
                )
    if not notes:
        raise VerificationError(f"{faults[0].reason}, in a dimension that was to be static; nothing was written")
    return notes


def plan_sizes(
    shapes: Shapes,
    names: Sequence[str],
    inputs: Tensors,
    reference: Reference,
    notes: list[str],
    *,
    guarded: bool = False,
) -> OtherSizes:
    """Choose sizes at which the reference runs; remove dimensions that it fixes from `shapes`, with a note for each."""
    others = OtherSizes(inputs, reference, guarded=guarded)
    try:
        comparable = not reference.is_random(inputs)
    except Exception:  # what the model's code raises; the exporter reports it
        comparable = False
    if comparable:
        others.plan(shapes)
        if others.unseen:
            notes += fix_dimensions(shapes, others.unseen, names, inputs, reference)
            others.plan(shapes)
    return others


def _record(module: nn.Module, inputs: Tensors) -> list[_RecordedCall]:
    path: list[str] = []
    recorder = _Recorder(path)
    handles = []
    root = module.model if isinstance(module, Traced) else module
    for name, child in root.named_modules():
        handles += [
            child.register_forward_pre_hook(functools.partial(_enter, path, name)),
            child.register_forward_hook(functools.partial(_leave, path), always_call=True),
        ]
    try:
        with torch.no_grad(), recorder:
            module(*(value.clone() for value in inputs))
    finally:
        for handle in handles:
            handle.remove()
    return recorder.calls


def _enter(path: list[str], name: str, *_: Any) -> None:
    path.append(name)


def _leave(path: list[str], *_: Any) -> None:
    if path:
        path.pop()


class _Recorder(TorchDispatchMode):
    def __init__(self, path: list[str]) -> None:
        super().__init__()
        self.calls: list[_RecordedCall] = []
        self._path = path

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        numbers = [leaf for leaf in _pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, (int, float))]
        operator = func.name().split("::")[-1].split(".")[0].lstrip("_")
        self.calls.append(_RecordedCall(operator, self._path[-1] if self._path else "", tuple(numbers)))
        return func(*args, **(kwargs or {}))
