"""Shapes that are certain: those of weights and of the main graph's inputs, and what ONNX infers from them.

A shape that the model declares for another value is a claim. Files keep shapes from before their inputs became dynamic,
and no engine insists on them. So inference runs on a copy without claims, once, when a rule first asks, and what it
leaves unknown stays unknown; two kinds of values need more:

    results of operators that ONNX does not know       the claim counts: nobody else says anything
    states of a Loop, and its results                  what enters the Loop and what its body returns have in common

A function's inputs have what all its calls agree on.
"""

from __future__ import annotations

import graphlib
import logging
from collections.abc import Iterable, Sequence

import onnx
import onnx_ir as ir

from bnexport.graph.nodes import is_standard
from bnexport.graph.surgery import Surgery
from bnexport.model_io import walk
from bnexport.model_io.validate import printable

# Call graph of model-local functions, and the size of a model after inlining.
#
# Functions that call each other twice, level by level, double in size with every level: a file of a few
# kilobytes can stand for more nodes than fit in memory. What looks through calls asks `expanded_sizes` first.


def callers_first(model: ir.Model) -> list[ir.OperatorIdentifier]:
    """Return the functions of a model, callers before callees. model_io refuses recursion."""
    order: graphlib.TopologicalSorter[ir.OperatorIdentifier] = graphlib.TopologicalSorter()
    for key, function in model.functions.items():
        order.add(key)
        for node in function.all_nodes():
            if node.op_identifier() in model.functions:
                order.add(node.op_identifier(), key)
    return list(order.static_order())


def expanded_sizes(model: ir.Model) -> tuple[int, dict[ir.OperatorIdentifier, int]]:
    """Count nodes of the main graph and of each function as if every call were inlined."""
    sizes: dict[ir.OperatorIdentifier, int] = {}
    for key in reversed(callers_first(model)):
        sizes[key] = sum(1 + sizes.get(node.op_identifier(), 0) for node in model.functions[key].all_nodes())
    graphs = (model.graph, *model.graph.subgraphs())
    main = sum(1 + sizes.get(node.op_identifier(), 0) for graph in graphs for node in graph)
    return main, sizes


def calls(model: ir.Model) -> dict[ir.OperatorIdentifier, list[ir.Node]]:
    """Return the nodes that call each function."""
    found: dict[ir.OperatorIdentifier, list[ir.Node]] = {}
    for node in walk.nodes(model):
        if node.op_identifier() in model.functions:
            found.setdefault(node.op_identifier(), []).append(node)
    return found


Shape = tuple[int | str | None, ...]
# Nodes that inference may look at behind the calls of functions.
_EXPANDED = 50_000
# Runs of inference in which the states of Loops have to become certain; in the last one they are unknown.
_RUNS = 6
# Values that a note names.
_NAMED = 3


def sizes_of(shape: ir.ShapeProtocol) -> Shape:
    """Return the sizes of a declared shape: numbers, names, None if unknown."""
    # Paddle writes -1 for a free size, others an empty name; ONNX Runtime takes both for an unknown one.
    return tuple((size if size >= 0 else None) if isinstance(size, int) else size.value or None for size in shape)


def fits(shape: Sequence[int], value: ir.Value) -> bool:
    """Whether an input takes an array of this shape, as it is declared."""
    sizes = None if value.shape is None else sizes_of(value.shape)
    return sizes is None or (
        len(sizes) == len(shape)
        and all(got == expected for got, expected in zip(shape, sizes) if isinstance(expected, int))
    )


def described(value: ir.Value) -> str:
    """Return an input as it is declared, such as `x: float32 (N, 3, ?, ?)`."""
    dtype = "" if value.dtype is None else f" {value.dtype.numpy().name}"
    return f"{value.name}:{dtype}{'' if value.shape is None else ' ' + shown(sizes_of(value.shape))}"


def shown(sizes: Shape) -> str:
    return "(" + ", ".join("?" if size is None else str(size) for size in sizes) + ")"


