"""Indices that differ because rounding orders nearly equal values the other way."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import onnx

from bnexport.errors import BnexportError, UnsupportedModelError
from bnexport.runtime.engine import Serialised, open_as_written
from bnexport.verification.comparison import is_same
from bnexport.verification.oracle import cut
from bnexport.verification.verdict import OutputComparison


@dataclasses.dataclass(frozen=True)
class Selection:
    """The indices, along an axis, that both models select from values that agree; a list has one array a set of inputs.

    values: the reference's. comparison: of the values in both models.
    """

    values: list[np.ndarray]
    expected: list[np.ndarray]
    got: list[np.ndarray]
    axis: int
    comparison: OutputComparison

    def has_ties_only(self) -> bool:
        """Whether the values at any two indices that differ are within the bound of the values."""
        return all(map(self._ties, self.values, self.expected, self.got))

    def _ties(self, values: np.ndarray, expected: np.ndarray, got: np.ndarray) -> bool:
        count = values.shape[self.axis]
        if expected.shape != got.shape or (got < 0).any() or (got >= count).any():
            return False
        wide = values.astype(np.float64)
        first, second = (
            np.take_along_axis(wide, each if each.ndim == wide.ndim else np.expand_dims(each, self.axis), self.axis)
            for each in (expected, got)
        )
        bound = self.comparison.atol + self.comparison.rtol * np.abs(first)
        return bool((np.abs(first - second) <= bound).all())


def without_ties(output: OutputComparison, got: list[Any], selection: Selection, tail: Tail) -> OutputComparison:
    """Return an output that failed as passed, where its indices differ by ties.

    got: the candidate's output. tail: the reference from the indices to the output; it leaves no other difference.
    """
    with contextlib.suppress(BnexportError):
        if selection.has_ties_only() and all(
            is_same(tail.run(indices), value) for indices, value in zip(selection.got, got, strict=True)
        ):
            return dataclasses.replace(output, passed=True, reason="", bound="ties")
    return output


class Tail:
    """The nodes of a model between a value and an output that depends on no other input, for ONNX Runtime."""

    def __init__(self, model: Serialised, start: str, output: str) -> None:
        self._proto, self._start, self._output = onnx.ModelProto.FromString(model.data), start, output
        self._weights = model.weights

    def run(self, value: np.ndarray) -> Any:
        """Return the output for this value. Raises UnsupportedModelError where it depends on more."""
        nodes, needed = self._nodes()
        if not nodes:
            return value
        fixed = []
        for tensor in self._proto.graph.initializer:
            if tensor.name in needed:
                known = self._weights.get(tensor.name)
                fixed.append(tensor if known is None else onnx.numpy_helper.from_array(known, tensor.name))
        missing = needed - {tensor.name for tensor in fixed} - {self._start}
        if missing:
            raise UnsupportedModelError(f"{self._output} depends on {sorted(missing)[0]}, too")
        model = cut(self._proto, nodes, {self._start: value}, [self._output], fixed)
        (result,) = open_as_written(Serialised(model.SerializeToString())).run({self._start: value}, [self._output])
        return result

    def _nodes(self) -> tuple[list[Any], set[str]]:
        """Return the nodes, in order, and the names that enter them."""
        needed: set[str] = {self._output}
        nodes: list[Any] = []
        for node in reversed(self._proto.graph.node):
            if needed.intersection(node.output) - {self._start}:
                needed.difference_update(node.output)
                needed.update(name for name in node.input if name)
                nodes.insert(0, node)
        return nodes, needed
