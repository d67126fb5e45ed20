"""Values in front of the saturating functions that end many networks.

A Sigmoid of -15 is 3e-7 with an absolute error of 6e-8 in any implementation: compared alone, such an
output shows either nothing or noise. What it was made of shows the fold.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from bnexport.graph.nodes import is_standard

_SATURATING = ("Sigmoid", "Softmax", "Tanh")
_REARRANGING = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice")
_DEPTH = 8


@dataclasses.dataclass(frozen=True)
class Probe:
    """The value in front of the function that makes `output`, in both models."""

    output: str
    op_type: str
    reference: ir.Value
    candidate: ir.Value


def find_probes(reference: ir.Model, candidate: ir.Model) -> tuple[Probe, ...]:
    """Probes for the outputs that both models make in the same way."""
    probes = []
    for first, second in zip(reference.graph.outputs, candidate.graph.outputs, strict=True):
        ends = _saturating(first), _saturating(second)
        if ends[0] is None or ends[1] is None or ends[0].op_type != ends[1].op_type:
            continue
        before = ends[0].inputs[0], ends[1].inputs[0]
        if before[0] is None or before[1] is None or before[0].producer() is None or before[1].producer() is None:
            continue
        probes.append(Probe(str(first.name), ends[0].op_type, before[0], before[1]))
    return tuple(probes)


def _saturating(value: ir.Value) -> ir.Node | None:
    """Find the saturating function that makes `value`, behind at most a few rearrangements."""
    current: ir.Value | None = value
    for _ in range(_DEPTH):
        node = None if current is None else current.producer()
        if node is None:
            return None
        if is_standard(node, *_SATURATING):
            return node
        if not is_standard(node, *_REARRANGING):
            return None
        current = node.inputs[0] if node.inputs else None
    return None
