"""Inlining of every call, for runtimes that do not read model-local functions.

calls become copies of their functions' bodies, until no function is left;
an If in such a body whose condition is a constant becomes its branch, and every CastLike a Cast, where types are
known: some runtimes have neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx
import onnx_ir as ir

from bnexport.errors import UnsafeModelError, UnsupportedModelError
from bnexport.graph.calls import expanded_sizes
from bnexport.graph.constants import Constants
from bnexport.graph.expansion import Expansion
from bnexport.graph.nodes import is_standard, label
from bnexport.graph.refusal import Refused
from bnexport.graph.shapes import Shapes
from bnexport.model_io import limits, walk


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
    pending = [node for graph in _main_graphs(model) for node in graph]
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


def _main_graphs(model: ir.Model) -> Iterable[ir.Graph]:
    return (model.graph, *model.graph.subgraphs())


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
