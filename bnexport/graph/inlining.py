"""Inlining of model-local functions that separate a batch norm from its parameters or its neighbours.

Exporters that make a function of every module pass the weights in as inputs, and inside the function they
are no constants. Such a call is replaced by a copy of the function's body:

    a call of a function that holds a batch norm, where a parameter of it, or an attribute, comes from the
    caller, and the caller gives constants;
    then a call whose result a batch norm reads, if a linear operator with constant parameters makes it,
    and a call that reads the result of a batch norm, if it is such an operator's input.

The function itself and its other calls stay; a function that nothing calls any more is removed. A body in
another opset than its caller's is left alone, and so is a call that gives a graph as an attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from bnexport.graph.calls import callers_first, expanded_sizes
from bnexport.graph.constants import EXPRESSIONS, Constants
from bnexport.graph.expansion import Expansion
from bnexport.graph.nodes import input_at, is_standard
from bnexport.graph.shapes import Shapes
from bnexport.graph.sync_bn_nodes import is_portable_body, is_sync_batch_norm
from bnexport.model_io import walk

# Nodes that may come in; more is no model that an exporter writes.
_NEW_NODES = 50_000
_LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add")


def inline_calls(model: ir.Model) -> set[str]:
    """Inline the calls described above, in place; return the names of the inserted nodes."""
    return _Inliner(model).run() if model.functions else set()


class _Inliner:
    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._functions = {key: function for key, function in model.functions.items() if not is_portable_body(function)}
        self._constants = Constants(model, Shapes(model))
        self._expansion = Expansion(model)
        self._norms = self._find_needs(norms=True)
        self._linear = self._find_needs(norms=False)
        _, self._sizes = expanded_sizes(model)
        self._budget = _NEW_NODES

    def run(self) -> set[str]:
        before = {node.op_identifier() for node in walk.nodes(self._model)} & self._functions.keys()
        new: list[ir.Node] = []
        pending = [node for graph in self._graphs() for node in graph]
        while pending:
            node = pending.pop()
            if self._takes_norm_apart(node):
                new += (body := self._inline(node))
                pending += body
        pending = [node for graph in self._graphs() for node in graph if _is_norm(node)]
        while pending:
            norm = pending.pop()
            for call in tuple(self._neighbours(norm)):
                if call.graph is not None:
                    new += self._inline(call)
                    pending.append(norm)
        while new and (gone := before - {node.op_identifier() for node in walk.nodes(self._model)}):
            for key in gone:
                del self._model.functions[key]
            before -= gone
        return {str(node.name) for node in new if node.graph is not None}

    def _graphs(self) -> Iterator[ir.Graph]:
        yield self._model.graph
        yield from self._model.graph.subgraphs()

    def _takes_norm_apart(self, call: ir.Node) -> bool:
        needs = self._norms.get(call.op_identifier())
        return bool(needs) and self._given(call, needs)

    def _neighbours(self, norm: ir.Node) -> Iterator[ir.Node]:
        """Return calls above and below a batch norm that contain a linear operator."""
        data = input_at(norm, 0)
        above = None if data is None else data.producer()
        if above is not None and self._given(above, self._linear.get(above.op_identifier())):
            made = self._functions[above.op_identifier()].outputs[data.index() or 0].producer()  # type: ignore[union-attr]
            if made is not None and is_standard(made, *_LINEAR):
                yield above
        for use in norm.outputs[0].uses():
            if self._given(use.node, self._linear.get(use.node.op_identifier())):
                formal = self._functions[use.node.op_identifier()].inputs[use.idx]
                if any(is_standard(inner.node, *_LINEAR) for inner in formal.uses()):
                    yield use.node

    def _given(self, call: ir.Node, needs: frozenset[int | str] | None) -> bool:
        """Whether the call can be inlined and passes constants for the inputs that must be constant."""
        function = self._functions.get(call.op_identifier())
        if function is None or needs is None or self._sizes[call.op_identifier()] > self._budget:
            return False
        if len(call.inputs) > len(function.inputs) or len(call.outputs) > len(function.outputs):
            return False
        # What a function returns, one of its nodes makes; ONNX Runtime insists on it.
        if len(set(function.outputs)) < len(function.outputs) or any(
            not value.producer() for value in function.outputs
        ):
            return False
        imports = self._model.opset_imports
        if any(imports.get(domain, version) != version for domain, version in function.opset_imports.items()):
            return False
        if any(attribute.type in walk.GRAPH_TYPES for attribute in call.attributes.values()):
            return False
        places = [place for place in needs if isinstance(place, int) and place < len(call.inputs)]
        return all(call.inputs[place] is None or self._constants.is_constant(call.inputs[place]) for place in places)

    def _find_needs(self, *, norms: bool) -> dict[ir.OperatorIdentifier, frozenset[int | str]]:
        """Find, for each function that contains a batch norm, or else a linear operator, at any depth of calls: the
        inputs (indices) and attributes (names) that the parameters of these nodes depend on.
        """
        found: dict[ir.OperatorIdentifier, frozenset[int | str]] = {}
        for key in reversed(callers_first(self._model)):
            function = self._functions.get(key)
            if function is None:
                continue
            places = {value: place for place, value in enumerate(function.inputs)}
            needs: set[int | str] | None = None
            for node in function.all_nodes():
                inner = found.get(node.op_identifier())
                if inner is not None:
                    parameters = [
                        node.inputs[place] for place in inner if isinstance(place, int) and place < len(node.inputs)
                    ]
                elif _is_norm(node) if norms else is_standard(node, *_LINEAR[:-1]):
                    parameters = list(node.inputs[1:])
                else:
                    continue
                needs = needs or set()
                needs.update(places[value] for value in _sources(parameters) if value in places)
                needs.update(str(attr.ref_attr_name) for attr in node.attributes.values() if attr.is_ref())
            if needs is not None:
                found[key] = frozenset(needs)
        return found

    def _inline(self, call: ir.Node) -> list[ir.Node]:
        nodes = self._expansion.expand(call)
        self._budget -= len(nodes)
        return nodes


def _is_norm(node: ir.Node) -> bool:
    return is_standard(node, "BatchNormalization") or is_sync_batch_norm(node)


def _sources(values: Iterable[ir.Value | None]) -> Iterator[ir.Value]:
    """Return the leaves of constant expressions."""
    pending = [value for value in values if value is not None]
    seen: set[ir.Value] = set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            yield value
        elif is_standard(node, *EXPRESSIONS):
            pending += [operand for operand in node.inputs if operand is not None]
