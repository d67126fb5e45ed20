"""Sums of linear branches in a graph, and the kernel of a term: its nodes read, composed and added in float64, and their cost.

    AveragePool   1 / positions at each, for each channel; where it pads, the zeros must count, as they do in a Conv
    Pad           zeros around an input; the identity where it has no padding
    Gemm          alpha B' and beta C, a kernel without positions; MatMul with its constant on the right likewise

Convolutions, pools and Pad map the channels of axis 1, matrix products those of the last axis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.branches.windows import Kernel, Window, check_size, joined_size, read_window, read_zeros
from bnexport.folding.context import Context
from bnexport.folding.placing import check_axis
from bnexport.folding.rules.conv import grouped
from bnexport.folding.rules.transparent import passed
from bnexport.folding.sites import SUMS, data_and_constants, per_channel, read_batch_norm, read_elementwise, sole_use
from bnexport.graph.nodes import (
    Refused,
    get_flag,
    get_float,
    get_ints,
    get_string,
    input_at,
    is_standard,
    label,
    only_attributes,
    padded,
    required_input,
)

# Sums of linear branches in a graph: which values are linear in a value that several nodes read, and by which nodes.
#
# A value is a sum of terms and constants. A term is its base itself, or what a linear node (Conv, BatchNormalization,
# a product with a constant, ...) makes of a value that is a sum of terms of one base. Values in between have one reader,
# so that nothing else sees them change; the base of a term is the first value above that has several, or that no linear
# node makes. A Pad of zeros is looked through although several nodes read it: merged branches pad by themselves, and it
# goes with its last reader. Nodes are taken in the order of the graph, each once. No weight is read here.

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
        return point, padded(node)


_CONV_ATTRIBUTES = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_POOL_ATTRIBUTES = ("auto_pad", "ceil_mode", "count_include_pad", "dilations", "kernel_shape", "pads", "strides")


@dataclasses.dataclass(frozen=True)
class Cost:
    """multiplications: for each position of the result. elements: of the parameters that are read."""

    multiplications: int = 0
    elements: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.multiplications + other.multiplications, self.elements + other.elements)

    def allows(self, multiplications: int, elements: int) -> bool:
        return multiplications <= self.multiplications and elements <= self.elements


@dataclasses.dataclass(frozen=True)
class Frame:
    """Properties that all terms of one base share. axis: of the channels in data of `rank`; positions: axes of a kernel."""

    axis: int
    rank: int
    positions: int


@dataclasses.dataclass(frozen=True)
class Evaluated:
    kernel: Kernel
    cost: Cost

    def joined(self, other: Evaluated) -> Evaluated:
        """Add both. Raise Refused if the sum would cost more than they do, or if they do not go together."""
        one, two = self.kernel, other.kernel
        window = one.window.joined(two.window)
        cost = self.cost + other.cost
        if (one.inputs, one.outputs) == (two.inputs, two.outputs):
            size = joined_size(one, two, window)
            check_cost(cost, size, size + one.outputs * bool(one.bias.any() or two.bias.any()))
        return Evaluated(one.plus(two, window), cost)


def check_cost(cost: Cost, multiplications: int, elements: int) -> None:
    if not cost.allows(multiplications, elements):
        raise Refused(
            "cost",
            f"one operator would take {multiplications:,} multiplications for a position and {elements:,} parameters,"
            f" its branches take {cost.multiplications:,} and {cost.elements:,}",
        )


def find_frame(terms: list[Term], context: Context) -> Frame | None:
    """Return the frame of the first operator with a weight, or None. Raise Refused for an unknown rank."""
    for term in terms:
        for node in term.nodes():
            if node.op_type == "Conv":
                rank = len(grouped(node, context.constants.describe(input_at(node, 1), "Conv weight").shape)) - 1
                return Frame(1, rank, rank - 2)
            if node.op_type in CARRIERS:
                data_rank = 2 if node.op_type == "Gemm" else context.known_rank(required_input(node), node)
                if data_rank < 2:
                    raise Refused("rank", f"the rank of what {label(node)} reads is below 2")
                return Frame(data_rank - 1, data_rank, 0)
    return None


def find_channels(base: ir.Value, terms: list[Term], frame: Frame, context: Context) -> int:
    """Return the channels of the base, as its type and everything that reads it say."""
    known: set[int] = set()
    for term in terms:
        for node in _readers(term):
            if node.op_type == "Conv":
                weight = context.constants.describe(input_at(node, 1), "Conv weight")
                view = grouped(node, weight.shape)
                known.add(view[0] * view[2])
            elif node.op_type in CARRIERS:
                weight = context.constants.describe(input_at(node, 1), f"{node.op_type} weight")
                transposed = node.op_type == "Gemm" and get_flag(node, "transB")
                known.update(weight.shape[-1:] if transposed else weight.shape[:1])
            elif node.op_type == "BatchNormalization" and frame.axis == 1:
                known.update(context.constants.describe(input_at(node, 1), "scale").shape[:1])
    # Inference looks at all values at once: only where nothing else tells.
    sizes = known or {size for size in [context.size(base, frame.axis)] if size}
    if len(sizes) != 1:
        text = " and ".join(map(str, sorted(sizes))) or "not known"
        raise Refused("shape", f"the channels of {base.name!r} are {text}")
    return sizes.pop()


def _readers(term: Term) -> Iterator[ir.Node]:
    """Yield the nodes of a term that read its base."""
    if term.inner is None:
        if term.node is not None:
            yield term.node
        return
    for _, inner in term.inner.terms:
        if inner.node is None and term.node is not None:
            yield term.node
        else:
            yield from _readers(inner)


class Evaluator:
    """Kernels of the terms of one base with `channels` channels."""

    def __init__(self, context: Context, frame: Frame, channels: int) -> None:
        self._context = context
        self._frame = frame
        self._channels = channels

    def term(self, sign: float, term: Term) -> Evaluated:
        """Raises Refused."""
        result = self._term(term)
        if sign == 1.0:
            return result
        scale = np.full(result.kernel.outputs, sign)
        return dataclasses.replace(result, kernel=result.kernel.mapped(ChannelAffine.scaling(scale)))

    def constant(self, value: ir.Value, channels: int) -> tuple[np.ndarray, Cost]:
        """Return a constant of a sum as a value for each channel, and its cost."""
        values = self._context.constants.floats(value, "constant of the sum")
        vector = per_channel(values, self._frame.axis, channels, self._frame.rank)
        return vector, Cost(0, values.size)

    def _term(self, term: Term) -> Evaluated:
        node = term.node
        inner = self._base() if term.inner is None else self._sum(term.inner)
        if node is None:
            return inner
        if node.op_type == "Conv":
            return self._after(inner, *self._conv(node))
        if node.op_type in ("Gemm", "MatMul"):
            return self._after(inner, *self._product(node))
        if node.op_type == "AveragePool":
            kernel = self._pool(node, inner.kernel.outputs)
            return self._after(inner, kernel, Cost(kernel.weight.size, 0))
        if node.op_type == "Pad":
            return dataclasses.replace(inner, kernel=inner.kernel.padded(*self._pads(node)))
        return self._mapped(node, inner)

    def _base(self) -> Evaluated:
        return Evaluated(Kernel.identity(self._channels, self._frame.positions), Cost())

    def _sum(self, total: Sum) -> Evaluated:
        (sign, first), *others = total.terms
        result = self.term(sign, first)
        for sign, term in others:
            more = self.term(sign, term)
            window = result.kernel.window.joined(more.kernel.window)
            result = Evaluated(result.kernel.plus(more.kernel, window), result.cost + more.cost)
        for sign, value in total.constants:
            vector, cost = self.constant(value, result.kernel.outputs)
            shifted = result.kernel.mapped(ChannelAffine.shifting(sign * vector))
            result = Evaluated(shifted, result.cost + cost)
        return result

    def _after(self, inner: Evaluated, kernel: Kernel, cost: Cost) -> Evaluated:
        return Evaluated(kernel.after(inner.kernel), inner.cost + cost)

    def _mapped(self, node: ir.Node, inner: Evaluated) -> Evaluated:
        channels = inner.kernel.outputs
        if node.op_type in ("Identity", "Dropout"):
            passed(node, self._context)
            return inner
        if node.op_type == "BatchNormalization":
            check_axis(node, self._frame.axis)
            affine, cost = read_batch_norm(node, self._context), Cost(channels, 4 * channels)
        else:
            affine = read_elementwise(node, self._frame.axis, channels, self._context)
            operands = data_and_constants(node, self._context)
            assert operands is not None
            described = [
                self._context.constants.describe(node.inputs[index], "constant operand") for index in operands.constants
            ]
            cost = Cost(channels, sum(math.prod(each.shape) for each in described))
        if affine.channels != channels:
            raise Refused("shape", f"{label(node)} maps {affine.channels} channels, its input has {channels}")
        return Evaluated(inner.kernel.mapped(affine), inner.cost + cost)

    def _conv(self, node: ir.Node) -> tuple[Kernel, Cost]:
        only_attributes(node, _CONV_ATTRIBUTES)
        check_axis(node, self._frame.axis)
        weight = self._weight(node)
        if weight.ndim != self._frame.rank:
            raise Refused("rank", f"{label(node)} has a weight of {weight.ndim} axes, its data {self._frame.rank}")
        view = weight.reshape(grouped(node, weight.shape))
        bias = self._bias(node, weight.shape[0])
        cost = Cost(weight.size, weight.size + (0 if bias is None else bias.size))
        return Kernel.of(view, bias, read_window(node, weight.shape[2:])), cost

    def _product(self, node: ir.Node) -> tuple[Kernel, Cost]:
        if self._frame.positions:
            raise Refused("axis", f"{label(node)} maps the last axis, a Conv axis 1")
        weight = self._weight(node)
        if weight.ndim != 2:
            raise Refused("shape", f"the weight of {label(node)} has shape {weight.shape}, expected a matrix")
        if node.op_type == "MatMul":
            only_attributes(node, ())
            return Kernel.of(weight.T[np.newaxis], None, Window.point(0)), Cost(weight.size, weight.size)
        only_attributes(node, ("alpha", "beta", "transA", "transB"))
        if get_flag(node, "transA"):
            raise Refused("axis", f"{label(node)} transposes its data")
        rows = weight if get_flag(node, "transB") else weight.T
        constant = self._bias(node, rows.shape[0])
        bias = None if constant is None else constant * get_float(node, "beta", 1.0)
        cost = Cost(weight.size, weight.size + (0 if constant is None else constant.size))
        return Kernel.of(rows[np.newaxis] * get_float(node, "alpha", 1.0), bias, Window.point(0)), cost

    def _pool(self, node: ir.Node, channels: int) -> Kernel:
        only_attributes(node, _POOL_ATTRIBUTES)
        check_axis(node, self._frame.axis)
        sizes = get_ints(node, "kernel_shape") or ()
        if not sizes or len(sizes) != self._frame.positions:
            raise Refused("rank", f"{label(node)} has a window of {len(sizes)} axes, its data {self._frame.rank} axes")
        if any(step != 1 for step in get_ints(node, "dilations") or ()) or get_flag(node, "ceil_mode"):
            raise Refused("padding", f"{label(node)} has dilations or rounds its size up")
        window = read_window(node, sizes)
        counts_padding = self._context.opset >= 7 and get_flag(node, "count_include_pad")
        automatic = get_string(node, "auto_pad", "NOTSET") not in ("NOTSET", "", "VALID")
        if window.pads and (automatic or not counts_padding):
            raise Refused("padding", f"{label(node)} divides by fewer positions at the borders")
        check_size(channels * math.prod(sizes), 0)
        return Kernel.of(np.full((channels, 1, 1, *sizes), 1.0 / math.prod(sizes)), None, window)

    def _pads(self, node: ir.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        check_axis(node, self._frame.axis)
        return read_zeros(node, self._frame.rank, self._context)

    def _weight(self, node: ir.Node) -> np.ndarray:
        what = f"{node.op_type} weight"
        producer = required_input(node, 1).producer()
        if producer is not None and is_standard(producer, "DequantizeLinear"):
            raise Refused("quantized", f"the weight of {label(node)} is quantized, and a sum would not be")
        values = self._finite(node, 1, what)
        if not values.size:
            raise Refused("shape", f"the weight of {label(node)} is empty")
        return values

    def _finite(self, node: ir.Node, index: int, what: str) -> np.ndarray:
        """Return a parameter. Raise Refused where the branches that it would join are better off without it."""
        values = self._context.current(node, index, what)
        if not np.isfinite(values).all():
            raise Refused("not-finite", f"the {what} of {label(node)} holds NaN or infinite values")
        return values

    def _bias(self, node: ir.Node, outputs: int) -> np.ndarray | None:
        """Of a Conv, one value for each output; of a Gemm, what broadcasts to that."""
        if input_at(node, 2) is None and (node, 2) not in self._context.edits:
            return None
        bias = self._finite(node, 2, f"{node.op_type} bias")
        if (
            node.op_type == "Gemm"
            and bias.size in (1, outputs)
            and bias.shape in ((), (1,), (1, 1), (outputs,), (1, outputs))
        ):
            return np.broadcast_to(bias.reshape(-1), (outputs,))
        if bias.shape != (outputs,):
            raise Refused("shape", f"the bias of {label(node)} has shape {bias.shape}, expected ({outputs},)")
        return bias
