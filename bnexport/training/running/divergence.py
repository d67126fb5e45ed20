"""NaN in a step: found before the state takes the new values, and traced to the first node that makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.errors import DivergedError
from bnexport.schema import NEW_SUFFIX
from bnexport.training.building.activations import makers
from bnexport.training.building.description import LOSS, Description, Kind
from bnexport.training.running.state import State

Array = np.ndarray[Any, Any]

ADVICE = "lower the learning rate, clip gradients, or leave the batch out; the state is that of the step before"


def check(loss: float, state: State, description: Description) -> None:
    """Raise DivergedError if the loss, or a value that the state would take, is NaN; its argument lists these outputs.

    Momenta with a NaN make their parameter NaN in the same step; sums of gradients do so later.
    """
    kinds = {Kind.PARAMETER, Kind.BUFFER} | ({Kind.OPTIMIZER} if description.accumulate > 1 else set())
    found = [LOSS] if np.isnan(loss) else []
    for name, value in state.new_values():
        # A sum of squares is NaN only where a number is; isnan takes twice the time.
        if value.dtype.kind == "f" and description.state[name] in kinds and np.isnan(np.vdot(value, value)):
            found.append(name + NEW_SUFFIX)
    if found:
        raise DivergedError(found)


def explain(
    model: ir.Model, failing: Iterable[str], description: Description, run: Callable[[ir.Model], Mapping[str, Array]]
) -> str:
    """Return the error's text: which node first made a NaN on the way to the outputs `failing`.

    model: the step's graph; its outputs become all values on that way. run: returns their values.
    """
    graph = model.graph
    outputs = [value for value in graph.outputs if value.name in set(failing)]
    first, *others = [str(value.name) for value in outputs]
    what = "the loss" if first == LOSS else f"the new value of {first.removesuffix(NEW_SUFFIX)!r}"
    text = f"{what} {f'and {len(others)} other results are' if others else 'is'} NaN"
    behind = makers(outputs)
    values = [value for node in graph if node in behind for value in node.outputs if value.name]
    graph.outputs[:] = values
    results = run(model)
    for value in values:
        array, node = results[str(value.name)], value.producer()
        if array.dtype.kind == "f" and np.isnan(array).any() and node is not None:
            inputs = [_describe(each, results) for each in node.inputs if each is not None]
            parameter = _nearest_parameter(node, description)
            place = f", next to the parameter {parameter!r}" if parameter else ""
            text += f"; first in {value.name!r}, which {node.op_type} makes of {', '.join(inputs)}{place}"
            break
    return f"{text}; {ADVICE}"


def _describe(value: ir.Value, results: Mapping[str, Array]) -> str:
    array = results.get(str(value.name))
    if array is None or array.dtype.kind != "f" or not array.size:
        return repr(value.name)
    return f"{value.name!r} (within {array.min():.3g} and {array.max():.3g})"


def _nearest_parameter(node: ir.Node, description: Description) -> str:
    """Return the parameter that fewest nodes lie before; empty where there is none."""
    seen, pending = {node}, [node]
    for each in pending:
        for value in each.inputs:
            if value is None:
                continue
            if description.state.get(str(value.name)) is Kind.PARAMETER:
                return str(value.name)
            producer = value.producer()
            if producer is not None and producer not in seen:
                seen.add(producer)
                pending.append(producer)
    return ""