class Shapes:
    def __init__(self, model: ir.Model, surgery: Surgery | None = None) -> None:
        self._model = model
        self._surgery = surgery or Surgery()
        self._inferred: _Inferred | None = None

    def of(self, value: ir.Value) -> Shape | None:
        """Return the sizes (numbers, names, None if unknown), or None if the rank is unknown."""
        if (given := _given(value, self._model.graph)) is not None:
            return given
        return self._all().shapes.get(value)

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """Return the element type, or None if it is unknown."""
        if value.dtype:  # UNDEFINED is 0
            return value.dtype
        if value.const_value is not None:
            return value.const_value.dtype
        return self._all().types.get(value)

    def same(self, new: ir.Value, old: ir.Value) -> None:
        """Record that the new value `new` has the shape and type of `old`."""
        if self._inferred is not None:
            for known in (self._inferred.shapes, self._inferred.types):
                if old in known:
                    known[new] = known[old]  # type: ignore[assignment]

    def drop_stale(self) -> tuple[str, ...]:
        """Remove declared shapes that inference contradicts, those of the main graph's outputs aside; return a note on them.

        What is declared elsewhere in such a file is reduced to what inference confirms: an engine may have loaded it
        because one wrong shape hid another.
        Nothing is removed unless something has asked for inference.
        """
        known = {} if self._inferred is None else self._inferred.shapes
        gone = [value for value, shape in known.items() if self._is_claim(value) and _contradicts(value.shape, shape)]
        for value in gone:
            value.shape = None
        if not gone:
            return ()
        self.confirm()
        names = ", ".join(printable(repr(value.name)) for value in gone[:_NAMED]) + ", ..." * (len(gone) > _NAMED)
        return (f"declared shapes that contradict the inputs and operators were left out: {len(gone)}, of {names}",)

    def confirm(self) -> None:
        """Reduce declared shapes, those of the main graph's outputs aside, to what inference confirms."""
        for value in [value for node in walk.nodes(self._model) for value in node.outputs]:
            if self._is_claim(value):
                value.shape = _confirmed(value.shape, self.of(value))

    def _is_claim(self, value: ir.Value) -> bool:
        return not (value.is_graph_output() and value.graph is self._model.graph)

    def _all(self) -> _Inferred:
        if self._inferred is None:
            self._inferred = _Inferred(self._model, self._surgery)
        return self._inferred


def _given(value: ir.Value, main: ir.Graph) -> Shape | None:
    """Return the shape of a weight, or of an input of the main graph, on which an engine insists."""
    if value.is_graph_input():
        return None if value.shape is None or value.graph is not main else sizes_of(value.shape)
    if value.const_value is not None and value.is_initializer():
        return sizes_of(value.const_value.shape)
    return None


def _contradicts(claim: ir.Shape | None, known: Shape) -> bool:
    """Whether a claim has another rank, another number for a size, or a number for a size that an input leaves free."""
    if claim is None:
        return False
    if len(claim) != len(known):
        return True
    pairs = zip(sizes_of(claim), known, strict=True)
    # Inference invents the name unk__N for each size that it does not know.
    return any(
        isinstance(one, int)
        and one != two
        and (isinstance(two, int) or (two is not None and not two.startswith("unk__")))
        for one, two in pairs
    )


def _confirmed(claim: ir.Shape | None, known: Shape | None) -> ir.Shape | None:
    """Return a claim without the sizes that inference does not confirm; None if it does not confirm the rank."""
    if claim is None or known is None or len(claim) != len(known):
        return None
    pairs = zip(claim, known, strict=True)
    return ir.Shape([two if isinstance(two, int) else None if isinstance(one, int) else one for one, two in pairs])


