"""Outputs that a Concat makes, operand by operand.

Boxes in pixels and scores from 0 to 1 may leave in one output, whose bound is relative to its largest number: it would
hide scores that are wrong. So the numbers of each operand of the reference's Concat, wherever the candidate takes them
from, have the bound of that operand alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from bnexport.graph.nodes import get_int, is_standard
from bnexport.graph.refusal import Refused
from bnexport.verification.probing.probes import find_front

_DEPTH = 8
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
