"""Search for the operator that an exporter most likely wrote for the example's sizes only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from bnexport.errors import UnsupportedModelError, VerificationError
from bnexport.exporting.dimensions.other_sizes import Fault, OtherSizes
from bnexport.exporting.dimensions.sizes import DimensionGroup, resized
from bnexport.exporting.dynamo import Shapes
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


def fix_dimensions(
    shapes: Shapes, faults: Sequence[Fault], names: Sequence[str], inputs: Tensors, reference: Reference
) -> list[str]:
    """Remove the dimensions at fault from `shapes`, the dynamic ones of each input by name. Return a note for each.

    Raises VerificationError where none of them is there: the exported model has sizes that were not asked for.
    """
    notes = []
    found = [
        _name_at_any(reference, inputs, fault.axes)
        if fault.run is None
        else name_operator(reference.module(), inputs, fault.run.inputs)
        for fault in faults
    ]
    for fault, own in zip(faults, found):
        # Dimensions that are wrong together mostly have one cause.
        operator = own or next(filter(None, found), "")
        for index, dimension in fault.axes:
            name = shapes[index].pop(dimension, None)
            if name is not None:
                notes.append(
                    f"{_begins(names[index], dimension)}{name}) stays {inputs[index].shape[dimension]}:"
                    f" {fault.reason}{operator and f' ({operator})'}"
                )
    if not notes:
        raise VerificationError(f"{faults[0].reason}, in a dimension that was to be static; nothing was written")
    return notes


def name_operators(
    notes: list[str], before: Shapes, shapes: Shapes, names: Sequence[str], inputs: Tensors, reference: Reference
) -> None:
    """Add the operator to the notes on dimensions that an exporter has fixed since `before`."""
    gone = [
        (place, dimension)
        for place, shape in enumerate(before)
        for dimension in shape
        if dimension not in shapes[place]
    ]
    found = _name_at_any(reference, inputs, gone) if gone else ""
    for place, dimension in gone if found else ():
        for index, note in enumerate(notes):
            if note.startswith(_begins(names[place], dimension)):
                notes[index] = f"{note} ({found})"


def refuse_fixed(
    dynamic: bool | Mapping[str, Mapping[int, str] | Sequence[int]],
    shapes: Shapes,
    names: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Raise UnsupportedModelError for a dimension that the caller names in `dynamic` and that is static now."""
    if isinstance(dynamic, bool):
        return
    for name, shape in zip(names, shapes):
        for dimension in dynamic.get(name, ()):
            if dimension not in shape:
                start = _begins(name, dimension)
                reason = next((note for note in notes if note.startswith(start)), f"{start[:-2]}) cannot be dynamic")
                raise UnsupportedModelError(
                    f"dynamic: {reason}; leave dimension {dimension} of {name!r} out, or change that operator of the model;"
                    " nothing was written"
                )


def _begins(name: str, dimension: int) -> str:
    """Return how a note on a dimension begins."""
    return f"input {name!r}: dimension {dimension} ("


def _name_at_any(reference: Reference, inputs: Tensors, axes: Sequence[tuple[int, int]]) -> str:
    """Return the operator at the first of some sizes of these dimensions that shows one."""
    groups = [DimensionGroup(0, inputs[place].shape[index], ((place, index),)) for place, index in axes]
    for factor in _FACTORS:
        others = resized(inputs, {group: factor * group.size for group in groups})
        if found := name_operator(reference.module(), inputs, others):
            return found
    return ""


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
    except Exception:  # what the model's code raises; a name is a help, not a result
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
