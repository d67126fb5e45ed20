"""Relations of values: each as a sum of per-channel maps of the original's values, with the errors that stored numbers have.

    y = sum over b of k_b z_b + h        z_b: values of the original that are no such sums themselves, the bases

k and h broadcast to y from the right; a batch norm has them along axis 1. Two values are equal if they have the same bases
and equal k and h, within their errors, and the same shape and type. Two values are in proportion, y' = s y + t, if

    k'_b = s k_b for each b              t = h' - s h
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import onnx_ir as ir

from bnexport.graph.nodes import get_ints, input_at
from bnexport.graph.shapes import Shape, Shapes
from bnexport.verification.proof.sides import ROUNDING, Side

# Rounding of our own arithmetic, relative to the size of the terms: some operations in float64.
NOISE = 2.0**-49


class Unrelated(Exception):
    """No lemma relates two values."""


class NotPassed(Unrelated):
    """An operand of both models differs in a way that its operator does not pass."""


class Violation(Unrelated):
    """Two values are different functions of the same bases.

    error: of a coefficient, relative to the largest one. of: the original's value that was compared; None for that which is asked.
    """

    def __init__(self, reason: str, error: float = 0.0) -> None:
        super().__init__(reason)
        self.error = error if math.isfinite(error) else 0.0
        self.of: Form | None = None


class Numbers:
    """Coefficients in float64, and bounds of their errors; both broadcast."""

    __slots__ = ("error", "values")

    def __init__(self, values: np.ndarray, error: np.ndarray) -> None:
        self.values, self.error = values, error

    def __add__(self, other: Numbers) -> Numbers:
        if other is ZERO:
            return self
        if self is ZERO:
            return other
        size = np.abs(self.values) + np.abs(other.values)
        return Numbers(self.values + other.values, self.error + other.error + NOISE * size)

    def __mul__(self, other: Numbers) -> Numbers:
        if other is ONE or self is ZERO:
            return self
        if self is ONE or other is ZERO:
            return other
        values = self.values * other.values
        own, others = np.abs(self.values), np.abs(other.values)
        return Numbers(values, own * other.error + self.error * (others + other.error) + NOISE * np.abs(values))

    def __neg__(self) -> Numbers:
        return Numbers(-self.values, self.error)

    def __sub__(self, other: Numbers) -> Numbers:
        return self if other is ZERO else self + -other

    def inverse(self) -> Numbers:
        """Return 1 / self. Raises Unrelated where a number may be 0."""
        least = np.abs(self.values) - self.error
        if not (least > 0).all():
            raise Unrelated("it is divided by what may be 0")
        values = 1.0 / self.values
        return Numbers(values, self.error * np.abs(values) / least + NOISE * np.abs(values))

    def apply(self, change: Callable[[np.ndarray], np.ndarray]) -> Numbers:
        """Apply a movement of elements to the numbers and their errors."""
        if self.values.ndim == 0 and self.error.ndim == 0:
            return self
        values, error = np.broadcast_arrays(self.values, self.error)
        return Numbers(change(values), change(error))

    @property
    def is_zero(self) -> bool:
        return bool((np.abs(self.values) <= self.error).all())

    @property
    def is_positive(self) -> bool:
        return bool((self.values - self.error > 0).all())

    @property
    def shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(self.values.shape, self.error.shape)


ZERO = Numbers(np.zeros(()), np.zeros(()))
ONE = Numbers(np.ones(()), np.zeros(()))


@dataclasses.dataclass(frozen=True)
class Form:
    """A value over bases. terms: k of each base. span: the broadcast shape of the constants in its arithmetic.

    dtype: of the last Cast, None for that of the bases. share: the largest part of a coefficient that an error is.
    """

    terms: dict[int, Numbers]
    shift: Numbers = ZERO
    span: tuple[int, ...] = ()
    dtype: ir.DataType | None = None
    share: float = 0.0

    @property
    def bases(self) -> frozenset[int]:
        return frozenset(self.terms)

    def scaled(self, factor: Numbers, span: tuple[int, ...] = ()) -> Form:
        terms = {base: k * factor for base, k in self.terms.items()}
        return dataclasses.replace(self, terms=terms, shift=self.shift * factor, span=joined(self.span, span))

    def shifted(self, addend: Numbers, span: tuple[int, ...] = ()) -> Form:
        return dataclasses.replace(self, shift=self.shift + addend, span=joined(self.span, span))

    def plus(self, other: Form) -> Form:
        terms = dict(self.terms)
        for base, k in other.terms.items():
            terms[base] = terms[base] + k if base in terms else k
        share, span = max(self.share, other.share), joined(self.span, other.span)
        return Form(terms, self.shift + other.shift, span, self.dtype or other.dtype, share)


def joined(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which both broadcast. Raises Unrelated."""
    if not second or first == second:
        return first
    try:
        return np.broadcast_shapes(first, second)
    except ValueError:
        raise Unrelated(f"the shapes {first} and {second} do not broadcast") from None


