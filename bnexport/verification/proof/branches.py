"""Sums of linear branches: one operator of the changed model in the place of several of the original.

    y = sum over b of k_b z_b, where each base z_b is a chain of linear operators on one value x, the root

is one kernel on x, written out; the other model's operator on x is compared with it weight by weight. Operators that pad with
zeros: Conv, Gemm, MatMul, AveragePool that counts its zeros, Pad, and the maps between them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from bnexport.graph.nodes import get_flag, get_ints, get_string
from bnexport.verification.proof.lemmas import LINEAR, convolution
from bnexport.verification.proof.movements import fills_with_zeros, known_sizes
from bnexport.verification.proof.relations import (
    NOISE,
    ONE,
    ZERO,
    Bases,
    Form,
    Numbers,
    Reading,
    Unrelated,
    Violation,
    agreement,
    narrowed,
    read_off,
    slack,
)
from bnexport.verification.proof.weights import Fit, Linear

# Operators between a root and a sum, and sums of the same operators.
_DEPTH, _ALIKE = 8, 4


CARRIERS = ("Conv", "Gemm", "MatMul", "AveragePool")
_KINDS = ("Conv", "Gemm", "MatMul", "AveragePool", "Pad")


@dataclasses.dataclass(frozen=True)
class WrittenKernel:
    """A linear operator that pads with zeros, written out: y(p) = sum over c, j of W[c, j] x[c](stride p + j - begin) + b.

    weight: (groups, outputs, inputs, *positions), each of the last two in a group; bias: for all outputs. A dilated kernel
    has zeros between its positions; a matrix product has no positions.

    Composed, the outer kernel reads what the inner one makes: positions stride1 j2 + j1, begins stride1 begin2 + begin1. Where
    the outer one pads, its zeros are those of the inner one's result only if that has one position and no bias. Added, the
    positions are united. Results are of one size for every input if the strides and begin + end - positions agree.
    """

    weight: Numbers
    bias: Numbers
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def groups(self) -> int:
        return self.weight.values.shape[0]

    @property
    def window(self) -> tuple[int, ...]:
        return self.weight.values.shape[3:]

    @classmethod
    def identity(cls, channels: int, rank: int) -> WrittenKernel:
        point = (0,) * rank
        return cls(Numbers(np.ones((channels, 1, 1, *(1,) * rank)), np.zeros(())), ZERO, point, point, (1,) * rank)

    def mapped(self, scale: Numbers) -> WrittenKernel:
        """Multiply by a factor for each output."""
        weight = self.weight * scale.apply(lambda array: self._on_rows(array.reshape(-1)))
        bias = self.bias * scale.apply(lambda array: array.reshape(-1))
        return dataclasses.replace(self, weight=weight, bias=bias)

    def _on_rows(self, array: np.ndarray) -> np.ndarray:
        groups, rows = self.weight.values.shape[:2]
        return np.broadcast_to(array, groups * rows).reshape(groups, rows, 1, *[1] * len(self.window))

    def grouped(self, groups: int) -> WrittenKernel:
        """Write the kernel in fewer groups, a divisor of their number, block-diagonally."""
        own, rows, columns = self.weight.values.shape[:3]
        count = own // groups
        if count == 1:
            return self
        _require_small(self.weight.values.size, count)

        def spread(array: np.ndarray) -> np.ndarray:
            wide = np.zeros((groups, count, rows, count, columns, *self.window))
            blocks = np.broadcast_to(array, self.weight.values.shape).reshape(
                groups, count, rows, columns, *self.window
            )
            for each in range(count):
                wide[:, each, :, each] = blocks[:, each]
            return wide.reshape(groups, count * rows, count * columns, *self.window)

        weight = Numbers(spread(self.weight.values), spread(self.weight.error))
        return dataclasses.replace(self, weight=weight)

    def plus(self, other: WrittenKernel) -> WrittenKernel:
        one, two = self.aligned(other)
        return dataclasses.replace(one, weight=one.weight + two.weight, bias=one.bias + two.bias)

    def aligned(self, other: WrittenKernel) -> tuple[WrittenKernel, WrittenKernel]:
        """Return both with the same groups and positions. Raises Unrelated where their results may differ in size."""
        groups = math.gcd(self.groups, other.groups)
        pair = [each.grouped(groups) for each in (self, other)]
        growth = [
            tuple(b + e - k for b, e, k in zip(each.begins, each.ends, each.window, strict=True)) for each in pair
        ]
        if (
            self.strides != other.strides
            or growth[0] != growth[1]
            or pair[0].weight.shape[:3] != pair[1].weight.shape[:3]
        ):
            raise Unrelated("its branches make results of different sizes")
        begins = tuple(map(max, self.begins, other.begins))
        lasts = [tuple(k - b for b, k in zip(each.begins, each.window, strict=True)) for each in pair]
        sizes = [begin + max(last) for begin, last in zip(begins, zip(*lasts, strict=True), strict=True)]
        _require_small(*pair[0].weight.values.shape[:3], *sizes)
        return pair[0]._onto(begins, sizes), pair[1]._onto(begins, sizes)

    def _onto(self, begins: tuple[int, ...], sizes: Sequence[int]) -> WrittenKernel:
        before = [new - old for new, old in zip(begins, self.begins, strict=True)]
        behind = [size - own - first for size, own, first in zip(sizes, self.window, before, strict=True)]
        pads = [(0, 0)] * 3 + list(zip(before, behind, strict=True))
        weight = self.weight
        if any(map(any, pads)):
            error = np.broadcast_to(weight.error, weight.values.shape)
            weight = Numbers(np.pad(weight.values, pads), np.pad(error, pads))
        ends = tuple(end + more for end, more in zip(self.ends, behind, strict=True))
        return dataclasses.replace(self, weight=weight, begins=begins, ends=ends)

    def after(self, inner: WrittenKernel) -> WrittenKernel:
        """Return this kernel behind another one. Raises Unrelated."""
        pads = any(self.begins) or any(self.ends)
        if pads and (any(size != 1 for size in inner.window) or not inner.bias.is_zero):
            raise Unrelated("zeros are put between two of its operators")
        groups = math.gcd(self.groups, inner.groups)
        outer, first = self.grouped(groups), inner.grouped(groups)
        rows, columns = outer.weight.values.shape[1], first.weight.values.shape[2]
        if outer.weight.values.shape[2] != first.weight.values.shape[1]:
            raise Unrelated("its branches have other channels")
        window = [s * (k - 1) + own for s, k, own in zip(inner.strides, outer.window, first.window, strict=True)]
        _require_small(groups, rows, columns, *window)
        total = [np.zeros((groups, rows, columns, *window)) for _ in range(2)]
        sizes = [np.abs(outer.weight.values), np.broadcast_to(outer.weight.error, outer.weight.values.shape)]
        inner_error = np.broadcast_to(first.weight.error, first.weight.values.shape)

        def product(one: np.ndarray, two: np.ndarray) -> np.ndarray:
            return (one @ two.reshape(groups, two.shape[1], -1)).reshape(groups, rows, *two.shape[2:])

        for place in np.ndindex(*outer.window):
            at = (slice(None), slice(None), slice(None), *place)
            cut = tuple(slice(s * j, s * j + own) for s, j, own in zip(inner.strides, place, first.window, strict=True))
            where = (slice(None), slice(None), slice(None), *cut)
            total[0][where] += product(outer.weight.values[at], first.weight.values)
            magnitude = np.abs(first.weight.values)
            total[1][where] += product(sizes[0][at], inner_error + NOISE * magnitude)
            total[1][where] += product(sizes[1][at], magnitude + inner_error)
        bias = outer.bias + outer._applied(inner.bias)
        begins, ends = (
            tuple(s * own + each for s, own, each in zip(inner.strides, mine, theirs, strict=True))
            for mine, theirs in ((self.begins, inner.begins), (self.ends, inner.ends))
        )
        strides = tuple(a * b for a, b in zip(self.strides, inner.strides, strict=True))
        return WrittenKernel(Numbers(*total), bias, begins, ends, strides)

    def _applied(self, bias: Numbers) -> Numbers:
        """Return what the kernel makes of a constant for each input."""
        if bias is ZERO:
            return ZERO
        groups, _, columns = self.weight.values.shape[:3]
        axes = (2, *range(3, self.weight.values.ndim))
        wide = bias.apply(
            lambda array: np.broadcast_to(array, groups * columns).reshape(groups, 1, columns, *[1] * len(self.window))
        )
        terms = self.weight * wide
        error = np.broadcast_to(terms.error + NOISE * np.abs(terms.values), terms.values.shape)
        return Numbers(terms.values.sum(axes).reshape(-1), error.sum(axes).reshape(-1))


# Elements of a kernel that is written out.
_WRITTEN = 1 << 24


def _require_small(*sizes: int) -> None:
    """Raise Unrelated for a kernel of more elements; its sizes are what a file claims."""
    if math.prod(sizes) > _WRITTEN:
        raise Unrelated("its branches are too large to be added")


def written(
    linear: Linear,
    window: tuple[Sequence[int], Sequence[int], Sequence[int]],
    shape: Sequence[int] = (),
    dilations: Sequence[int] = (),
) -> WrittenKernel:
    """Write out the weight of an operator. window: begins, ends, strides. shape: of its positions. Raises Unrelated."""
    full = [d * (k - 1) + 1 for d, k in zip(dilations, shape, strict=True)]
    _require_small(math.prod(linear.view) // math.prod(shape), *full)
    stored = linear.stored
    values = stored.tensor.numpy().astype(np.float64).reshape(linear.view) * linear.factor
    error = stored.share * np.abs(values) + stored.tiny
    if stored.error is not None:
        error = error + abs(linear.factor) * stored.error.reshape(linear.view)
    order = (*linear.out, *linear.inner)
    values, error = (np.transpose(each, order) for each in (values, np.broadcast_to(error, values.shape)))
    groups = values.shape[0] if len(linear.out) == 2 else 1
    rows = math.prod(linear.outputs) // groups
    wide = [
        np.zeros((groups, rows, math.prod(values.shape) // (groups * rows * math.prod(shape)), *full)) for _ in range(2)
    ]
    cut = (slice(None),) * 3 + tuple(slice(None, None, d) for d in dilations)
    for target, array in zip(wide, (values, error), strict=True):
        target[cut] = array.reshape(groups, rows, -1, *shape)
    bias = linear.bias.apply(lambda array: array.reshape(-1))
    return WrittenKernel(Numbers(*wide), bias, *map(tuple, window))


def compare_kernels(mine: WrittenKernel, theirs: WrittenKernel) -> Fit:
    """Relate two kernels: theirs = scale mine, for each output. Raises Violation or Unrelated."""
    one, two = mine.aligned(theirs)
    rows = np.arange(one.groups * one.weight.values.shape[1])
    parts = [
        np.broadcast_to(each, one.weight.values.shape).reshape(len(rows), -1)
        for each in (one.weight.values, one.weight.error, two.weight.values, two.weight.error)
    ]
    at = np.abs(parts[0]).argmax(axis=1)
    size = np.abs(parts[0])[rows, at]
    first: Violation | None = None
    for is_told in (True, False):
        scale = ONE if is_told else read_off(*(each[rows, at] for each in parts))
        wide = scale.apply(lambda array: array[:, None])
        sizes = (size * np.abs(scale.values))[:, None]
        try:
            found = agreement(np.abs(parts[2] - wide.values * parts[0]), slack(wide, *parts), sizes, "weight")
        except Violation as error:
            first = first or error
            continue
        return Fit(scale, two.bias - scale * one.bias, size, found)
    raise first or Unrelated("their weights differ")


def kernel(node: Reading, channels: int) -> WrittenKernel:
    """Write out an operator that pads with zeros and is linear in its data, for a sum of branches. channels: of its data."""
    if node.kind in ("Gemm", "MatMul"):
        linear = LINEAR[node.kind](node).linear
        is_other = node.kind == "Gemm" and (get_flag(node.node, "transA") or node.rank(0) is None)
        if len(linear.view) != 2 or is_other:
            raise Unrelated("its data are turned, or there are several matrices")
        return written(linear, ((), (), ()))
    if node.kind not in ("Conv", "AveragePool", "Pad"):
        raise Unrelated(f"{node.kind} is no linear operator of a sum")
    rank = node.known_rank()
    if rank < 3:
        raise Unrelated("its data have no positions")
    ones = (1,) * (rank - 2)
    if node.kind == "Pad":
        pads = node.ints(1, "pads")
        if pads is None or node.has(3) or not fills_with_zeros(node) or min(pads) < 0:
            raise Unrelated("it does not put zeros around each channel")
        if any(pads[axis] for axis in (0, 1, rank, rank + 1)):
            raise Unrelated("it does not put zeros around each channel")
        plain = WrittenKernel.identity(channels, rank - 2)
        return dataclasses.replace(plain, begins=pads[2:rank], ends=pads[rank + 2 :])
    strides, dilations = (get_ints(node.node, name) or ones for name in ("strides", "dilations"))
    if get_string(node.node, "auto_pad", "NOTSET") not in ("NOTSET", "", "VALID"):
        raise Unrelated("its pads depend on sizes")
    pads = get_ints(node.node, "pads") or (0,) * (2 * rank - 4)
    begins, ends = pads[: rank - 2], pads[rank - 2 :]
    if node.kind == "Conv":
        linear = convolution(node).linear
        shape = node.stored(1).shape[2:]
        return written(linear, (begins, ends, strides), shape, dilations)
    shape = get_ints(node.node, "kernel_shape") or ()
    counts = node.version >= 7 and get_flag(node.node, "count_include_pad")
    if (any(pads) and not counts) or get_flag(node.node, "ceil_mode") or any(step != 1 for step in dilations):
        raise Unrelated("it divides by fewer elements at the borders")
    _require_small(channels, *shape)
    mean = np.full((channels, 1, 1, *shape), 1.0 / math.prod(shape))
    return WrittenKernel(Numbers(mean, NOISE * mean), ZERO, begins, ends, strides)


class BranchSums:
    """The sums of the original. readings: of the nodes that make bases."""

    def __init__(self, bases: Bases, forms: Mapping[int, Form], readings: Mapping[int, Reading]) -> None:
        self._bases, self._forms, self._readings = bases, forms, readings
        # By the bases of the root: what values are linear in it, beyond single operators.
        self._sums: dict[frozenset[int], dict[frozenset[int], list[Form]]] = {}
        self._roots: dict[int, tuple[frozenset[int], ...]] = {}
        self._read = 0

    def relate(self, theirs: Reading, errors: list[Exception], targets: Sequence[Form]) -> tuple[Form, Fit] | None:
        """Write the result of an operator of the changed model over the bases of a sum; None, and `errors`, where there is none.

        targets: other values that it may be.
        """
        self._bases.require_own_shape(theirs.data(0))
        root = dataclasses.replace(theirs.data(0), span=())
        candidates = [*targets, *self._of(root.bases)]
        if not candidates:
            return None
        # A weight tells the channels of its data, a mean does not.
        shape = theirs.shape(0) or (None, None)
        other = kernel(theirs, known_sizes(shape[1:2])[0] if theirs.kind == "AveragePool" else 0)
        inputs, rank = other.groups * other.weight.values.shape[2], len(other.window)
        for form in candidates:
            try:
                fit = compare_kernels(self._kernel(form, root, inputs, rank), other)
            except Unrelated as unequal:
                if isinstance(unequal, Violation):
                    unequal.of = form
                errors.append(unequal)
                continue
            scale, shift = (_on_channels(each, rank) for each in (fit.scale, fit.shift))
            return form.scaled(scale).shifted(shift), fit
        return None

    def _kernel(self, form: Form, root: Form, inputs: int, rank: int, depth: int = 0) -> WrittenKernel:
        """Write out a form over a root."""
        self._bases.require_own_shape(form)
        parts = []
        if root.bases <= form.bases:
            own = Form({base: form.terms[base] for base in root.terms}, dtype=root.dtype)
            scale, shift = (_on_rows(each, rank) for each in self._bases.ratio(root, own))
            parts.append(dataclasses.replace(WrittenKernel.identity(inputs, rank).mapped(scale), bias=shift))
        for base in form.bases - root.bases if parts else form.bases:
            if depth > _DEPTH or base not in self._readings:
                raise Unrelated("it is no sum of branches of one value")
            reading = self._readings[base]
            inner = self._kernel(reading.data(0), root, inputs, rank, depth + 1)
            one = kernel(reading, inner.groups * inner.weight.values.shape[1]).after(inner)
            parts.append(one.mapped(_on_rows(form.terms[base], rank)))
        total = parts[0]
        for part in parts[1:]:
            total = total.plus(part)
        return dataclasses.replace(total, bias=total.bias + _on_rows(form.shift, rank))

    def _of(self, root: frozenset[int]) -> list[Form]:
        """Return the parts of the original's values that are sums of operators on a root, the largest first."""
        if self._read < len(self._forms):
            self._sums.clear()
            self._roots.clear()
            for number, form in self._forms.items():
                self._add(number, form)
            self._read = len(self._forms)
        found = [form for alike in self._sums.get(root, {}).values() for form in alike[::-1]]
        return sorted(found, key=lambda form: -len(form.terms))

    def _add(self, number: int, form: Form) -> None:
        if len(form.terms) == 1 and form.terms.keys() != {number}:
            return
        for root in dict.fromkeys(root for base in form.terms for root in self._roots_of(base)):
            terms = {base: k for base, k in form.terms.items() if base in root or root in self._roots_of(base)}
            if not root >= terms.keys():
                own = Form(terms, span=form.span, dtype=form.dtype, share=form.share)
                alike = self._sums.setdefault(root, {}).setdefault(frozenset(terms), [])
                if len(alike) < _ALIKE:
                    alike.append(own)

    def _roots_of(self, base: int) -> tuple[frozenset[int], ...]:
        """Return the sets of bases that a base is linear in, the nearest first."""
        if base not in self._roots:
            self._roots[base] = own = (frozenset((base,)),)
            reading = self._readings.get(base)
            if reading is not None and reading.kind in _KINDS and reading.forms and reading.forms[0] is not None:
                data = reading.forms[0].terms
                every = dict.fromkeys(
                    (reading.forms[0].bases, *(root for each in data for root in self._roots_of(each)))
                )
                common = [r for r in every if all(each in r or r in self._roots_of(each) for each in data)]
                self._roots[base] = (*own, *common[:_DEPTH])
        return self._roots[base]


def _on_rows(numbers: Numbers, rank: int) -> Numbers:
    """Bring numbers for each channel of a value into one row. Raises Unrelated where they differ along other axes."""

    def flat(array: np.ndarray) -> np.ndarray:
        if array.size != (array.shape[-rank - 1] if array.ndim > rank else 1):
            raise Unrelated("a branch is mapped along another axis")
        return array.reshape(-1) if array.size > 1 else array.reshape(())

    if numbers.shape == ():
        return numbers
    return narrowed(*np.broadcast_arrays(numbers.values, numbers.error)).apply(flat)


def _on_channels(numbers: Numbers, rank: int) -> Numbers:
    return numbers.apply(lambda array: array.reshape(-1, *[1] * rank))
