"""Pair the values of two models from their outputs upwards, and cut out the regions that changed.

Two values are equal if the same operator with the same attributes makes them from equal values, or if a region does
and is proved. Each pair only rests on values that are computed before it in the original, so no proof is circular.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir

from bnexport.model_io import walk
from bnexport.verification.local.attributes import same_attribute, same_outputs
from bnexport.verification.local.blocks import same_tensor
from bnexport.verification.local.regions import Region, Side, name_of

# Inputs that hold sizes: what computes them is part of the region, so that they fit the sizes that it is run with.
SIZES = {
    "Reshape": (1,), "Expand": (1,), "Tile": (1,), "Pad": (1, 3), "Slice": (1, 2, 3, 4), "Split": (1,), "Resize": (1, 2, 3),
    "Upsample": (1,), "Squeeze": (1,), "Unsqueeze": (1,), "ReduceMean": (1,), "ReduceMax": (1,), "ReduceSum": (1,),
}  # fmt: skip


class Mismatch(Exception):
    """The models differ outside every region. node: the original's."""

    def __init__(self, reason: str, node: ir.Node | None = None) -> None:
        super().__init__(reason)
        self.node = node


@dataclasses.dataclass
class _Work:
    """Pairs that are still to be looked at."""

    pending: list[tuple[ir.Value, ir.Value]]
    seen: set[tuple[ir.Value, ir.Value]]


