"""Files of other exporters: inputs and outputs that have other names, and are the same by their positions."""

from __future__ import annotations

import itertools

import onnx_ir as ir

from bnexport.model_io import walk
from bnexport.model_io.validate import printable


def match_by_position(reference: ir.Model, candidate: ir.Model) -> tuple[ir.Model, str]:
    """Return the candidate with the reference's names of inputs and outputs, and which were matched, in words.

    The candidate itself, and an empty text, where the names are the same, or where types, shapes or numbers differ.
    """
    pairs = _pairs(reference, candidate)
    if not pairs:
        return candidate, ""
    changed = candidate.clone()
    for one, two in _given(reference, changed):
        two.name = one.name
    return changed, f"matched by position: {', '.join(f'{theirs} as {mine}' for mine, theirs in pairs)}"


def _given(reference: ir.Model, candidate: ir.Model) -> list[tuple[ir.Value, ir.Value]]:
    """Return the inputs that a caller has to give, and the outputs, in pairs."""
    inputs = ([value for value in model.graph.inputs if not value.is_initializer()] for model in (reference, candidate))
    return [*zip(*inputs, strict=False), *zip(reference.graph.outputs, candidate.graph.outputs, strict=False)]


def _pairs(reference: ir.Model, candidate: ir.Model) -> list[tuple[str, str]]:
    """Return the names that differ; none where the values of other names are no match."""
    found = _given(reference, candidate)
    counts = (
        [sum(not value.is_initializer() for value in model.graph.inputs), len(model.graph.outputs)]
        for model in (reference, candidate)
    )
    if len({tuple(each) for each in counts}) != 1 or not all(_fits(one, two) for one, two in found):
        return []
    differing = [(str(one.name), str(two.name)) for one, two in found if one.name != two.name]
    mine, theirs = {str(one.name) for one, _ in found}, {str(two.name) for _, two in found}
    # A name that both have at other places means another order.
    taken = theirs | _inner_names(candidate)
    if any(one in taken or two in mine for one, two in differing) or len(dict(differing)) != len(
        {two for _, two in differing}
    ):
        return []
    return [(printable(one), printable(two)) for one, two in dict(differing).items()]


def _fits(one: ir.Value, two: ir.Value) -> bool:
    if one.dtype != two.dtype or type(one.type) is not type(two.type):
        return False
    if one.shape is None or two.shape is None:
        return True
    sizes = zip(one.shape, two.shape, strict=False)
    return len(one.shape) == len(two.shape) and all(
        first == second or not (isinstance(first, int) and isinstance(second, int)) for first, second in sizes
    )


def _inner_names(model: ir.Model) -> set[str]:
    values = (
        itertools.chain(
            graph.inputs, graph.initializers.values(), (output for node in graph for output in node.outputs)
        )
        for graph in walk.graphs(model)
    )
    return {str(value.name) for each in values for value in each}
