"""Probes of values inside a model: ties, parts and inputs that separate them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from bnexport.errors import BnexportError
from bnexport.graph.nodes import Refused, get_int, is_standard
from bnexport.runtime.engine import Serialised, open_as_written
from bnexport.verification.comparison import is_float, is_same
from bnexport.verification.oracle import cut
from bnexport.verification.verdict import OutputComparison, WindowEnd

# Values in front of the saturating and selecting functions that end many networks.
#
# A Sigmoid of -15 is 3e-7 with an absolute error of 6e-8 in any implementation: compared alone, such an
# output shows either nothing or noise. What it was made of shows the fold.
#
# ArgMax, ArgMin and the indices of TopK select among values that rounding may make equal, or order the other way. Where
# the values agree, an index may be that of another value within the bound (`ties`).

_SATURATING = ("Sigmoid", "Softmax", "Tanh")
_SELECTING = ("ArgMax", "ArgMin", "TopK")
_REARRANGING = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice")
_DEPTH = 8


@dataclasses.dataclass(frozen=True)
class Probe:
    """The value in front of the function that makes `output`, in both models.

    selected: the indices, in both models, where the function returns indices along `axis`. masking: whether it is a Softmax
    along `axis`, which makes nothing of numbers far below the largest.
    """

    output: str
    op_type: str
    reference: ir.Value
    candidate: ir.Value
    selected: tuple[ir.Value, ir.Value] | None = None
    axis: int = 0
    masking: bool = False

    @property
    def of_reference(self) -> list[ir.Value]:
        return [self.reference] if self.selected is None else [self.reference, self.selected[0]]

    @property
    def of_candidate(self) -> list[ir.Value]:
        return [self.candidate] if self.selected is None else [self.candidate, self.selected[1]]


def find_probes(reference: ir.Model, candidate: ir.Model) -> tuple[Probe, ...]:
    """Probes for the outputs that both models make in the same way."""
    probes = []
    for first, second in zip(reference.graph.outputs, candidate.graph.outputs, strict=True):
        one, two = _end(first), _end(second)
        if one is None or two is None or one.op_type != two.op_type:
            continue
        value, other = one.inputs[0], two.inputs[0]
        if value is None or other is None or value.producer() is None or other.producer() is None:
            continue
        name = str(first.name)
        if not is_standard(one, *_SELECTING):
            masking = is_standard(one, "Softmax") and _is_same_selection(one, two)
            probes.append(Probe(name, one.op_type, value, other, axis=_axis(one), masking=masking))
        elif _is_same_selection(one, two):
            indices = one.outputs[-1], two.outputs[-1]
            probes.append(Probe(name, one.op_type, value, other, indices, _axis(one)))
    return tuple(probes)


def _is_same_selection(one: ir.Node, two: ir.Node) -> bool:
    """Whether two nodes select in the same way; rounding cannot change which of equal values they return."""
    first, second = ({name: attribute.value for name, attribute in node.attributes.items()} for node in (one, two))
    return first == second


def find_front(value: ir.Value) -> ir.Value | None:
    """Return what is in front of the saturating function that makes a value; None where none does."""
    end = _end(value)
    front = end.inputs[0] if end is not None and is_standard(end, *_SATURATING) else None
    return None if front is None or front.producer() is None else front


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Two values at which parts of both models end that no lemma proves. text, behind: as in `WindowEnd`.

    masking: whether a Softmax along `axis` reads them.
    """

    reference: ir.Value
    candidate: ir.Value
    text: str
    behind: tuple[int, ...]
    axis: int = 0
    masking: bool = False


def find_meetings(reference: ir.Model, candidate: ir.Model, ends: Sequence[WindowEnd]) -> tuple[Meeting, ...]:
    """Find the values at which windows end; none where one of them is in neither main graph."""
    known = [
        {str(value.name): value for node in model.graph for value in node.outputs} for model in (reference, candidate)
    ]
    if not all(end.reference in known[0] and end.candidate in known[1] for end in ends):
        return ()
    found = []
    for end in ends:
        value = known[0][end.reference]
        reader = next((use.node for use in value.uses() if is_standard(use.node, "Softmax")), None)
        axis = 0 if reader is None else _axis(reader)
        found.append(Meeting(value, known[1][end.candidate], end.text, end.behind, axis, reader is not None))
    return tuple(found)


def _axis(node: ir.Node) -> int:
    """Return the axis of the rows. Softmax before opset 13, of all dimensions from its axis on, has rows of these, too."""
    return node.attributes.get_int("axis", -1 if node.op_type in ("TopK", "Softmax") else 0)