class Pairing:
    """All pairs of values that have to be equal. numbers: the region of each node of the original that is in one."""

    def __init__(self, original: Side, folded: Side, numbers: dict[ir.Node, int]) -> None:
        self.original, self.folded, self.numbers = original, folded, numbers
        self.regions: list[Region] = []
        # Nodes of the folded model: the same node of the original, or the region that they are in.
        self._twins: dict[ir.Node, ir.Node] = {}
        self._theirs: dict[ir.Node, int] = {}
        self._given: dict[ir.Value, ir.Value] = {}
        # Values of new nodes that take the name of one of the original.
        self._remade: dict[ir.Value, ir.Value] = {}
        # Random nodes of both, each with the other model's.
        self._drawn: tuple[dict[ir.Node, ir.Node], dict[ir.Node, ir.Node]] = ({}, {})
        self._work = _Work([], set())
        self._same_graphs: set[tuple[ir.Graph, ir.Graph]] = set()
        self._by_name: dict[tuple[str, str], list[ir.Node]] = {}
        self._members: dict[tuple[int, str], list[ir.Node]] = {}
        for node, number in numbers.items():
            self._members.setdefault((number, name_of(node)), []).append(node)
        self._match_names()

    def run(self) -> None:
        """Fills `regions`. Raises Mismatch."""
        first, second = self.original.model, self.folded.model
        mine, theirs = opsets(first), opsets(second)
        for domain, version in mine.items():
            if theirs.get(domain, version) != version:
                raise Mismatch(f"the opset {domain!r} changed from {version} to {theirs[domain]}")
        self._graphs(first.graph, second.graph)
        while self._work.pending:
            self._value(*self._work.pending.pop())
        self._unread()

    def _unread(self) -> None:
        """Check that stored tensors that nothing reads are the original's. Raises Mismatch."""
        mine = self.original.model.graph.initializers
        for name, value in self.folded.model.graph.initializers.items():
            if value.uses() or value.is_graph_output() or value.const_value is None:
                continue
            own = mine.get(name)
            if own is None or own.const_value is None or not same_tensor(own.const_value, value.const_value):
                raise Mismatch(f"the constant {name!r}, which nothing reads, is not the original's")

    def _match_names(self) -> None:
        names: dict[tuple[str, str], list[list[ir.Node]]] = {}
        for side, model in enumerate((self.original, self.folded)):
            for node in model.order:
                assert node.graph is not None
                key = (model.scopes[node.graph], name_of(node))
                names.setdefault(key, [[], []])[side].append(node)
        for key, (mine, theirs) in names.items():
            self._by_name[key] = theirs
            if any(node in self.numbers for node in mine):
                number = next(self.numbers[node] for node in mine if node in self.numbers)
                self._theirs.update((node, number) for node in theirs)
            elif len(mine) == len(theirs):
                self._twins.update(zip(theirs, mine, strict=True))
        self._match_outputs()

    def _match_outputs(self) -> None:
        """Put a new node into the region whose value it makes, as an addition in the place of another one."""
        made = {
            (self.original.scopes[node.graph], value.name): value
            for node in self.numbers
            if node.graph is not None
            for value in node.outputs
            if value.name
        }
        for node in self.folded.order:
            if node in self._twins or node in self._theirs or node.graph is None:
                continue
            for value in node.outputs:
                mine = made.get((self.folded.scopes[node.graph], value.name or ""))
                if mine is not None:
                    self._theirs[node] = self.numbers[mine.producer()]  # type: ignore[index]
                    self._remade[value] = mine

    def _graphs(self, first: ir.Graph, second: ir.Graph) -> None:
        if (first, second) in self._same_graphs:
            return
        self._same_graphs.add((first, second))
        is_main = first is self.original.model.graph
        inputs = [self._asked(first, self.original, is_main), self._asked(second, self.folded, is_main)]
        if len(inputs[0]) != len(inputs[1]) or len(first.outputs) != len(second.outputs):
            raise Mismatch(f"the inputs or outputs of {first.name or 'a body'!r} changed")
        for mine, theirs in zip(*inputs, strict=True):
            if is_main and (mine.name != theirs.name or mine.type != theirs.type or mine.shape != theirs.shape):
                raise Mismatch(f"the input {mine.name!r} changed")
            self._given[theirs] = mine
        for mine, theirs in zip(first.outputs, second.outputs, strict=True):
            if is_main and (mine.name != theirs.name or mine.type != theirs.type):
                raise Mismatch(f"the output {mine.name!r} changed")
            self._push(mine, theirs)

    def _asked(self, graph: ir.Graph, side: Side, is_main: bool) -> list[ir.Value]:
        return [value for value in graph.inputs if not (is_main and side.constants.has(value))]

    def _push(self, mine: ir.Value, theirs: ir.Value) -> None:
        pair = (mine, theirs)
        if pair not in self._work.seen:
            self._work.seen.add(pair)
            self._work.pending.append(pair)

    def _value(self, mine: ir.Value, theirs: ir.Value) -> None:
        constant = self.original.constants.has(mine), self.folded.constants.has(theirs)
        if constant[0] and constant[1]:
            if not self._same_constant(mine, theirs):
                raise Mismatch(
                    f"the constant {mine.name!r} changed and belongs to no fold", next(iter(mine.uses())).node
                )
            return
        node = mine.producer()
        if node is not None and node in self.numbers:
            self._region(mine, theirs, self.numbers[node])
            return
        other = theirs.producer()
        if node is None:
            if self._given.get(theirs) is not mine:
                raise Mismatch(f"{theirs.name!r} is computed in another way than {mine.name!r}, and belongs to no fold")
            return
        if other is None or self._twins.get(other) is not node or mine.index() != theirs.index():
            raise Mismatch(f"{name_of(node)} ({node.op_type}) has no counterpart, and belongs to no fold", node)
        self._node(node, other)

    def _node(self, mine: ir.Node, theirs: ir.Node) -> None:
        """Both compute the same if their inputs are equal."""
        if mine.op_identifier() != theirs.op_identifier():
            raise Mismatch(f"{name_of(mine)}: {mine.op_type} became {theirs.op_type}, and it belongs to no fold", mine)
        difference = self.attributes(mine, theirs)
        if difference:
            raise Mismatch(f"{name_of(mine)}: its attribute {difference!r} changed, and it belongs to no fold", mine)
        if not same_outputs(mine, theirs, self.original.constants.version(mine)):
            raise Mismatch(f"{name_of(mine)}: its number of outputs changed, and it belongs to no fold", mine)
        if self.original.is_random(mine) and not self._one_to_one(mine, theirs):
            raise Mismatch(f"{name_of(mine)} ({mine.op_type}) may be random, and is one node in one model only", mine)
        count = max(len(mine.inputs), len(theirs.inputs))
        for one, two in zip(_padded(mine, count), _padded(theirs, count), strict=True):
            if (one is None) != (two is None):
                raise Mismatch(f"{name_of(mine)}: its inputs changed, and it belongs to no fold", mine)
            if one is not None and two is not None:
                self._push(one, two)
        key = mine.op_identifier()
        one_body, other_body = self.original.model.functions.get(key), self.folded.model.functions.get(key)
        if one_body is not None and other_body is not None:
            self._functions(one_body, other_body)
        elif one_body is not other_body:
            raise Mismatch(f"the function {key[1]!r} is in one model only", mine)

    def _one_to_one(self, mine: ir.Node, theirs: ir.Node) -> bool:
        """Pair two nodes for good. Return whether neither was paired with another one."""
        return self._drawn[0].setdefault(mine, theirs) is theirs and self._drawn[1].setdefault(theirs, mine) is mine

    def _functions(self, mine: ir.Function, theirs: ir.Function) -> None:
        if opsets(mine) != opsets(theirs) or set(mine.attributes) != set(theirs.attributes):
            raise Mismatch(f"the function {mine.name!r} changed")
        for name, attribute in mine.attributes.items():
            if not same_attribute(attribute, theirs.attributes[name]):
                raise Mismatch(f"the function {mine.name!r} changed")
        self._graphs(mine.graph, theirs.graph)

    def attributes(self, mine: ir.Node, theirs: ir.Node, ignored: Collection[str] = ()) -> str:
        """Return the name of the first attribute that differs, or an empty text. Bodies are paired later."""
        if len(mine.attributes) == len(theirs.attributes) == 0:
            return ""
        for name in sorted({*mine.attributes, *theirs.attributes} - {*ignored}):
            one, two = mine.attributes.get(name), theirs.attributes.get(name)
            if one is None or two is None:
                return name
            bodies = list(walk.bodies(one)), list(walk.bodies(two))
            if bodies[0] or bodies[1]:
                if len(bodies[0]) != len(bodies[1]):
                    return name
                for pair in zip(*bodies, strict=True):
                    self._graphs(*pair)
            elif not same_attribute(one, two):
                return name
        return ""

    def _same_constant(self, mine: ir.Value, theirs: ir.Value) -> bool:
        first, second = self.original.constants, self.folded.constants
        leaves = first.leaf(mine), second.leaf(theirs)
        if leaves[0] is not None and leaves[1] is not None:
            return same_tensor(leaves[0], leaves[1])
        if leaves[0] is None and leaves[1] is None and self._same_expression(mine, theirs):
            return True
        one, two = first.array(mine), second.array(theirs)
        if first.dtype(mine) != second.dtype(theirs) or one.shape != two.shape:
            return False
        return self._same_numbers(mine, theirs, one, two)

    def _same_numbers(self, mine: ir.Value, theirs: ir.Value, one: np.ndarray, two: np.ndarray) -> bool:
        """Whether two computed constants are equal; one and two: their values, of one type and shape."""
        return bool(np.array_equal(one, two))

    def _same_expression(self, mine: ir.Value, theirs: ir.Value) -> bool:
        node, other = mine.producer(), theirs.producer()
        if node is None or other is None or node.op_identifier() != other.op_identifier():
            return False
        if mine.index() != theirs.index() or len(node.inputs) != len(other.inputs) or self.attributes(node, other):
            return False
        if not same_outputs(node, other, self.original.constants.version(node)):
            return False
        return all(
            (one is None) == (two is None) and (one is None or two is None or self._same_constant(one, two))
            for one, two in zip(node.inputs, other.inputs, strict=True)
        )

    def _region(self, mine: ir.Value, theirs: ir.Value, number: int) -> None:
        """Collect the cones of two values up to values outside, which have to be equal."""
        nodes, entering = cone(mine, self.original, lambda value: self.numbers.get(value.producer()) == number)  # type: ignore[arg-type]
        others, needed = cone(theirs, self.folded, lambda value: self._is_inside(value.producer(), number))  # type: ignore[arg-type]
        for node in others:
            if node not in self._twins:
                self._theirs.setdefault(node, number)
        pairs: dict[ir.Value, ir.Value | None] = dict.fromkeys(entering)
        for value, readers in needed.items():
            equal = self._equal_to(value, readers, pairs, number)
            if equal is None:
                raise Mismatch(
                    f"{value.name!r} of the folded model has no counterpart above {name_of(mine.producer())}",  # type: ignore[arg-type]
                    mine.producer(),
                )
            pairs[equal] = value
            if self._position(equal) >= self._position(mine) and equal.graph is mine.graph:
                raise Mismatch(f"{name_of(mine.producer())} would depend on itself", mine.producer())  # type: ignore[arg-type]
            self._push(equal, value)
        self.regions.append(Region((mine, theirs), (nodes, others), list(pairs.items()), number))

    def _position(self, value: ir.Value) -> int:
        node = value.producer()
        return -1 if node is None else self.original.order.get(node, -1)

    def _is_inside(self, node: ir.Node, number: int) -> bool:
        """Whether a node of the folded model belongs to the region: by its name, or because it is new."""
        return node not in self._twins and self._theirs.get(node, number) == number

    def _equal_to(
        self,
        value: ir.Value,
        readers: list[tuple[ir.Node, int]],
        entering: dict[ir.Value, ir.Value | None],
        number: int,
    ) -> ir.Value | None:
        """Find the value of the original that has to be equal to an entering value of the folded model."""
        node = value.producer()
        if node is None:
            return self._given.get(value)
        twin = self._twins.get(node)
        if twin is not None:
            return twin.outputs[value.index() or 0]
        if self._remade.get(value) in entering:
            return self._remade[value]
        # It leaves another region. The original's value is the one that the same reader gets, before what is gone.
        for reader, index in readers:
            for mine in self._members.get((number, name_of(reader)), ()):
                found = self._above(mine, index, entering)
                if found is not None:
                    return found
        free = [each for each, other in entering.items() if other is None and each.producer() in self.numbers]
        if len(free) > 1:  # the reader is new: an addition of merged branches
            free = [each for each in free if self.numbers[each.producer()] == self._theirs.get(node)]  # type: ignore[index]
        return free[0] if len(free) == 1 else None

    def _above(self, node: ir.Node, index: int, entering: dict[ir.Value, ir.Value | None]) -> ir.Value | None:
        value = node.inputs[index] if index < len(node.inputs) else None
        while value is not None and value not in entering:
            maker = value.producer()
            if maker is None or maker.graph is None:
                return None
            if self._by_name.get((self.original.scopes[maker.graph], name_of(maker))):
                return None
            data = [operand for _, operand in self.original.data(maker)]
            value = data[0] if len(data) == 1 else None
        return value