def broadcast(*shapes: Shape) -> Shape | None:
    """Return the shape to which values broadcast, None where it is not known. A size of a constant is 1 or the result's."""
    rank = max(map(len, shapes))
    found: list[int | str | None] = []
    for sizes in zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape in shapes), strict=True):
        numbers = {size for size in sizes if isinstance(size, int) and size != 1}
        others = {size for size in sizes if not isinstance(size, int)}
        if not numbers and len(others) > 1:
            return None
        found.append(min(numbers) if numbers else others.pop() if others else 1)
    return tuple(found)


class Base:
    """A value of the original that others are maps of. scale: the sums of its operator's weights, for each channel; what the
    operator reads counts as 1, since products over the depth of a network say nothing of the values.

    guess: its shape, as far as its operator tells; inference is asked where that is not enough.
    """

    def __init__(self, number: int, value: ir.Value, shapes: Shapes, guess: Shape | None) -> None:
        self.value, self._shapes, self._number = value, shapes, number
        self.guess = None if guess is None else self._named(guess)
        self.scale = np.ones(())
        self._is_inferred = False

    def _named(self, shape: Shape) -> Shape:
        """Give a size that is not known a name of its own."""
        return tuple(f"?{self._number}.{axis}" if size is None else size for axis, size in enumerate(shape))

    @property
    def shape(self) -> Shape | None:
        if not self._is_inferred:
            self._is_inferred = True
            known = self._shapes.of(self.value)
            if known is not None:
                asked, sizes = self.guess or (), self._named(known)
                if len(asked) == len(sizes):  # what an operator asks of it is more than a name
                    sizes = tuple(own if isinstance(own, int) else size for own, size in zip(asked, sizes))
                self.guess = sizes
        return self.guess

    @property
    def rank(self) -> int | None:
        known = self.guess if self.guess is not None else self.shape
        return None if known is None else len(known)

    def has_size(self, axis: int, size: int) -> bool:
        """Whether an axis, counted from the last, certainly has a size."""
        return any(shape is not None and -axis <= len(shape) and shape[axis] == size for shape in self._told())

    def _told(self) -> Iterator[Shape | None]:
        """Yield what is known of the shape, inference last."""
        yield self.guess
        if not self._is_inferred:
            yield self.shape

    @property
    def dtype(self) -> ir.DataType | None:
        return self._shapes.dtype(self.value)


