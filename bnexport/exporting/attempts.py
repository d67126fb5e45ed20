"""Repeated tracing of a model, with as many dynamic sizes as its exporter supports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import onnx_ir as ir
import torch

from bnexport.errors import BnexportError, first_line
from bnexport.exporting.dimensions.size_conditions import SizeConditions
from bnexport.exporting.dynamo import Shapes
from bnexport.exporting.substitutes.symbolic_int import symbolic_int
from bnexport.exporting.wrapper import Traced

Trace = tuple[ir.Model, list[str], SizeConditions]
_LONGEST = 160


def trace(
    exporter: Callable[[Traced, tuple[torch.Tensor, ...], list[str], Shapes], Trace],
    wrapper: Traced,
    args: tuple[torch.Tensor, ...],
    names: list[str],
    shapes: Shapes,
) -> Trace:
    """Return the exporter's graph, notes and conditions. Dimensions that the graph does not have are removed from
    `shapes`.

    Sizes of images stay symbolic through int(). Some operators need numbers, as a pooling its window, or the type int
    itself, as torch.arange(dtype=int): after a failure the exporter runs again, with int as it is. What it cannot write
    for other images at all, it writes for the example's; what not for other batches, for the example's batch.
    """
    if not any(dimension for shape in shapes for dimension in shape):
        return exporter(wrapper, args, names, shapes)
    for int_of_sizes in (symbolic_int(wrapper.model), contextlib.nullcontext()):
        tried = [dict(shape) for shape in shapes]
        try:
            with int_of_sizes:
                result = exporter(wrapper, args, names, tried)
            shapes[:] = tried
            return result
        except MemoryError:
            raise
        except Exception as error:  # torch raises many types
            failure = error
    if isinstance(failure, BnexportError):
        raise failure
    for narrower in _narrower(shapes):
        tried = [dict(shape) for shape in narrower]
        try:
            graph, notes, conditions = exporter(wrapper, args, names, tried)
        except Exception:
            continue
        reason = f"the exporter cannot write it for other sizes: {_cause(failure)}"
        for name, arg, shape, kept in zip(names, args, shapes, narrower):
            notes += [
                f"input {name!r}: dimension {dimension} ({size}) stays {arg.shape[dimension]}: {reason}"
                for dimension, size in shape.items()
                if dimension not in kept
            ]
        shapes[:] = tried
        return graph, notes, conditions
    raise failure from None


def _narrower(shapes: Shapes) -> Iterator[Shapes]:
    """Yield fewer dynamic dimensions: the batch alone, then the other sizes, then none."""
    for chosen in (lambda dimension: dimension == 0, lambda dimension: dimension != 0, lambda _: False):
        narrower = [{key: name for key, name in shape.items() if chosen(key)} for shape in shapes]
        if narrower != shapes:
            yield narrower


def _cause(error: BaseException) -> str:
    """Return the first line of the error that the others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)[:_LONGEST]
