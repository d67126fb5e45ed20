"""The table of lemmas: for each operator, how relations of its operands give the relation of its result.

An operator without an entry relates equal operands alone. An entry has one of two forms:

    maps      on one side: the result as a sum of maps of bases               y = k x + h
    relates   on both sides, where the operands are in relation               x' = p x + q  gives  y' = s y + t

Only the operands and attributes that an entry names may differ; every other one is equal to the last bit. With data
x' = p x + q, channel by channel, and parameters of the changed model with a prime:

    Relu, LeakyRelu, PRelu                  s = p              p > 0, q = 0
    MaxPool, GlobalMaxPool, ReduceMax       s = p, t = q       p > 0; one p and q in each window
    means, Resize                           s = p, t = q       one p and q in each window; q = 0 where zeros are counted
    ReduceSum                               s = p, t = n q     n elements in each sum
    Reshape, Transpose, Slice, Pad, ...     s = M p, t = M q   M moves elements; q = 0 where zeros are put in
    x y, x / y                              s = p1 p2          q = 0
    Conv, Gemm, MatMul, Einsum, DeformConv  weight by weight (weights.py)
    LSTM, GRU, RNN                          y' = y             W' p = W, Wb' + W' q = Wb
    a table T in Gather                     T' = s T + t
    Shape, Size                             y' = y             x' has the shape of x
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import onnx_ir as ir

from bnexport.graph.nodes import get_flag, get_float, get_int, get_ints, get_string
from bnexport.verification.proof import weights
from bnexport.verification.proof.movements import (
    MOVEMENTS,
    concatenated,
    fills_with_zeros,
    known_sizes,
    positions,
    positive_axes,
)
from bnexport.verification.proof.relations import (
    NOISE,
    ONE,
    ZERO,
    Couple,
    Form,
    NotPassed,
    Numbers,
    Reading,
    Relation,
    Unrelated,
    read_off,
    require_ones,
    slack,
    with_rank,
)
from bnexport.verification.proof.sides import ROUNDING, is_training
from bnexport.verification.proof.weights import Linear

SAME: Relation = (ONE, ZERO)


def require_no_shift(shift: Numbers, what: str) -> Numbers:
    """Return a shift that may be 0 as an error of 0."""
    if not shift.is_zero:
        raise NotPassed(f"a shift does not pass {what}")
    return ZERO if shift is ZERO else Numbers(np.zeros(()), shift.error + np.abs(shift.values))


def require_positive(scale: Numbers, what: str) -> Numbers:
    if not scale.is_positive:
        raise NotPassed(f"a scale that is not positive does not pass {what}")
    return scale


# Maps: on one side.


def sums(node: Reading) -> Form:
    """Add, Sub, and a Sum of any number of operands."""
    node.require_plain()
    total: Form | None = None
    constants: list[tuple[Numbers, tuple[int, ...]]] = []
    for index in range(len(node.node.inputs)):
        negative = node.kind == "Sub" and index == 1
        form = node.forms[index]
        if form is None:
            addend = node.parameter(index)
            constants.append((-addend if negative else addend, addend.values.shape))
            continue
        form = form.scaled(-ONE) if negative else form
        total = form if total is None else total.plus(form)
    assert total is not None, "no constant is read"
    for addend, span in constants:
        total = total.shifted(addend, span)
    return total


def products(node: Reading) -> Form:
    """Mul and Div by a constant."""
    node.require_plain()
    first, second = node.forms[:2]
    if first is not None and second is None:
        factor = node.parameter(1)
        return first.scaled(factor.inverse() if node.kind == "Div" else factor, factor.values.shape)
    if second is not None and first is None and node.kind == "Mul":
        factor = node.parameter(0)
        return second.scaled(factor, factor.values.shape)
    raise Unrelated(f"{node.kind} of two values")


def negated(node: Reading) -> Form:
    return node.data(0).scaled(-ONE)


def vectors(node: Reading, *places: int) -> list[Numbers]:
    """Return parameters that are vectors of one size. Raises Unrelated."""
    found = [node.parameter(place) for place in places]
    if found[0].values.ndim != 1 or len({each.values.shape for each in found}) > 1:
        raise Unrelated("its parameters are no vectors of one size")
    return found


def normalised(node: Reading) -> Form:
    """A BatchNormalization in inference: k = scale / sqrt(var + eps), h = bias - k mean."""
    if is_training(node.node, node.version):
        raise Unrelated("it normalises with the statistics of the batch")
    scale, bias, mean, var = vectors(node, 1, 2, 3, 4)
    total = var.values + get_float(node.node, "epsilon", 1e-5)
    if not (total - var.error > 0).all():
        raise Unrelated("a variance is below 0")
    root = np.sqrt(total)
    factor = scale.values / root
    error = scale.error / root + np.abs(factor) * (0.5 * var.error / (total - var.error) + NOISE)
    k = Numbers(factor, error)
    form, rank = node.data(0), node.known_rank()
    if rank < 2:
        raise Unrelated("its data have no channels")
    shape = (-1, *[1] * (rank - 2))
    k, h = (each.apply(lambda array: array.reshape(shape)) for each in (k, bias - k * mean))
    node.ask_size(form, 1, factor.size)
    return form.scaled(k, (factor.size, *shape[1:])).shifted(h)


def casted(node: Reading) -> Form:
    """A Cast to a type that is no coarser, and holds no less, than the types of the bases."""
    form = node.data(0)
    target = node.side.cast_type(node.node)
    own = [node.bases[base].dtype for base in form.terms]
    if target not in ROUNDING or any(each not in ROUNDING for each in own):
        raise Unrelated("it is a Cast between other types than floats")
    coarsest = max(own, key=lambda each: ROUNDING[each][0])  # type: ignore[index]
    fits = coarsest is not ir.DataType.BFLOAT16 or target is not ir.DataType.FLOAT16
    if ROUNDING[target][0] > ROUNDING[coarsest][0] or not fits:  # type: ignore[index]
        raise Unrelated("it rounds to a coarser type")
    return dataclasses.replace(form, dtype=None if set(own) == {target} else target)


def pointwise(node: Reading) -> Form:
    """A depthwise Conv of one position: y = W x + b, channel by channel."""
    shape = node.side.constants.shape(node.fixed(1))
    steps = [*(get_ints(node.node, "strides") or ()), *(1 - each for each in get_ints(node.node, "pads") or ())]
    if len(shape) < 3 or math.prod(shape[1:]) != 1 or get_int(node.node, "group", 1) != shape[0]:
        raise Unrelated("it is no depthwise Conv of one position")
    if any(each != 1 for each in steps) or node.rank(0) not in (None, len(shape)):
        raise Unrelated("it has strides or pads")
    weight = node.parameter(1)
    wide = (-1, *[1] * (len(shape) - 2))
    form, span = node.data(0), (shape[0], *wide[1:])
    node.ask_size(form, 1, shape[0])
    form = form.scaled(weight.apply(lambda array: array.reshape(wide)), span)
    if not node.has(2):
        return form
    bias = node.parameter(2)
    if bias.values.shape != shape[:1]:
        raise Unrelated("its bias has another shape")
    return form.shifted(bias.apply(lambda array: array.reshape(wide)))


def scaled_core(node: Reading) -> Form:
    """Instance-, Layer-, Group-, RMSNormalization: s core(x) + b, where core(x) is a base of its own."""
    scale, bias = node.parameter(1), node.parameter(2) if node.has(2) else ZERO
    if node.kind in ("InstanceNormalization", "GroupNormalization"):
        if node.kind == "GroupNormalization" and node.version < 21:
            raise Unrelated("its scale is that of groups")
        ones = [1] * (node.known_rank() - 2)
        scale, bias = (each.apply(lambda array: array.reshape(-1, *ones)) for each in vectors(node, 1, 2))
    core = node.core()
    return Form({core: scale}, bias, scale.values.shape)


# Relations: of one operator in both models.


def homogeneous(pair: Couple) -> list[Relation]:
    """f(r x) = r f(x) for r > 0."""
    scale, shift = pair.ratio(0)
    return [(require_positive(scale, pair.kind), require_no_shift(shift, pair.kind))]


def maxima(pair: Couple) -> list[Relation]:
    scale, shift = pair.ratio(0)
    if scale is not ONE or shift is not ZERO:
        require_no_empty_windows(pair.mine)
    relation = reduced(pair.mine, require_positive(scale, pair.kind), shift)
    return [relation] if not any(map(pair.mine.is_read, pair.mine.node.outputs[1:])) else _no_outputs(pair)


def _no_outputs(pair: Couple) -> list[Relation]:
    raise Unrelated(f"{pair.kind} with several outputs")


def means(pair: Couple) -> list[Relation]:
    scale, shift = pair.ratio(0)
    node = pair.mine.node
    if pair.kind == "ReduceSum" and not shift.is_zero:
        shape, axes = pair.mine.shape(0), reduced_axes(pair.mine)
        sizes = [shape[axis] if shape is not None else None for axis in axes]
        if not all(isinstance(size, int) for size in sizes):
            raise Unrelated("the number of elements that it adds is not known")
        shift = shift * Numbers(np.asarray(float(math.prod(sizes))), np.zeros(()))  # type: ignore[arg-type]
    if pair.kind == "AveragePool":
        automatic = get_string(node, "auto_pad", "NOTSET")
        if automatic not in ("NOTSET", "") and any(step != 1 for step in get_ints(node, "dilations") or ()):
            raise Unrelated("engines place its windows in several ways")
        counts = pair.mine.version < 7 or get_flag(node, "count_include_pad")
        if (counts and may_pad(node)) or get_flag(node, "ceil_mode"):
            shift = require_no_shift(shift, f"{pair.kind} that counts zeros")
        elif shift is not ZERO:
            require_no_empty_windows(pair.mine)
    return [reduced(pair.mine, scale, shift)]


def reduced_axes(node: Reading) -> tuple[int, ...]:
    """Return the axes along which a pooling or a reduction takes elements together."""
    rank = node.known_rank()
    if not node.kind.startswith("Reduce"):
        return tuple(range(2, rank))
    axes = node.ints(1, "axes")
    if axes is None:
        if node.has(1) or get_flag(node.node, "noop_with_empty_axes"):
            raise Unrelated("its axes are not known")
        return tuple(range(rank))
    if not axes:
        raise Unrelated("its axes are not known")
    return positive_axes(axes, rank)


def reduced(node: Reading, scale: Numbers, shift: Numbers) -> Relation:
    """Pass a relation through windows along axes in which it is the same."""
    if scale.shape == () and shift.shape == ():
        return scale, shift
    axes, rank = reduced_axes(node), node.rank(0)
    keeps = not node.kind.startswith("Reduce") or get_flag(node.node, "keepdims", True)

    def change(array: np.ndarray) -> np.ndarray:
        wide = require_ones(array, axes, rank)  # type: ignore[arg-type]
        return wide if keeps else wide.reshape([size for axis, size in enumerate(wide.shape) if axis not in axes])

    return scale.apply(change), shift.apply(change)


def may_pad(node: ir.Node) -> bool:
    """Whether a window may reach beyond the data."""
    automatic = get_string(node, "auto_pad", "NOTSET")
    if automatic == "VALID":
        return False
    return automatic not in ("NOTSET", "") or any(get_ints(node, "pads") or ())


def require_no_empty_windows(node: Reading) -> None:
    """Raise Unrelated where a window may lie in padding alone: its value is fixed. Elements that are apart may do so."""
    kernel, dilations = (get_ints(node.node, name) or () for name in ("kernel_shape", "dilations"))
    if not kernel or not may_pad(node.node):
        return
    pads = get_ints(node.node, "pads") or (0,) * (2 * len(kernel))
    shape = node.shape(0)
    for axis, (count, step) in enumerate(zip(kernel, dilations or (1,) * len(kernel), strict=False)):
        size = shape[axis + 2] if shape is not None and axis + 2 < len(shape) else None
        is_wide = max(pads[axis], pads[axis + len(kernel)]) > (count - 1) * step
        if is_wide or (step > 1 and (not isinstance(size, int) or size < step)):
            raise Unrelated(f"a window of {node.kind} may lie in padding alone")


def resized(pair: Couple) -> list[Relation]:
    """Each value is a sum of weights that add up to 1, along axes in which the relation is the same."""
    node = pair.mine
    scale, shift = pair.ratio(0)
    if get_string(node.node, "coordinate_transformation_mode", "") == "tf_crop_and_resize":
        raise Unrelated("it puts in numbers of its own")
    if scale.shape == () and shift.shape == ():
        return [(scale, shift)]
    rank = node.known_rank()
    axes = [axis for axis in range(rank) if not _keeps(node, axis, rank)]
    return [tuple(each.apply(lambda array: require_ones(array, axes, rank)) for each in (scale, shift))]  # type: ignore[list-item]


def unread_region(node: Reading) -> tuple[int, ...]:
    """Return the place of a region of interest that is not cropped to."""
    return (1,) if node.kind == "Resize" and node.version >= 11 else ()


def _keeps(node: Reading, axis: int, rank: int) -> bool:
    """Whether a Resize certainly leaves an axis as it is."""
    if "height_scale" in node.node.attributes:  # Upsample of opset 1
        return rank == 4 and axis < 2
    axes = get_ints(node.node, "axes")
    chosen = tuple(range(rank)) if axes is None else positive_axes(axes, rank)
    if axis not in chosen:
        return True
    place = chosen.index(axis)
    after_roi = node.kind == "Resize" and node.version >= 11
    attribute = node.node.attributes.get("scales")
    scales = None if attribute is None else np.asarray(attribute.as_floats())
    index = 2 if after_roi else 1
    if scales is None and node.has(index):
        scales = node.constant(index)
    if scales is not None and scales.size:
        return bool(scales.size > place and scales[place] == 1.0)
    if get_string(node.node, "keep_aspect_ratio_policy", "stretch") != "stretch" or not (after_roi and node.has(3)):
        return False
    before, sizes = node.shape(0) or (None,) * rank, node.ints(3)
    wanted = sizes[place] if sizes is not None else (node.result_shape() or (None,) * rank)[axis]
    return isinstance(wanted, int) and before[axis] == wanted


def moved(pair: Couple) -> list[Relation]:
    """Move the elements of p and q as those of the data."""
    scale, shift = pair.ratio(0)
    count = len(pair.mine.node.outputs)
    if scale is ONE and shift is ZERO:
        return [SAME] * count
    if pair.kind == "DepthToSpace":
        return [(positions(pair.mine, scale), positions(pair.mine, shift))]
    if pair.kind == "Pad" and fills_with_zeros(pair.mine):
        shift = require_no_shift(shift, "a Pad with zeros")
    if scale.shape == () and shift.shape == ():
        return [(scale, shift)] * count
    move = MOVEMENTS[pair.kind](pair.mine)
    parts = [list(zip(*(move(array) for array in each), strict=True)) for each in (_arrays(scale), _arrays(shift))]
    return [(Numbers(*first), Numbers(*second)) for first, second in zip(*parts, strict=True)]


def _arrays(numbers: Numbers) -> list[np.ndarray]:
    return np.broadcast_arrays(numbers.values, numbers.error)  # type: ignore[return-value]


def gathered(pair: Couple) -> list[Relation]:
    return moved(pair) if pair.mine.forms[0] is not None else [table(pair)]


def joined(pair: Couple) -> list[Relation]:
    """Concat: the parts of p and q side by side. A constant operand may be mapped in place."""
    relations: list[Relation] = []
    hints = pair.hints()
    for index, form in enumerate(pair.mine.forms):
        if form is not None:
            relations.append(pair.ratio(index))
        elif pair.same_constants(index):
            relations.append(SAME)
        else:
            relations.append((ONE, pair.theirs.parameter(index) - pair.mine.parameter(index)))
    if all(scale is ONE and shift is ZERO for scale, shift in relations):
        return [SAME]
    result = concatenated(pair.mine, relations)
    constants = [index for index, form in enumerate(pair.mine.forms) if form is None]
    if constants and hints:
        # What a map behind it does to a constant counts as done in place.
        result = concatenated(pair.mine, _told(pair, relations, constants, hints[0]))
    return [result]


def _told(pair: Couple, relations: list[Relation], constants: list[int], hint: Numbers) -> list[Relation]:
    """Return relations of the operands in which constants are scaled as a map behind the Concat scales them."""
    shape = pair.mine.result_shape()
    if shape is None:
        raise Unrelated("the rank of its data is not known")
    axis, rank = get_int(pair.mine.node, "axis", 1), len(shape)
    axis %= rank
    found, start = list(relations), 0
    shapes = [pair.mine.shape(index) for index in range(len(relations))]
    for index, size in enumerate(known_sizes([None if shape is None else shape[axis] for shape in shapes])):
        if index in constants:
            own = hint.apply(functools.partial(_part, axis=axis, rank=rank, start=start, size=size))
            found[index] = own, pair.theirs.parameter(index) - own * pair.mine.parameter(index)
        start += size
    return found


def _part(array: np.ndarray, axis: int, rank: int, start: int, size: int) -> np.ndarray:
    wide = with_rank(array, rank)
    return wide if wide.shape[axis] == 1 else np.take(wide, range(start, start + size), axis)


def multiplied(pair: Couple) -> list[Relation]:
    """(p1 x) (p2 y) = p1 p2 x y, and so for a quotient."""
    relations = [pair.ratio(index) for index in range(2)]
    shifts = [require_no_shift(shift, pair.kind) for _, shift in relations]
    if any(each is not ZERO and each.error.any() for each in shifts):
        raise Unrelated(f"a shift does not pass {pair.kind}")
    first, second = (scale for scale, _ in relations)
    return [(first * (second.inverse() if pair.kind == "Div" else second), ZERO)]


def asked(pair: Couple) -> list[Relation]:
    """Sizes depend on the shape alone."""
    pair.mine.bases.require_one_shape(pair.mine.data(0), pair.theirs.data(0))
    return [SAME]


def table(pair: Couple) -> Relation:
    """A constant table of which rows are taken: s and t are read off the largest and least number of each column."""
    one, two = pair.mine.parameter(0), pair.theirs.parameter(0)
    rank = one.values.ndim
    if len({each.side.shapes.dtype(each.node.inputs[0]) for each in (pair.mine, pair.theirs)}) > 1:  # type: ignore[arg-type]
        raise Unrelated("the tables have other types")
    axis = get_int(pair.mine.node, "axis", 0) % rank
    rows, row_error, others, other_error = (
        np.moveaxis(np.broadcast_to(each, one.values.shape), axis, 0)
        for each in (one.values, one.error, two.values, two.error)
    )
    most, least = rows.argmax(axis=0)[None], rows.argmin(axis=0)[None]

    def pick(values: np.ndarray, index: np.ndarray) -> np.ndarray:
        return np.take_along_axis(values, index, axis=0)[0]

    top, bottom = (
        [Numbers(pick(values, each), pick(error, each)) for values, error in ((rows, row_error), (others, other_error))]
        for each in (most, least)
    )
    first, second = (high - low for high, low in zip(top, bottom, strict=True))
    scale = read_off(first.values, first.error, second.values, second.error)
    shift = top[1] - scale * top[0]
    allowed = slack(scale, rows, row_error, others, other_error) + shift.error
    if not (np.abs(others - scale.values * rows - shift.values) <= allowed).all():
        raise Unrelated("the tables are not those of a per-channel map")
    shape = (*one.values.shape[:axis], *[1] * pair.mine.known_rank(1), *one.values.shape[axis + 1 :])
    return scale.apply(lambda array: array.reshape(shape)), shift.apply(lambda array: array.reshape(shape))


def recurrent(pair: Couple) -> list[Relation]:
    """W' p = W and Wb' + W' q = Wb, so that the result is the same."""
    pair.mine.bases.require_one_shape(pair.mine.data(0), pair.theirs.data(0))
    mine, theirs = (weights_of_gates(each) for each in (pair.mine, pair.theirs))
    fit = weights.relate(mine, theirs, [Numbers(np.ones(mine.outputs), np.zeros(()))])
    if not (np.abs(fit.scale.values - 1.0) <= fit.scale.error).all() or not fit.shift.is_zero:
        raise Unrelated("its weights do not take back what its data are mapped by")
    pair.agree(fit.agreement)
    return [SAME] * len(pair.mine.node.outputs)