class Stored(NamedTuple):
    """A weight. share, tiny: how far each number may be off, as a share of it and beyond. error: of an expression."""

    tensor: ir.TensorProtocol
    shape: tuple[int, ...]
    share: float
    tiny: float
    error: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The largest difference of coefficients, the largest that is allowed, and the largest share of one that is allowed."""

    error: float = 0.0
    bound: float = 0.0
    share: float = 0.0

    def joined(self, other: Agreement) -> Agreement:
        return Agreement(max(self.error, other.error), max(self.bound, other.bound), max(self.share, other.share))


class Bases:
    """The bases of the original, by their numbers."""

    def __init__(self) -> None:
        self._all: dict[int, Base] = {}

    def __getitem__(self, number: int) -> Base:
        return self._all[number]

    def add(self, number: int, base: Base) -> None:
        self._all[number] = base

    def shape(self, form: Form) -> Shape | None:
        """Return the shape of a value, None where its rank is not known. A size that is not known has a name of its own."""
        known = [self._all[base].shape for base in form.terms]
        if None in known or not known:
            return None
        return broadcast(form.span, *(shape for shape in known if shape is not None))

    def guess(self, form: Form) -> Shape | None:
        """Return the shape of a value as far as it is known without inference."""
        known = [self._all[base].guess for base in form.terms]
        return None if None in known else broadcast(form.span, *known)  # type: ignore[arg-type]

    def rank(self, form: Form) -> int | None:
        """Return the rank of a value, None where it is not known."""
        known = [self._all[base].rank for base in form.terms]
        return None if None in known else max([len(form.span), *(rank for rank in known if rank is not None)])

    def dtype(self, form: Form) -> ir.DataType | None:
        """Return the type of a value; None where it is not known."""
        if form.dtype is not None:
            return form.dtype
        return next((self._all[base].dtype for base in form.terms), None)

    def know(self, form: Form, axis: int, size: int, rank: int | None = None) -> None:
        """Record a size, and perhaps the rank, of a value that is a map of one base."""
        if len(form.terms) != 1 or not form.terms.keys() <= self._all.keys():
            return
        base = self._all[next(iter(form.terms))]
        if base.guess is None and rank is not None and len(form.span) <= rank:
            base.guess = tuple(f"?{id(base)}.{each}" for each in range(rank))
        shape = base.guess
        # A constant may have brought the size in.
        if shape is None or axis >= len(shape) or len(form.span) >= len(shape) - axis:
            return
        if not isinstance(shape[axis], int):
            base.guess = (*shape[:axis], size, *shape[axis + 1 :])

    def require_one_shape(self, mine: Form, theirs: Form) -> None:
        """Raise Unrelated unless two values have one shape, whatever the sizes are."""
        if mine.terms.keys() != theirs.terms.keys():
            raise Unrelated("they depend on other values")
        if mine.span == theirs.span:
            return
        rank = max(len(mine.span), len(theirs.span))
        bases = [self._all[base] for base in mine.terms]
        if max((base.rank or 0) for base in bases) < rank:
            raise Unrelated("its rank may be another one")
        for axis in range(-rank, 0):
            sizes = {span[axis] if -axis <= len(span) else 1 for span in (mine.span, theirs.span)}
            if len(sizes) > 1 and not any(base.has_size(axis, max(sizes)) for base in bases):
                raise Unrelated(f"its axis {axis} may have one element or {max(sizes)}")

    def require_own_shape(self, form: Form) -> None:
        """Raise Unrelated where the constants in a value's arithmetic may give it another shape than its bases have."""
        self.require_one_shape(form, dataclasses.replace(form, span=()))

    def require_one_type(self, mine: Form, theirs: Form) -> None:
        """Raise Unrelated unless two values have one type: one of them may have lost its last digits."""
        if mine.dtype is theirs.dtype:
            return
        first, second = self.dtype(mine), self.dtype(theirs)
        if first != second:
            names = [each.name.lower() if each is not None else "unknown" for each in (second, first)]
            raise Unrelated(f"its type is {names[0]}, expected {names[1]}")

    def compare(self, mine: Form, theirs: Form) -> Agreement:
        """Compare two values. Raises Violation where they differ, Unrelated where nothing is known: bases may depend on each other."""
        try:
            return self._compared(mine, theirs)
        except Violation as error:
            if len(mine.terms) > 1:
                self.ratio(mine, theirs)
            raise error

    def _compared(self, mine: Form, theirs: Form) -> Agreement:
        self.require_one_shape(mine, theirs)
        self.require_one_type(mine, theirs)
        found = Agreement(share=max(mine.share, theirs.share))
        size: np.ndarray | float = 0.0
        for base, one in mine.terms.items():
            two, scale = theirs.terms[base], self._all[base].scale
            size = np.maximum(size, np.abs(one.values) * scale)
            if one is not two:
                found = found.joined(_within(one, two, np.abs(one.values), "scale"))
        if mine.shift is not theirs.shift:
            found = found.joined(
                _within(mine.shift, theirs.shift, np.maximum(size, np.abs(mine.shift.values)), "shift")
            )
        return found

    def ratio(self, mine: Form, theirs: Form) -> tuple[Numbers, Numbers]:
        """Return s and t with theirs = s mine + t. Raises Unrelated where there are none."""
        self.require_one_shape(mine, theirs)
        pairs = [(one, theirs.terms[base]) for base, one in mine.terms.items()]
        if all(one is two for one, two in pairs):
            return ONE, theirs.shift - mine.shift if theirs.shift is not mine.shift else ZERO
        scale = pairs[0][1] if all(one is ONE for one, _ in pairs) and len(pairs) == 1 else _quotient(pairs)
        return scale, theirs.shift - scale * mine.shift


