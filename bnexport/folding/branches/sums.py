"""Sums of linear branches in a graph: which values are linear in a value that several nodes read, and by which nodes.

A value is a sum of terms and constants. A term is its base itself, or what a linear node (Conv, BatchNormalization,
a product with a constant, ...) makes of a value that is a sum of terms of one base. Values in between have one reader,
so that nothing else sees them change; the base of a term is the first value above that has several, or that no linear
node makes. A Pad of zeros is looked through although several nodes read it: merged branches pad by themselves, and it
goes with its last reader. Nodes are taken in the order of the graph, each once. No weight is read here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir

from bnexport.folding.branches.windows import read_zeros
from bnexport.folding.context import Context
from bnexport.folding.reading import SUMS, data_and_constants
from bnexport.folding.sites import sole_use
from bnexport.graph.nodes import Refused, get_ints, get_string, input_at

# Operators that multiply the data by a constant weight; one of them carries a merged weight.
CARRIERS = ("Conv", "Gemm", "MatMul")
_PER_CHANNEL = ("BatchNormalization", "Mul", "Div", "Neg", "Identity", "Dropout")
LINEAR = frozenset((*CARRIERS, *_PER_CHANNEL, *SUMS, "AveragePool", "Pad"))
# Bounds for what no network has; a longer sum or chain is taken in pieces.
_TERMS = 256
_DEPTH = 64


@dataclasses.dataclass(eq=False)
class Term:
    """What `node` makes of `inner`, or of `base` itself; without a node, the base. is_point: of one position each."""

    base: ir.Value
    node: ir.Node | None = None
    inner: Sum | None = None
    is_point: bool = True
    leaves: int = 1
    depth: int = 0

    @property
    def value(self) -> ir.Value:
        return self.base if self.node is None else self.node.outputs[0]

    def nodes(self) -> Iterator[ir.Node]:
        """Yield all nodes between the base and the value, in no order."""
        if self.inner is not None:
            yield from self.inner.all_nodes()
        if self.node is not None:
            yield self.node


@dataclasses.dataclass(eq=False)
class Sum:
    """value = sum of sign * term + sum of sign * constant. nodes: those that add."""

    value: ir.Value
    terms: list[tuple[float, Term]]
    constants: list[tuple[float, ir.Value]] = dataclasses.field(default_factory=list)
    nodes: list[ir.Node] = dataclasses.field(default_factory=list)

    @property
    def leaves(self) -> int:
        return sum(term.leaves for _, term in self.terms)

    @property
    def depth(self) -> int:
        return max(term.depth for _, term in self.terms)

    @property
    def is_point(self) -> bool:
        return all(term.is_point for _, term in self.terms)

    @property
    def base(self) -> ir.Value | None:
        """The base that all terms share; None if they have several."""
        base = self.terms[0][1].base
        return base if all(term.base is base for _, term in self.terms) else None

    def all_nodes(self) -> Iterator[ir.Node]:
        for _, term in self.terms:
            yield from term.nodes()
        yield from self.nodes


@dataclasses.dataclass(frozen=True)
class Sums:
    """The outermost sums of a graph, top to bottom.

    unfit: values that a node makes of a base in a way that cannot be merged, and why.
    """

    roots: list[Sum]
    unfit: dict[ir.Value, tuple[ir.Value, Refused]]


def read_sums(graph: Iterable[ir.Node], context: Context, left_alone: Callable[[ir.Node], bool]) -> Sums:
    """Read the sums of `graph`; a node that is `left_alone` is no part of any."""
    nodes = [node for node in graph if node.op_type in LINEAR and node.domain == ""]
    if not any(node.op_type in SUMS for node in nodes):
        return Sums([], {})
    reader = _Reader(context)
    for node in nodes:
        if not context.surgery.is_dead(node) and not left_alone(node):
            reader.read(node)
    roots = [total for total in reader.sums.values() if total.leaves > 1]
    return Sums(roots, reader.unfit)


class _Reader:
    """sums: by the value that each makes, those that nothing has taken up yet."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.sums: dict[ir.Value, Sum] = {}
        self.unfit: dict[ir.Value, tuple[ir.Value, Refused]] = {}
        self._shared_pads: dict[ir.Value, Sum] = {}

    def read(self, node: ir.Node) -> None:
        if not node.outputs or any(output.uses() for output in node.outputs[1:]):
            return
        output = node.outputs[0]
        if node.op_type == "Pad":
            total = self._padded(node)
        elif node.op_type in SUMS:
            total = self._sum(node)
        elif node.op_type in ("Mul", "Div"):
            total = self._product(node)
        else:
            data = input_at(node, 0)
            total = None if data is None else self._applied(node, data)
        if total is not None:
            self.sums[output] = total

    def _sum(self, node: ir.Node) -> Sum | None:
        # Attributes of opsets before 7 choose how one operand is broadcast.
        if node.attributes or not node.inputs:
            return None
        operands = [input_at(node, index) for index in range(len(node.inputs))]
        total = Sum(node.outputs[0], [], [], [node])
        for index, value in enumerate(operands):
            if value is None:
                return None
            sign = -1.0 if node.op_type == "Sub" and index == 1 else 1.0
            if self._context.constants.is_constant(value):
                total.constants.append((sign, value))
                continue
            part = self.sums.get(value) if sole_use(value, node.graph) is node else None
            if part is None or len(part.terms) + len(total.terms) > _TERMS:
                total.terms.append((sign, Term(value)))
                continue
            del self.sums[value]
            total.terms += [(sign * own, term) for own, term in part.terms]
            total.constants += [(sign * own, constant) for own, constant in part.constants]
            total.nodes[:0] = part.nodes
        return total if total.terms else None

    def _product(self, node: ir.Node) -> Sum | None:
        operands = data_and_constants(node, self._context)
        if operands is None or (node.op_type == "Div" and operands.data == 1):
            return None
        data = node.inputs[operands.data]
        return None if data is None else self._applied(node, data)

    def _padded(self, node: ir.Node) -> Sum | None:
        data = input_at(node, 0)
        if data is None:
            return None
        try:
            read_zeros(node, self._context.rank(data) or 0, self._context)
        except Refused as reason:
            self.unfit[node.outputs[0]] = (data, reason)
            return None
        if sole_use(node.outputs[0], node.graph) is None:
            # The producer of its data stays anyway, for its other readers.
            self._shared_pads[node.outputs[0]] = Sum(node.outputs[0], [(1.0, Term(data, node))])
            return None
        return self._applied(node, data)

    def _applied(self, node: ir.Node, data: ir.Value) -> Sum | None:
        inner = self.sums.get(data) if sole_use(data, node.graph) is node else self._shared_pads.get(data)
        try:
            is_point, pads = self._window(node)
        except Refused as reason:
            base = data if inner is None else inner.base
            if base is not None:
                self.unfit[node.outputs[0]] = (base, reason)
            return None
        composes = inner is not None and (inner.is_point or (is_point and not pads)) and inner.depth < _DEPTH
        if inner is not None and inner.base is not None and composes:
            self.sums.pop(data, None)
            term = Term(inner.base, node, inner, is_point and inner.is_point, inner.leaves, inner.depth + 1)
            return Sum(node.outputs[0], [(1.0, term)])
        return Sum(node.outputs[0], [(1.0, Term(data, node, is_point=is_point))])

    def _window(self, node: ir.Node) -> tuple[bool, bool]:
        """Whether a node reads one position for each of its results, without a stride; whether it pads."""
        if node.op_type == "Pad":
            return True, True
        if node.op_type in ("Gemm", "MatMul"):
            self._context.constants.check(input_at(node, 1), f"{node.op_type} weight")
            return True, False
        if node.op_type == "Conv":
            sizes: tuple[int, ...] = self._context.constants.describe(input_at(node, 1), "Conv weight").shape[2:]
        elif node.op_type == "AveragePool":
            sizes = get_ints(node, "kernel_shape") or ()
        else:
            return True, False
        point = all(size == 1 for size in (*sizes, *(get_ints(node, "strides") or ())))
        pads = any(get_ints(node, "pads") or ()) or get_string(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID")
        return point, pads
