"""Values in front of the saturating and selecting functions that end many networks.

A Sigmoid of -15 is 3e-7 with an absolute error of 6e-8 in any implementation: compared alone, such an
output shows either nothing or noise. What it was made of shows the fold.

ArgMax, ArgMin and the indices of TopK select among values that rounding may make equal, or order the other way. Where
the values agree, an index may be that of another value within the bound (`ties`).
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from bnexport.graph.nodes import is_standard

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