def weights_of_gates(node: Reading) -> Linear:
    stored = node.stored(1)
    shape = stored.shape
    form = node.data(0)
    bias = ZERO
    if node.has(3):
        whole = node.parameter(3)
        if whole.values.shape != (shape[0], 2 * shape[1]):
            raise Unrelated("its bias has another shape")
        bias = whole.apply(lambda array: array[:, : shape[1]])
    scales, offset = node.on_axis(form, -1, shape[2], lambda array: array.reshape(1, 1, -1))
    return Linear(stored, shape, (0, 1), scales, offset, bias, False)


def recurrent_rest(node: Reading) -> Hashable:
    """Return the recurrent part of a bias, which no fold changes."""
    if not node.has(3):
        return None
    rest = node.constant(3)[:, node.constant(3).shape[-1] // 2 :]
    return rest.tobytes() if rest.any() else None


def linear(pair: Couple) -> list[Relation]:
    """Compare two linear operators weight by weight."""
    for index, form in enumerate(pair.mine.forms):
        if form is not None:
            pair.mine.bases.require_one_shape(form, pair.theirs.data(index))
    try:
        mine, theirs = (LINEAR[each.kind](each) for each in (pair.mine, pair.theirs))
    except Unrelated:  # its data are mapped along other axes, perhaps in both models alike
        mine, theirs = (LINEAR[each.kind](each) for each in (pair.rebased().mine, pair.rebased().theirs))
    one, two = mine.linear, theirs.linear
    if one.out != two.out and one.view == two.view[::-1] and len(one.view) == 2:
        two = transposed(two)
    elif pair.same_constants(*LEMMAS[pair.kind].weights):
        two = dataclasses.replace(two, stored=one.stored)
    hints = [hint for each in pair.hints() if (hint := mine.taken(each)) is not None]
    hints.append(Numbers(np.ones(one.outputs), np.zeros(())))
    fit = weights.relate(one, two, hints)
    pair.agree(fit.agreement, mine.placed(fit.sizes))
    return [(fit.scale.apply(mine.placed), fit.shift.apply(mine.placed))]


def transposed(linear: Linear) -> Linear:
    """Turn a matrix, which is small enough to be held."""
    stored = linear.stored
    tensor = ir.tensor(np.ascontiguousarray(stored.tensor.numpy().T))
    turned = [each.apply(lambda array: array.T) for each in (*linear.scales, linear.offset)]
    return dataclasses.replace(
        linear,
        stored=stored._replace(
            tensor=tensor, shape=stored.shape[::-1], error=None if stored.error is None else stored.error.T
        ),
        view=linear.view[::-1],
        out=(1 - linear.out[0],),
        scales=turned[:-1],
        offset=turned[-1],
    )


@dataclasses.dataclass(frozen=True)
class Placed:
    """A linear operator, and the axes of its result, from the last, along which its outputs lie. flat: on one axis."""

    linear: Linear
    axes: tuple[int, ...]
    flat: bool = False

    def placed(self, array: np.ndarray) -> np.ndarray:
        """Bring an array over the outputs onto the axes of the result."""
        if not array.ndim:
            return array
        array = array.reshape(-1) if self.flat else array
        order = sorted(range(len(self.axes)), key=lambda each: self.axes[each])
        shape = [1] * -min(self.axes)
        for each in order:
            shape[self.axes[each]] = array.shape[each]
        return np.transpose(array, order).reshape(shape)

    def taken(self, numbers: Numbers) -> Numbers | None:
        """Bring numbers on the result's axes onto the outputs; None where they depend on other axes."""
        outputs = self.linear.outputs
        sizes = (math.prod(outputs),) if self.flat else outputs
        found = []
        for array in (numbers.values, numbers.error):
            rank = max(array.ndim, -min(self.axes))
            wide = with_rank(array, rank)
            places = [axis % rank for axis in self.axes]
            others = [axis for axis in range(rank) if axis not in places]
            turned = np.transpose(wide, [*places, *others])
            if math.prod(turned.shape[len(places) :]) != 1:
                return None
            turned = turned.reshape(turned.shape[: len(places)])
            if any(turned.shape[place] not in (1, sizes[place]) for place in range(len(places))):
                return None
            found.append(np.broadcast_to(turned, sizes).reshape(outputs))
        return Numbers(*found)


def convolution(node: Reading) -> Placed:
    """Conv, ConvTranspose: groups, then rows and columns of the weight, then positions of the kernel."""
    stored = node.stored(1)
    shape = stored.shape
    group = get_int(node.node, "group", 1)
    turned = node.kind == "ConvTranspose"
    outputs = shape[1] * group if turned else shape[0]
    inputs = shape[0] if turned else shape[1] * group
    rows, rank = shape[0] // group, len(shape)
    view: tuple[int, ...] = (shape[0], shape[1], math.prod(shape[2:]))
    out: tuple[int, ...] = (1,) if turned else (0,)
    read: tuple[int, ...] = (-1, 1, 1) if turned else (1, -1, 1)
    if group > 1:
        view = (group, rows, shape[1], view[2])
        out, read = ((0, 2), (group, -1, 1, 1)) if turned else ((0, 1), (group, 1, -1, 1))
    bias = node.parameter(2) if node.has(2) else ZERO
    if bias is not ZERO:
        if bias.values.shape != (outputs,):
            raise Unrelated("its bias has another shape")
        bias = bias.apply(lambda array: array.reshape([view[axis] for axis in out]))
    form = node.data(0)
    if node.side.place == 0:  # the same weight asks the same of the changed model's data
        node.bases.know(form, 1, inputs, rank)
    scales, offset = node.on_axis(form, 1 - rank, inputs, lambda array: array.reshape(read))
    pads = _mixes(node.node, shape[2:]) if turned else may_pad(node.node)
    return Placed(Linear(stored, view, out, scales, offset, bias, pads), (1 - rank,), flat=True)


def _mixes(node: ir.Node, kernel: Sequence[int]) -> bool:
    """Whether positions of a ConvTranspose are sums of several products, or of none."""
    plain = get_string(node, "auto_pad", "NOTSET") in ("NOTSET", "", "VALID") and "output_shape" not in node.attributes
    ones = all(each == 1 for each in (*kernel, *(get_ints(node, "strides") or ())))
    zeros = not any((*(get_ints(node, "pads") or ()), *(get_ints(node, "output_padding") or ())))
    return not (plain and ones and zeros)


def gemm(node: Reading) -> Placed:
    """alpha A' B' + beta C."""
    stored = node.stored(1)
    shape = stored.shape
    if node.rank(0) not in (None, 2):
        raise Unrelated("its data are no matrix")
    place = 0 if get_flag(node.node, "transB") else 1
    bias = ZERO
    if node.has(2):
        beta = Numbers(np.asarray(get_float(node.node, "beta", 1.0)), np.zeros(()))
        own = node.parameter(2)
        wide = own.values.shape
        if own.values.size not in (1, shape[place]) or len(wide) > 2 or (own.values.size > 1 and wide[-1] == 1):
            raise Unrelated("its bias is no vector")
        bias = (own * beta).apply(lambda array: array.reshape(-1))
    read = (1, -1) if place == 0 else (-1, 1)
    axis = -2 if get_flag(node.node, "transA") else -1
    form = node.data(0)
    scales, offset = node.on_axis(form, axis, shape[1 - place], lambda array: array.reshape(read))
    factor = get_float(node.node, "alpha", 1.0)
    return Placed(Linear(stored, shape, (place,), scales, offset, bias, False, factor), (-1,))


def matmul(node: Reading) -> Placed:
    """X W or W X; a W of more axes has one p and s for all of its matrices."""
    turned = node.forms[0] is None
    stored = node.stored(0 if turned else 1)
    shape = stored.shape
    if len(shape) < 2 or (turned and (node.rank(1) or 0) < 2):
        raise Unrelated("its weight or its data are no matrices")
    data, out, axis = (len(shape) - 1, len(shape) - 2, -2) if turned else (len(shape) - 2, len(shape) - 1, -1)
    read = [1] * len(shape)
    read[data] = -1
    form = node.data(1 if turned else 0)
    scales, offset = node.on_axis(form, axis, shape[data], lambda array: array.reshape(read))
    if len(shape) > 2 and offset is not ZERO:
        raise Unrelated("a shift has no single vector behind several matrices")
    return Placed(Linear(stored, shape, (out,), scales, offset, ZERO, False), (axis,))


def einsum(node: Reading) -> Placed:
    """One value and one constant, by the letters of their axes."""
    place = 0 if node.forms[0] is None else 1
    stored = node.stored(place)
    shape = stored.shape
    rank = node.known_rank(1 - place)
    ranks = (len(shape), rank) if place == 0 else (rank, len(shape))
    first, second, made = _letters(get_string(node.node, "equation", ""), ranks)
    own, read = (first, second) if place == 0 else (second, first)
    out = tuple(axis for axis, letter in enumerate(own) if letter in made)
    form = node.data(1 - place)

    def spread(array: np.ndarray) -> np.ndarray:
        """Bring an array on the axes of the data onto those of the weight."""
        wide = with_rank(array, rank)
        order = [read.index(letter) for letter in own if letter in read]
        rest = [axis for axis in range(rank) if axis not in order]
        turned = iter(np.transpose(wide, [*order, *rest]).shape)
        return np.transpose(wide, [*order, *rest]).reshape([next(turned) if letter in read else 1 for letter in own])

    scales = [form.terms[base].apply(spread) for base in sorted(form.terms)]
    offset = form.shift.apply(spread) if form.shift is not ZERO else ZERO
    if any(letter not in own and letter not in made for letter in read):
        offset = require_no_shift(offset, "a sum over axes that the weight does not have")
    return Placed(
        Linear(stored, shape, out, scales, offset, ZERO, False),
        tuple(made.index(own[axis]) - len(made) for axis in out),
    )


def _letters(equation: str, ranks: tuple[int, int]) -> list[str]:
    """Return a letter for each axis of both operands and of the result."""
    terms, arrow, made = equation.replace(" ", "").partition("->")
    parts = terms.split(",")
    if not arrow:
        raise Unrelated("its equation has another form")
    spare = [rank - len(part.replace("...", "")) for rank, part in zip(ranks, parts, strict=True)]
    batch = "".join(map(chr, range(64)))  # as many as a tensor may have axes, and more
    counts = (*spare, max(spare))
    letters = [part.replace("...", batch[64 - n :]) for part, n in zip((*parts, made), counts, strict=True)]
    if any(len(set(each)) != len(each) for each in letters):
        raise Unrelated("its equation takes a diagonal")
    return letters


# Places of the weight and the bias.
_DEFORMABLE = {"DeformConv": (1, 3), "MMCVDeformConv2d": (2, None), "MMCVModulatedDeformConv2d": (3, 4)}


def deformable(node: Reading) -> Placed:
    """Linear in the data; zeros stand beyond the borders."""
    place, bias_place = _DEFORMABLE[node.kind]
    stored = node.stored(place)
    shape = stored.shape
    group = get_int(node.node, "groups" if "groups" in node.node.attributes else "group", 1)
    axis = 1 - len(shape)
    view = (group, shape[0] // group, shape[1], math.prod(shape[2:]))
    bias = ZERO
    if bias_place is not None and node.has(bias_place):
        bias = node.parameter(bias_place)
        if bias.values.shape != shape[:1]:
            raise Unrelated("its bias has another shape")
        bias = bias.apply(lambda array: array.reshape(view[:2]))
    scales, offset = node.on_axis(node.data(0), axis, group * shape[1], lambda array: array.reshape(group, 1, -1, 1))
    return Placed(Linear(stored, view, (0, 1), scales, offset, bias, True), (axis,), flat=True)


LINEAR: dict[str, Callable[[Reading], Placed]] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), convolution),
    "Gemm": gemm,
    "MatMul": matmul,
    "Einsum": einsum,
    **dict.fromkeys(_DEFORMABLE, deformable),
}


