"""Functions of a model: calls replaced by their nodes, in whole or where a fold gains by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import onnx
import onnx_ir as ir

from bnexport.errors import UnsafeModelError, UnsupportedModelError
from bnexport.graph.constants import EXPRESSIONS, Constants
from bnexport.graph.nodes import Names, Refused, input_at, is_portable_body, is_standard, is_sync_batch_norm, label
from bnexport.graph.shapes import Shapes, callers_first, expanded_sizes
from bnexport.model_io import limits, walk

# Replacement of a call by a copy of its function's body.


class Expansion:
    """Calls of one model's functions, each replaced by nodes with names of their own."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._names: Names | None = None

    def expand(self, call: ir.Node) -> list[ir.Node]:
        """Replace the call by a copy of the function's body; return the copied nodes."""
        function, graph = self._model.functions[call.op_identifier()], call.graph
        assert graph is not None
        copy = function.clone()
        results = _own_results(copy)
        copy.outputs.clear()
        nodes = list(copy.graph)
        copy.graph.remove(nodes)
        for place, formal in enumerate(copy.inputs):
            actual = call.inputs[place] if place < len(call.inputs) else None
            for use in formal.uses():
                use.node.replace_input_with(use.idx, actual)
        inside = [node for top in nodes for node in (top, *walk.inner_nodes(top))]
        for node in inside:
            _resolve_attributes(node, call, function)
        self._rename(label(call), inside)
        for domain, version in function.opset_imports.items():
            self._model.opset_imports.setdefault(domain, version)
        graph.insert_before(call, nodes)
        for output, value in zip(call.outputs, results, strict=False):
            value.type, value.shape = output.type or value.type, output.shape or value.shape
            output.replace_all_uses_with(value, replace_graph_outputs=True)
            if output.name:  # an output that the call leaves out has none
                value.name, output.name = output.name, None
        graph.remove(call, safe=True)
        return nodes

    def _rename(self, prefix: str, nodes: Iterable[ir.Node]) -> None:
        bodies: dict[ir.Graph, None] = {}
        for node in nodes:
            node.name = self._fresh(f"{prefix}.{node.name or node.op_type}")
            for value in node.outputs:
                if value.name:
                    value.name = self._fresh(f"{prefix}.{value.name}")
            bodies.update(dict.fromkeys(walk.node_bodies(node)))
        for graph in bodies:
            for value in (*graph.inputs, *tuple(graph.initializers.values())):
                value.name = self._fresh(f"{prefix}.{value.name}")

    def _fresh(self, wish: str) -> str:
        if self._names is None:
            self._names = Names(self._model)
        return self._names.fresh(wish)


def _own_results(function: ir.Function) -> list[ir.Value]:
    """Return the outputs, each a node's own: an input, or one value twice, goes through Identity."""
    results: list[ir.Value] = []
    for output in function.outputs:
        value = output
        if value.producer() is None or value in results:
            identity = ir.node("Identity", [value])
            function.graph.append(identity)
            value = identity.outputs[0]
            value.name = "returned"
        results.append(value)
    return results


def _resolve_attributes(node: ir.Node, call: ir.Node, function: ir.Function) -> None:
    """Replace references to the call's attributes by the given value or the function's default; drop the others."""
    for name, attribute in tuple(node.attributes.items()):
        if not attribute.is_ref():
            continue
        source = str(attribute.ref_attr_name)
        given = call.attributes.get(source) or function.attributes.get(source)
        if given is None or given.value is None:
            del node.attributes[name]
        else:
            node.attributes[name] = ir.Attr(name, given.type, given.value)


# Inlining of model-local functions that separate a batch norm from its parameters or its neighbours.
#
# Exporters that make a function of every module pass the weights in as inputs, and inside the function they
# are no constants. Such a call is replaced by a copy of the function's body:
#
#     a call of a function that holds a batch norm, where a parameter of it, or an attribute, comes from the
#     caller, and the caller gives constants;
#     then a call whose result a batch norm reads, if a linear operator with constant parameters makes it,
#     and a call that reads the result of a batch norm, if it is such an operator's input.
#
# The function itself and its other calls stay; a function that nothing calls any more is removed. A body in
# another opset than its caller's is left alone, and so is a call that gives a graph as an attribute.

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
        main = self._model.graph
        pending = [node for graph in (main, *main.subgraphs()) for node in graph]
        while pending:
            node = pending.pop()
            needs = self._norms.get(node.op_identifier())
            if needs and self._given(node, needs):
                new += (body := self._inline(node))
                pending += body
        pending = [node for graph in (main, *main.subgraphs()) for node in graph if _is_norm(node)]
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


# Inlining of every call, for runtimes that do not read model-local functions.
#
# calls become copies of their functions' bodies, until no function is left;
# an If in such a body whose condition is a constant becomes its branch, and every CastLike a Cast, where types are
# known: some runtimes have neither.