def _quotient(pairs: Iterable[tuple[Numbers, Numbers]]) -> Numbers:
    """Return s with k' = s k in each pair. Raises Unrelated."""
    pairs = list(pairs)
    shape = np.broadcast_shapes(*(each.shape for pair in pairs for each in pair))
    full = [tuple(np.broadcast_to(each, shape) for each in (a.values, a.error, b.values, b.error)) for a, b in pairs]
    best = full[0]
    for each in full[1:]:
        larger = np.abs(each[0]) > np.abs(best[0])
        best = tuple(np.where(larger, new, old) for new, old in zip(each, best, strict=True))
    scale = read_off(*best)
    for one, one_error, two, two_error in full:
        if not (np.abs(two - scale.values * one) <= slack(scale, one, one_error, two, two_error)).all():
            raise NotPassed("they are not in proportion")
    return narrowed(scale.values, scale.error)


def read_off(one: np.ndarray, one_error: np.ndarray, two: np.ndarray, two_error: np.ndarray) -> Numbers:
    """Return r with two = r one, and 1 where one is 0."""
    known = one != 0
    scale = np.divide(two, one, out=np.ones(one.shape), where=known)
    error = two_error + np.abs(scale) * one_error
    error = np.divide(error, np.abs(one), out=np.zeros(one.shape), where=known)
    return Numbers(scale, np.where(known, error + NOISE * np.abs(scale), 0.0))


def slack(
    scale: Numbers, one: np.ndarray, one_error: np.ndarray | float, two: np.ndarray, two_error: np.ndarray | float
) -> np.ndarray:
    """Return by how much two may differ from scale one."""
    size = np.abs(scale.values)
    return two_error + one_error * (size + scale.error) + scale.error * np.abs(one) + NOISE * np.abs(two)


def narrowed(values: np.ndarray, error: np.ndarray) -> Numbers:
    """Return numbers without axes along which they are the same, within their errors."""
    for axis in range(values.ndim):
        first, own = (np.take(each, [0], axis) for each in (values, error))
        spread = np.abs(values - first)
        if values.shape[axis] > 1 and (spread <= error + own).all():
            values, error = first, (spread + error).max(axis=axis, keepdims=True)
    return Numbers(values, error)


def _within(one: Numbers, two: Numbers, size: np.ndarray, what: str) -> Agreement:
    allowed = one.error + two.error + NOISE * (np.abs(one.values) + np.abs(two.values))
    return agreement(np.abs(two.values - one.values), allowed, size, what)


def agreement(
    difference: np.ndarray,
    allowed: np.ndarray | float,
    size: np.ndarray,
    what: str,
    inner: tuple[int, ...] = (),
    start: int = 0,
    tiny: float = 0.0,
) -> Agreement:
    """Compare differences with what is allowed. Raises Violation.

    size: of the coefficients. inner: axes of one output's coefficients, of whose largest one a share is told, without `tiny`.
    start: place of the first row.
    """
    whole = float(np.max(size, initial=0.0)) or 1.0
    difference, allowed = np.broadcast_arrays(difference, allowed)
    right = (difference <= allowed) & np.isfinite(difference)
    if not right.all():
        wrong = np.where(right, 0.0, np.where(np.isnan(difference), np.inf, difference))
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        got, limit = float(difference[at]), float(allowed[at])
        places = [
            int(each) + (0 if axis else start) for axis, each in enumerate(at) if wrong.shape[axis] > 1 or not axis
        ]
        text = f"the {what} of channel {', '.join(map(str, places)) or 0}"
        raise Violation(f"{text} differs by {got:.3g}, allowed {limit:.3g}", got / whole)
    largest = size.max(axis=inner, initial=0.0)
    most = np.maximum(allowed.max(axis=inner, initial=0.0) - tiny, 0.0)
    share = np.max(most / np.where(largest > 0, largest, whole), initial=0.0)
    return Agreement(
        float(difference.max(initial=0.0)) / whole, float(np.max(allowed, initial=0.0)) / whole, float(share)
    )