def _end(value: ir.Value) -> ir.Node | None:
    """Find the function that makes `value`, behind at most a few rearrangements; a Cast may follow a selection."""
    current: ir.Value | None = value
    cast = False
    for _ in range(_DEPTH):
        node = None if current is None else current.producer()
        if node is None or current is None:
            return None
        if is_standard(node, *_SATURATING):
            return None if cast else node
        if is_standard(node, *_SELECTING):
            return node if current is node.outputs[-1] else None
        cast = cast or is_standard(node, "Cast")
        if not is_standard(node, "Cast", *_REARRANGING):
            return None
        current = node.inputs[0] if node.inputs else None
    return None


# Outputs that a Concat makes, operand by operand.
#
# Boxes in pixels and scores from 0 to 1 may leave in one output, whose bound is relative to its largest number: it would
# hide scores that are wrong. So the numbers of each operand of the reference's Concat, wherever the candidate takes them
# from, have the bound of that operand alone.

# More operands than the heads of a network.
_MOST = 64


@dataclasses.dataclass(frozen=True)
class Parted:
    """An output of the reference that a Concat makes.

    axis: of the Concat. output_axis: the same one in the output. values: the operands, then the values in front of the
    saturating functions that make them, or they themselves. saturating: which operands such a function makes.
    """

    output: str
    axis: int
    output_axis: int
    values: tuple[ir.Value, ...]
    saturating: tuple[bool, ...]


def find_parted(reference: ir.Model) -> list[Parted]:
    """Return the outputs with more than one part."""
    found = [_parted(value) for value in reference.graph.outputs]
    return [parted for parted in found if parted is not None]


def _parted(output: ir.Value) -> Parted | None:
    current: ir.Value | None = output
    moves: list[Sequence[int]] = []
    for _ in range(_DEPTH):
        node = None if current is None else current.producer()
        if node is None:
            return None
        if is_standard(node, "Concat"):
            return _of_concat(node, str(output.name), moves)
        if is_standard(node, "Transpose") and "perm" in node.attributes:
            moves.append(node.attributes["perm"].as_ints())
        elif not is_standard(node, "Identity"):
            return None
        current = node.inputs[0] if node.inputs else None
    return None


def _of_concat(node: ir.Node, output: str, moves: list[Sequence[int]]) -> Parted | None:
    """Return the parts of a Concat's output behind transpositions, the last one first."""
    operands = [value for value in node.inputs if value is not None and value.producer() is not None]
    if len(operands) != len(node.inputs) or not 1 < len(operands) <= _MOST:
        return None
    try:
        axis = place = get_int(node, "axis", 1)
        for perm in reversed(moves):
            place = perm.index(place % len(perm))
    except (Refused, ValueError, ZeroDivisionError):
        return None
    fronts = [find_front(operand) or operand for operand in operands]
    saturating = tuple(front is not operand for front, operand in zip(fronts, operands, strict=True))
    return Parted(output, axis, place, (*operands, *fronts), saturating)


# Indices that differ because rounding orders nearly equal values the other way.


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
        """Return the output for this value. Raises EngineFailure where it depends on more: ONNX Runtime refuses names of nothing."""
        nodes, needed = self._nodes()
        if not nodes:
            return value
        fixed = []
        for tensor in self._proto.graph.initializer:
            if tensor.name in needed:
                known = self._weights.get(tensor.name)
                fixed.append(tensor if known is None else onnx.numpy_helper.from_array(known, tensor.name))
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


# Numbers of one array that need bounds of their own: masked ones, and the operands of a Concat.
#
# Masked ones, in front of a Softmax, are so far below the largest of their row that their power is 0: -1e9 and minus infinity
# mean the same. As the largest numbers of the array they would set its bound.

# exp (-750) is 0 in float64, too.
_MASKED = 750.0


def without_masked(values: Any, axis: int) -> Any:
    """Return the values in front of a Softmax; masked ones become the smallest of their row that is not."""
    if not is_float(values) or not values.size or not -values.ndim <= axis < values.ndim:
        return values
    wide = values.astype(np.float64)
    largest = wide.max(axis, keepdims=True)
    masked = wide < np.where(np.isfinite(largest), largest - _MASKED, -np.inf)
    smallest = wide.min(axis, keepdims=True, initial=np.inf, where=~masked)
    return np.where(masked, smallest, wide).astype(values.dtype)


def split(parted: Mapping[str, Any], operands: Sequence[Any], values: Any) -> list[Any]:
    """Return the values of an output that each operand has in the reference.

    parted: a `Parted` of the request. operands: the reference's values of these, and of what is in front of them.
    """
    sizes = [np.shape(operand)[parted["axis"]] for operand in operands[: len(parted["saturating"])]]
    return list(np.split(values, np.cumsum(sizes)[:-1], parted["output_axis"]))