def product_axis(node: Reading) -> Hashable:
    """Return where the rows of a matrix product lie."""
    turned = node.kind == "Gemm" and get_flag(node.node, "transA")
    # Of data whose rank is not known, a Gemm says that it is 2.
    return -2 if turned else -1, node.forms[0] is None, node.kind if node.rank(0) is None else ""


@dataclasses.dataclass(frozen=True)
class Lemma:
    """What is known of an operator.

    data: places of the operands that may be related, None for all. weights: of constants that `relates` compares. own: attributes
    that it compares. family: of operators that count as one. more: what two nodes have to have in common beside attributes.
    unread: places of operands that the operator does not read.
    """

    maps: Callable[[Reading], Form] | None = None
    relates: Callable[[Couple], list[Relation]] | None = None
    data: tuple[int, ...] | None = (0,)
    weights: tuple[int, ...] = ()
    own: frozenset[str] = frozenset()
    family: str = ""
    more: Callable[[Reading], Hashable] | None = None
    unread: Callable[[Reading], tuple[int, ...]] | None = None


_GEMM = frozenset(("alpha", "beta", "transA", "transB"))
LEMMAS: dict[str, Lemma] = {
    **dict.fromkeys(("Add", "Sub", "Sum"), Lemma(maps=sums, data=None)),
    **dict.fromkeys(("Mul", "Div"), Lemma(maps=products, relates=multiplied, data=(0, 1))),
    "Neg": Lemma(maps=negated),
    "BatchNormalization": Lemma(maps=normalised),
    **dict.fromkeys(("Cast", "CastLike"), Lemma(maps=casted)),
    **dict.fromkeys(
        ("InstanceNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization"),
        Lemma(maps=scaled_core, data=(), weights=(1, 2)),
    ),
    "Conv": Lemma(maps=pointwise, relates=linear, weights=(1, 2)),
    "ConvTranspose": Lemma(relates=linear, weights=(1, 2)),
    "Gemm": Lemma(relates=linear, weights=(1, 2), own=_GEMM, family="product", more=product_axis),
    "MatMul": Lemma(relates=linear, data=(0, 1), weights=(0, 1), family="product", more=product_axis),
    "Einsum": Lemma(relates=linear, data=(0, 1), weights=(0, 1)),
    "DeformConv": Lemma(relates=linear, weights=(1, 3)),
    "MMCVDeformConv2d": Lemma(relates=linear, weights=(2,)),
    "MMCVModulatedDeformConv2d": Lemma(relates=linear, weights=(3, 4)),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), Lemma(relates=recurrent, weights=(1, 3), more=recurrent_rest)),
    **dict.fromkeys(("Relu", "LeakyRelu", "PRelu"), Lemma(relates=homogeneous)),
    **dict.fromkeys(("MaxPool", "GlobalMaxPool", "ReduceMax"), Lemma(relates=maxima)),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum"), Lemma(relates=means)),
    **dict.fromkeys(("Resize", "Upsample"), Lemma(relates=resized, unread=unread_region)),
    **dict.fromkeys((*MOVEMENTS, "DepthToSpace"), Lemma(relates=moved)),
    "Gather": Lemma(relates=gathered, weights=(0,)),
    "Concat": Lemma(relates=joined, data=None, weights=tuple(range(64))),
    **dict.fromkeys(("Shape", "Size"), Lemma(relates=asked)),
}