class _Inferred:
    """The shapes and types that inference finds for a model's values."""

    def __init__(self, model: ir.Model, surgery: Surgery) -> None:
        self.shapes: dict[ir.Value, Shape] = {}
        self.types: dict[ir.Value, ir.DataType] = {}
        self._main = model.graph
        self._surgery = surgery
        copy = model.clone()
        main, sizes = expanded_sizes(model)
        if main + sum(sizes.values()) > _EXPANDED:
            # ONNX infers each call again; without the bodies it leaves the results of calls unknown.
            copy.functions.clear()
        self._match(model.graphs(), copy.graphs(), copy)
        callers = calls(model)
        for key in callers_first(model):
            function = model.functions[key]
            twin = function.clone()
            for index, formal in enumerate(function.inputs):
                actual = [node.inputs[index] if index < len(node.inputs) else None for node in callers.get(key, ())]
                shape, dtype = self._common(actual)
                if shape is not None:
                    self.shapes[formal] = shape
                    twin.inputs[index].shape = ir.Shape(shape)
                if dtype is not None:
                    self.types[formal] = dtype
                    twin.inputs[index].dtype = dtype
            body = ir.Model(twin.graph, ir_version=model.ir_version, functions=list(copy.functions.values()))
            self._match((function.graph, *function.subgraphs()), (twin.graph, *twin.subgraphs()), body)

    def _common(self, values: list[ir.Value | None]) -> tuple[Shape | None, ir.DataType | None]:
        """Return the value on which all calls of a function agree."""
        known: list[Shape | None] = []
        for value in values:
            shape = None if value is None else _given(value, self._main)
            known.append(self.shapes.get(value) if value is not None and shape is None else shape)
        dtypes = {None if value is None else value.dtype or self.types.get(value) for value in values}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        first = known[0] if known else None
        if first is None or any(shape is None or len(shape) != len(first) for shape in known):
            return None, dtype
        sizes = zip(*(shape for shape in known if shape is not None), strict=True)
        # A name means one size in one graph only: two calls may give it two values.
        alone = len(values) == 1
        return tuple(
            size[0] if len(set(size)) == 1 and (alone or isinstance(size[0], int)) else None for size in sizes
        ), dtype

    def _match(self, originals: Iterable[ir.Graph], copies: Iterable[ir.Graph], copy: ir.Model) -> None:
        """Infer the shapes of `copy` and record them for the originals' values. Dead nodes are ignored."""
        pairs: list[tuple[ir.Node, ir.Node]] = []
        dead: list[ir.Node] = []
        for index, (original, twin_graph) in enumerate(zip(originals, copies, strict=True)):
            for value in twin_graph.inputs if index else ():
                value.shape = None
            for node, twin in zip(original, twin_graph, strict=True):
                if self._surgery.is_dead(node):
                    dead.append(twin)
                else:
                    pairs.append((node, twin))
        for twin in dead:
            assert twin.graph is not None
            twin.graph.remove(twin)
        if not _infer(copy, [twin for _, twin in pairs]):
            return
        for node, twin in pairs:
            values = [*node.outputs, *(each for body in walk.node_bodies(node) for each in body.inputs)]
            twins = [*twin.outputs, *(each for body in walk.node_bodies(twin) for each in body.inputs)]
            for value, other in zip(values, twins, strict=True):
                if other.shape is not None:
                    self.shapes[value] = sizes_of(other.shape)
                if other.dtype:
                    self.types[value] = other.dtype


def _infer(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Infer shapes without claims, again until the states of Loops are certain; False if inference fails."""
    claims = {value: value.shape for node in nodes for value in node.outputs if value.shape is not None}
    # Operators that claims speak for.
    unknown = {node.op_identifier() for node in nodes if not onnx.defs.has(node.op_type, node.domain)}
    unknown -= model.functions.keys()
    states: dict[ir.Value, ir.Shape | None] = {}
    for left in reversed(range(_RUNS)):
        for node in nodes:
            for value in node.outputs:
                value.shape = claims.get(value) if node.op_identifier() in unknown else None
        for value, shape in states.items():
            value.shape = shape
        if not _run(model):
            return False
        # A function that holds an unknown operator leaves its result unknown, and is one.
        missing = {
            node.op_identifier()
            for node in nodes
            if node.op_identifier() in model.functions
            and any(value in claims and value.shape is None for value in node.outputs)
        }
        common = {key: shape for node in nodes for key, shape in _states(node, states).items()}
        if common == states and missing <= unknown:
            return True
        unknown |= missing
        states = common if left > 1 else dict.fromkeys(common)
    return True


def _states(loop: ir.Node, states: dict[ir.Value, ir.Shape | None]) -> dict[ir.Value, ir.Shape | None]:
    """Return what is certain of each state of a Loop, in its body and behind it, where its body has had `states`."""
    if not is_standard(loop, "Loop") or not (bodies := walk.node_bodies(loop)):
        return {}
    found: dict[ir.Value, ir.Shape | None] = {}
    entering, formal, returning = loop.inputs[2:], bodies[0].inputs[2:], bodies[0].outputs[1:]
    for first, state, after, final in zip(entering, formal, returning, loop.outputs, strict=False):
        shape = None if first is None else first.shape
        if state not in states and shape is None:
            continue
        if state in states:
            shape = _common_sizes(_common_sizes(states[state], shape), after.shape)
        found[state] = found[final] = _common_sizes(shape, shape)
    return found


def _common_sizes(one: ir.Shape | None, two: ir.Shape | None) -> ir.Shape | None:
    """Return the numbers on which two shapes agree; None where their ranks differ."""
    if one is None or two is None or len(one) != len(two):
        return None
    return ir.Shape([a if isinstance(a, int) and a == b else None for a, b in zip(one, two, strict=True)])


def _run(model: ir.Model) -> bool:
    """Run ONNX's inference in place; False if it fails. Its log message has no use for the user."""
    from onnx_ir.passes.common import ShapeInferencePass

    logger = logging.getLogger("onnx_ir.passes.common.shape_inference")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    except Exception:
        return False
    finally:
        logger.setLevel(level)
    return True