def inline_functions(model: ir.Model, keep: Callable[[ir.Function], bool] = lambda _: False) -> dict[str, int]:
    """Inline all calls but those of functions to `keep`, in place; count them by the function's name.

    Raises UnsupportedModelError for a call that cannot be inlined, UnsafeModelError where too many nodes would come.
    """
    chosen = {key for key, function in model.functions.items() if not keep(function)}
    most = limits.current().nodes
    if chosen and expanded_sizes(model)[0] > most:
        raise UnsafeModelError(f"the model would have more than {most} nodes without its functions; --limit nodes=N")
    expansion = Expansion(model)
    counts: dict[str, int] = {}
    new: list[ir.Node] = []
    pending = [node for graph in (model.graph, *model.graph.subgraphs()) for node in graph]
    while pending:
        call = pending.pop()
        if call.op_identifier() in chosen:
            _refuse(call, model)
            name = ":".join(filter(None, call.op_identifier()))
            counts[name] = counts.get(name, 0) + 1
            body = expansion.expand(call)
            new += body
            pending += [inner for node in body for inner in (node, *walk.inner_nodes(node))]
    for key in chosen:
        del model.functions[key]
    _resolve_conditions(model, new)
    if counts:
        _resolve_types(model)
    return counts


def _refuse(call: ir.Node, model: ir.Model) -> None:
    """Raise UnsupportedModelError for a call that cannot be inlined."""
    function = model.functions[call.op_identifier()]
    what = f"the call {label(call)!r} of function {function.name!r} cannot be inlined"
    if len(call.inputs) > len(function.inputs) or len(call.outputs) > len(function.outputs):
        raise UnsupportedModelError(
            f"{what}: got {len(call.inputs)} inputs and {len(call.outputs)} outputs, expected at most"
            f" {len(function.inputs)} and {len(function.outputs)}"
        )
    if any(attribute.type in walk.GRAPH_TYPES for attribute in call.attributes.values()):
        raise UnsupportedModelError(f"{what}: it gives a graph as an attribute")
    for domain, version in function.opset_imports.items():
        own = model.opset_imports.get(domain, version)
        if own != version:
            for node in (node for top in function for node in (top, *walk.inner_nodes(top)) if node.domain == domain):
                if _meaning(node, version) != _meaning(node, own):
                    raise UnsupportedModelError(
                        f"{what}: it is for opset {version} of {domain or 'ONNX'}, the model for {own}, and {node.op_type}"
                        " differs between them; convert one of them first (onnx.version_converter)"
                    )


def _meaning(node: ir.Node, version: int) -> int | None:
    """Return the version of an operator that an opset has; None for an unknown one."""
    try:
        return int(onnx.defs.get_schema(node.op_type, version, node.domain).since_version)
    except onnx.defs.SchemaError:
        return None


def _resolve_conditions(model: ir.Model, nodes: Iterable[ir.Node]) -> None:
    """Replace each If whose condition is constant by the nodes of its branch, whose names are unused elsewhere."""
    constants = Constants(model, Shapes(model))
    for node in nodes:
        graph = node.graph
        if graph is None or not is_standard(node, "If") or len(node.inputs) != 1:
            continue
        try:
            condition = bool(constants.array(node.inputs[0], "condition").reshape(()))
        except (Refused, ValueError):
            continue
        branch = node.attributes["then_branch" if condition else "else_branch"].as_graph()
        results, inner, tensors = list(branch.outputs), list(branch), list(branch.initializers.values())
        branch.outputs.clear()
        branch.remove(inner)
        branch.initializers.clear()
        for tensor in tensors:
            graph.register_initializer(tensor)
        graph.insert_before(node, inner)
        for output, result in zip(node.outputs, results, strict=True):
            value = result
            if value.producer() not in inner:  # an outer value, or an initializer
                identity = ir.node("Identity", [value], name=f"{label(node)}.{output.name}")
                graph.insert_before(node, identity)
                value = identity.outputs[0]
            value.type, value.shape = output.type or value.type, output.shape or value.shape
            output.replace_all_uses_with(value, replace_graph_outputs=True)
            value.name, output.name = output.name, None
        graph.remove(node, safe=True)


def _resolve_types(model: ir.Model) -> None:
    """Replace each CastLike between known types by a Cast, or by nothing where the types are equal."""
    shapes = Shapes(model)
    for node in tuple(walk.nodes(model)):
        if node.graph is None or not is_standard(node, "CastLike") or None in node.inputs:
            continue
        source, like = node.inputs
        assert source is not None and like is not None
        old, dtype = shapes.dtype(source), shapes.dtype(like)
        output = node.outputs[0]
        if dtype is None:
            continue
        if old == dtype and not output.is_graph_output():
            output.replace_all_uses_with(source)
            node.graph.remove(node, safe=True)
            continue
        cast = ir.node("Cast", [source], {"to": dtype.value}, name=node.name)
        node.graph.insert_before(node, cast)
        new = cast.outputs[0]
        new.name, output.name = output.name, None
        new.type, new.shape = ir.TensorType(dtype), output.shape
        output.replace_all_uses_with(new, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