Relation = tuple[Numbers, Numbers]


def with_rank(array: np.ndarray, rank: int) -> np.ndarray:
    """Return an array with axes of one element in front."""
    return array.reshape([1] * (rank - array.ndim) + list(array.shape))


def require_ones(array: np.ndarray, axes: Iterable[int], rank: int) -> np.ndarray:
    """Return an array with all axes of a value. Raises Unrelated unless it is the same along `axes`."""
    found = with_rank(array, rank)
    if any(found.shape[axis] != 1 for axis in axes):
        raise Unrelated("a map does not pass along its axis")
    return found


class Reading:
    """A node of one model, with the forms of its operands that are not constant."""

    def __init__(self, side: Side, node: ir.Node, forms: list[Form | None], context: Asked) -> None:
        self.side, self.node, self.forms, self._context = side, node, forms, context
        self.bases = context.bases
        self._ranks: dict[int, int | None] = {}
        # Numbers of outputs that are none of the model's values.
        self.made: list[int] = []

    @property
    def kind(self) -> str:
        return self.node.op_type

    @property
    def version(self) -> int:
        return self.side.constants.version(self.node)

    def require_plain(self) -> None:
        """Raise Unrelated for arithmetic that broadcasts by attributes, as before opset 7."""
        if self.version < 7 and self.kind != "Sum":
            raise Unrelated(f"{self.kind} broadcasts by its attributes")

    def has(self, index: int) -> bool:
        return input_at(self.node, index) is not None

    def is_read(self, output: ir.Value) -> bool:
        return bool(output.name and (output.uses() or output.is_graph_output()))

    def data(self, index: int) -> Form:
        form = self.forms[index]
        if form is None:
            raise Unrelated(f"an operand of {self.kind} is constant, or missing")
        return form

    def fixed(self, index: int) -> ir.Value:
        """Return a constant operand. Raises Unrelated where it varies, or is absent."""
        value = input_at(self.node, index)
        if self.side.constants.has(value):
            return value
        raise Unrelated(f"an operand of {self.kind} is not constant")

    def constant(self, index: int) -> np.ndarray:
        """Return the numbers of a constant operand. Raises Unrelated where it varies."""
        return self.side.constants.array(self.fixed(index))

    def ints(self, index: int, name: str = "") -> tuple[int, ...] | None:
        """Return numbers that an attribute or an operand has; None where there are none, or they are not constant."""
        if name and name in self.node.attributes:
            return get_ints(self.node, name)
        try:
            return tuple(int(each) for each in self.constant(index).reshape(-1))
        except Unrelated:
            return None

    def parameter(self, index: int) -> Numbers:
        """Return a constant operand of floats, with its errors. Raises Unrelated."""
        return self._context.parameter(self.side, self.fixed(index))

    def stored(self, index: int) -> Stored:
        """Return a weight as it is stored, or computed."""
        value, constants = self.fixed(index), self.side.constants
        tensor, error = constants.leaf(value), None
        if tensor is None:
            array = constants.array(value)
            tensor, error = ir.tensor(np.ascontiguousarray(array)), constants.error(value)
        shape = constants.shape(value)
        if tensor.dtype not in ROUNDING:
            raise Unrelated(f"the weight of {self.kind} holds no floats")
        return Stored(tensor, shape, *self.side.stored_error(value), error)

    def shape(self, index: int) -> Shape | None:
        value = self.node.inputs[index]
        form = self.forms[index]
        known = None if value is None else self.side.shapes.of(value)
        return self.bases.shape(form) if known is None and form is not None else known

    def rank(self, index: int) -> int | None:
        if index not in self._ranks:
            form = self.forms[index]
            rank = None if form is None else self.bases.rank(form)
            if rank is None:
                shape = self.shape(index)
                rank = None if shape is None else len(shape)
            self._ranks[index] = rank
        return self._ranks[index]

    def known_rank(self, index: int = 0) -> int:
        """Return the rank of an operand. Raises Unrelated where it is not known."""
        rank = self.rank(index)
        if rank is None:
            raise Unrelated("the rank of its data is not known")
        return rank

    def over(self, forms: list[Form | None]) -> Reading:
        """Return the node with other forms of its operands."""
        found = Reading(self.side, self.node, forms, self._context)
        found._ranks = {index: self.rank(index) for index, form in enumerate(forms) if form is not None}
        return found

    def result_shape(self, place: int = 0) -> Shape | None:
        return self.side.shapes.of(self.node.outputs[place])

    def ask_size(self, form: Form, axis: int, size: int) -> None:
        """Record the size that a map of the original asks of its data.

        Raises Unrelated where one of the changed model asks for a single element of data that may have more.
        """
        if self.side.place == 0:
            self.bases.know(form, axis, size)
        elif size == 1 and (self.bases.shape(form) or ())[axis : axis + 1] != (1,):
            raise Unrelated(f"its data may have more than one element along axis {axis}")

    def on_axis(
        self, form: Form, axis: int, count: int, place: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[list[Numbers], Numbers]:
        """Return the maps of the data along one axis, brought onto a weight by `place`. axis: counted from the last."""

        def vector(array: np.ndarray) -> np.ndarray:
            others = [size for each, size in enumerate(array.shape) if each - array.ndim != axis]
            if any(size != 1 for size in others):
                raise Unrelated("its data are mapped along another axis")
            return array.reshape(()) if array.size == 1 else place(array.reshape(-1))

        scales = [form.terms[base].apply(vector) for base in sorted(form.terms)]
        return scales, form.shift.apply(vector)

    def core(self) -> int:
        """Return the base of a normalisation without its scale and bias. Raises Unrelated where the original has none."""
        return self._context.core(self)


class Couple:
    """One operator of both models, whose operands may be in relation."""

    def __init__(self, mine: Reading, theirs: Reading, context: Asked) -> None:
        self.mine, self.theirs, self._context = mine, theirs, context
        self.agreement = Agreement()
        self.sizes: np.ndarray | None = None

    @property
    def kind(self) -> str:
        return self.mine.kind

    def ratio(self, index: int) -> Relation:
        return self.mine.bases.ratio(self.mine.data(index), self.theirs.data(index))

    def rebased(self) -> Couple:
        """Return the pair with each operand of the original as a base of its own: that of the changed model is in proportion."""
        forms: tuple[list[Form | None], list[Form | None]] = ([], [])
        for index, form in enumerate(self.mine.forms):
            scale, shift = (ONE, ZERO) if form is None else self.ratio(index)
            forms[0].append(None if form is None else Form({-1: ONE}))
            forms[1].append(None if form is None else Form({-1: scale}, shift))
        return Couple(self.mine.over(forms[0]), self.theirs.over(forms[1]), self._context)

    def hints(self) -> list[Numbers]:
        """Return the scales that maps of the original's result have."""
        return self._context.scales_behind(self.mine)

    def same_constants(self, *places: int) -> bool:
        """Whether both have equal constants at the first of these places that has one."""
        return self._context.same_constants(self.mine, self.theirs, places)

    def agree(self, agreement: Agreement, sizes: np.ndarray | None = None) -> None:
        """Record how closely parameters agree. sizes: of the coefficients of the result."""
        self.agreement, self.sizes = agreement, sizes


class Asked(Protocol):
    """What a lemma may ask for."""

    bases: Bases

    def parameter(self, side: Side, value: ir.Value) -> Numbers: ...

    def core(self, node: Reading) -> int: ...

    def scales_behind(self, node: Reading) -> list[Numbers]: ...

    def same_constants(self, mine: Reading, theirs: Reading, places: tuple[int, ...]) -> bool: ...