def cone(
    value: ir.Value, side: Side, is_inside: Callable[[ir.Value], bool]
) -> tuple[list[ir.Node], dict[ir.Value, list[tuple[ir.Node, int]]]]:
    """Nodes above a value that are inside, in order, and the values that enter, with their readers."""
    found: set[ir.Node] = set()
    entering: dict[ir.Value, list[tuple[ir.Node, int]]] = {}
    pending: list[tuple[ir.Value, tuple[ir.Node, int] | None, bool]] = [(value, None, False)]
    while pending:
        each, reader, is_size = pending.pop()
        node = each.producer()
        if node is None or node.graph is not value.graph or not (is_size or is_inside(each)):
            readers = entering.setdefault(each, [])
            readers += [reader] if reader is not None else []
            continue
        if node in found:
            continue
        if node not in side.order:
            raise Mismatch(f"{name_of(node)} ({node.op_type}) is constant in one model only", node)
        if walk.node_bodies(node):
            raise Mismatch(f"{name_of(node)} ({node.op_type}) holds a body and is part of a fold", node)
        found.add(node)
        computes = is_size and node.op_type != "Shape"
        pending += [
            (operand, (node, index), computes or index in SIZES.get(node.op_type, ()))
            for index, operand in side.data(node)
        ]
    return sorted(found, key=side.order.__getitem__), entering


def opsets(holder: ir.Model | ir.Function) -> dict[str, int]:
    """Return the versions by domain; the standard's has two names. Raises Mismatch."""
    found: dict[str, int] = {}
    for domain, version in holder.opset_imports.items():
        if found.setdefault(domain or "ai.onnx", version) != version:
            raise Mismatch(f"two versions of the domain {domain or 'ai.onnx'!r} are imported")
    return found


def _padded(node: ir.Node, count: int) -> list[ir.Value | None]:
    values = [value if value is not None and value.name else None for value in node.inputs]
    return values + [None] * (count - len(values))
