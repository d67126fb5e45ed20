"""Search for the operator that an exporter most likely wrote for the example's sizes only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from bnexport.errors import VerificationError
from bnexport.exporting.dimensions.dynamic import Axis, Dimensions
from bnexport.exporting.dimensions.other_sizes import Fault
from bnexport.exporting.dimensions.size_conditions import SizeConditions
from bnexport.exporting.dimensions.sizes import DimensionGroup, resized, shapes
from bnexport.exporting.wrapper import Traced
from bnexport.torch_versions import DispatchMode, pytree
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


# Multiples of a size at which the cause of a fixed dimension is looked for.
_FACTORS = (2, 3, 5)


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

    That is the operator at which the module fails on `others`; or the first whose numbers depend on the size; or the first
    that it calls at one of the sizes only.

    module: runs on the inputs; it may change by it. others: inputs of other sizes.
    """
    calls, failed = _record(module, inputs)
    if failed:
        return ""
    changed, failed = _record(module, others)
    if failed:
        return f"it fails in {changed[-1]}" if changed else ""
    tests: list[_Test] = [
        lambda call, _: call.operator.startswith(_RESAMPLING),
        lambda call, other: other is not None and call.operator.startswith(_SIZED) and call.numbers != other.numbers,
        lambda call, _: call.is_adaptive_pooling,
    ]
    aligned = [(one.operator, one.module) for one in calls] == [(two.operator, two.module) for two in changed]
    if not aligned:
        return _first_difference(calls, changed)
    pairs: list[tuple[_RecordedCall, _RecordedCall | None]] = list(zip(calls, changed))
    return next((str(call) for test in tests for call, other in pairs if test(call, other)), "")


def _first_difference(calls: Sequence[_RecordedCall], others: Sequence[_RecordedCall]) -> str:
    """Name the first operator that is called at one of two sizes only."""
    pairs = zip_longest(calls, others)
    one, two = next((one, two) for one, two in pairs if one is None or two is None or _differ(one, two))
    longer = one if two is None or (one is not None and len(calls) > len(others)) else two
    return f"{longer}, which the model calls at some sizes only"


def _differ(one: _RecordedCall, two: _RecordedCall) -> bool:
    return (one.operator, one.module) != (two.operator, two.module)


def without_faults(
    dimensions: Dimensions, faults: Sequence[Fault], reference: Reference, conditions: SizeConditions | None = None
) -> Dimensions:
    """Make the dimensions at fault static, with notes that name a condition of the model's code, or an operator.

    Raises VerificationError where none of them is dynamic: the exported model has sizes that were not asked for.
    """

    def cause(fault: Fault) -> str:
        if fault.run is None:
            return fault.cause or name_at_any(dimensions, fault.axes, reference)
        other = shapes(dimensions.inputs, fault.run.changes)
        asked = conditions.asked_for(fault.axes, other, dimensions.free) if conditions is not None else ""
        return asked or name_operator(reference.module(), dimensions.inputs, fault.run.inputs)

    found = list(map(cause, faults))
    left = dimensions
    for fault, own in zip(faults, found):
        # Dimensions that are wrong together mostly have one cause.
        left = left.without(fault.axes, "static", fault.reason, own or next(filter(None, found), ""))
    if left.free == dimensions.free:
        raise VerificationError(f"{faults[0].reason}, in a dimension that was to be static; nothing was written")
    return left


def name_at_any(dimensions: Dimensions, axes: Collection[Axis], reference: Reference) -> str:
    """Return the operator at the first of some sizes of these dimensions that shows one."""
    inputs = dimensions.inputs
    groups = [DimensionGroup(0, inputs[place].shape[index], ((place, index),)) for place, index in axes]
    for factor in _FACTORS if groups else ():
        others = resized(inputs, {group: factor * group.size for group in groups})
        if found := name_operator(reference.module(), inputs, others):
            return found
    return ""


def _record(module: nn.Module, inputs: Tensors) -> tuple[list[_RecordedCall], bool]:
    """Return the calls of a run, and whether the last one failed."""
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
    except Exception as error:  # what the model's code raises; a name is a help, not a result
        if type(error).__module__.startswith("torch._dynamo"):
            torch.compiler.reset()  # torch.cond compiles its branches, not below a recorder, and would fail from now on
        return recorder.calls, True
    finally:
        for handle in handles:
            handle.remove()
    return recorder.calls, False


def _enter(path: list[str], name: str, *_: Any) -> None:
    path.append(name)


def _leave(path: list[str], *_: Any) -> None:
    if path:
        path.pop()


class _Recorder(DispatchMode):
    def __init__(self, path: list[str]) -> None:
        super().__init__()
        self.calls: list[_RecordedCall] = []
        self._path = path

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        numbers = [_number(leaf) for leaf in pytree.tree_leaves((args, kwargs or {})) if _is_number(leaf)]
        operator = func.name().split("::")[-1].split(".")[0].lstrip("_")
        self.calls.append(_RecordedCall(operator, self._path[-1] if self._path else "", tuple(numbers)))
        return func(*args, **(kwargs or {}))


def _is_number(leaf: Any) -> bool:
    """Whether an argument is a number; torch wraps those of `x / 8` in tensors."""
    return isinstance(leaf, (int, float)) or (isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and not leaf.is_meta)


def _number(leaf: Any) -> float:
    return float(leaf)
