"""Operators that move elements: what they do to the coefficients of a per-channel map.

Coefficients are arrays that broadcast to the data from the right. An entry reads the node once, and returns a function that
gives the coefficients of each output. It raises Unrelated where these are no coefficients of single channels any more:
where the axis along which they differ is joined with one whose size is not known, or new elements are put in.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from bnexport.graph.nodes import get_flag, get_int, get_ints, get_string
from bnexport.graph.shapes import Shape
from bnexport.verification.proof.relations import Numbers, Reading, Relation, Unrelated, require_ones, with_rank

Move = Callable[[np.ndarray], list[np.ndarray]]


def positive_axes(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(sorted(axis + rank if axis < 0 else axis for axis in axes))


def _transposed(node: Reading) -> Move:
    rank = node.known_rank()
    order = get_ints(node.node, "perm") or tuple(range(rank))[::-1]
    return lambda array: [np.transpose(with_rank(array, rank), order)]


def _squeezed(node: Reading) -> Move:
    rank, axes = node.known_rank(), node.ints(1, "axes")
    if not axes:
        raise Unrelated("its axes are not known")
    gone = positive_axes(axes, rank)
    return lambda array: [np.squeeze(require_ones(array, gone, rank), gone)]


def _unsqueezed(node: Reading) -> Move:
    rank, axes = node.known_rank(), node.ints(1, "axes")
    if not axes:
        raise Unrelated("its axes are not known")
    new = positive_axes(axes, rank + len(axes))
    return lambda array: [np.expand_dims(with_rank(array, rank), new)]


def _some(array: np.ndarray) -> np.ndarray:
    """Return what is taken of an array. Raises Unrelated for nothing, which is in every proportion."""
    if not array.size:
        raise Unrelated("it takes no channel")
    return array


def _sliced(node: Reading) -> Move:
    rank = node.known_rank()
    starts, ends, axes, steps = (node.ints(index, name) for index, name in enumerate(("starts", "ends", "axes", ""), 1))
    if axes is None:
        if node.has(3):
            raise Unrelated("its axes are not known")
        axes = tuple(range(len(starts) if starts is not None else rank))
    cut = [axis % rank for axis in axes]
    if starts is None or ends is None or (steps is None and node.has(4)):
        return lambda array: [require_ones(array, cut, rank)]
    bounds = list(zip(cut, starts, ends, steps or (1,) * len(cut), strict=True))

    def move(array: np.ndarray) -> list[np.ndarray]:
        wide = with_rank(array, rank)
        for axis, start, end, step in bounds:
            size = wide.shape[axis]
            if size != 1:
                last = None if step < 0 and end < -size else end
                wide = _some(wide[tuple([slice(None)] * axis + [slice(start, last, step)])])
        return [wide]

    return move


def _split(node: Reading) -> Move:
    rank = node.known_rank()
    axis, parts = get_int(node.node, "axis", 0) % rank, len(node.node.outputs)
    sizes = node.ints(1, "split")

    def move(array: np.ndarray) -> list[np.ndarray]:
        wide = with_rank(array, rank)
        size = wide.shape[axis]
        if size == 1:
            return [wide] * parts
        part = math.ceil(size / parts)
        own = sizes or tuple(min(part, size - start) for start in range(0, size, part))
        if sizes is None and node.has(1):
            raise Unrelated("the sizes of its parts are not known")
        return np.split(wide, np.cumsum(own)[:-1], axis)

    return move


def _spread(node: Reading) -> Move:
    """Expand: channels that are there once are no channels of their own."""
    return lambda array: [array]


def _tiled(node: Reading) -> Move:
    rank, repeats = node.known_rank(), node.ints(1)
    if repeats is None:
        raise Unrelated("its repeats are not known")

    def move(array: np.ndarray) -> list[np.ndarray]:
        wide = with_rank(array, rank)
        return [np.tile(wide, [count if size != 1 else 1 for count, size in zip(repeats, wide.shape, strict=True)])]

    return move


def _taken(node: Reading) -> Move:
    """Gather."""
    rank, indices = node.known_rank(), node.known_rank(1)
    axis = get_int(node.node, "axis", 0) % rank

    def move(array: np.ndarray) -> list[np.ndarray]:
        wide = with_rank(array, rank)
        if wide.shape[axis] == 1:
            return [wide.reshape(*wide.shape[:axis], *[1] * indices, *wide.shape[axis + 1 :])]
        return [_some(np.take(wide, node.constant(1), axis))]

    return move


def _to_channels(node: Reading) -> Move:
    block = get_int(node.node, "blocksize", 1) ** 2

    def move(array: np.ndarray) -> list[np.ndarray]:
        wide = require_ones(array, (0, 2, 3), 4)
        return [wide if wide.size == 1 else np.tile(wide, (1, block, 1, 1))]

    return move


def _padded(node: Reading) -> Move:
    """Pad puts in numbers of the data, or zeros."""
    rank = node.known_rank()
    pads, axes = node.ints(1, "pads"), node.ints(3)
    if pads is None or (axes is None and node.has(3)):
        raise Unrelated("its pads are not known")
    chosen = [axis % rank for axis in axes] if axes is not None else list(range(rank))
    wide = [axis for place, axis in enumerate(chosen) if pads[place] or pads[place + len(chosen)]]
    return lambda array: [require_ones(array, wide, rank)]


def fills_with_zeros(node: Reading) -> bool:
    """Whether a Pad puts in constants. Raises Unrelated for others than 0."""
    pads, mode = node.ints(1, "pads"), get_string(node.node, "mode", "constant")
    if mode in ("reflect", "edge", "wrap") or (pads is not None and all(pad <= 0 for pad in pads)):
        return False
    value = node.node.attributes.get("value")
    filled = np.any(node.constant(2)) if node.has(2) else value is not None and bool(value.as_float())
    if filled:
        raise Unrelated("it puts in other numbers than 0")
    return True


def _reshaped(node: Reading) -> Move:
    """Reshape and Flatten: axes are joined and split in groups of equal products."""
    before, after = node.shape(0), node.result_shape()
    before = before or (None,) * node.known_rank()
    if node.kind == "Flatten":
        split = get_int(node.node, "axis", 1)
        split += len(before) if split < 0 else 0
        groups = [(range(split), range(1)), (range(split, len(before)), range(1, 2))]
        return lambda array: [_regroup(with_rank(array, len(before)), before, groups, (None, None))]
    target = node.ints(1, "shape")
    if after is None and target is not None:
        after = tuple(size if size > 0 else None for size in target)
    if after is None:
        raise Unrelated("the shape behind it is not known")
    copied = target if target is not None and not get_flag(node.node, "allowzero") else ()
    groups = _groups(before, after, copied)
    return lambda array: [_regroup(with_rank(array, len(before)), before, groups, after)]


def _groups(before: Shape, after: Shape, copied: Sequence[int]) -> list[tuple[range, range]]:
    """Return which axes before become which axes behind: equally many elements in each group."""
    first: list[object] = [size if size is not None else ("before", axis) for axis, size in enumerate(before)]
    second: list[object] = [size if size is not None else ("after", axis) for axis, size in enumerate(after)]
    for axis, size in enumerate(copied):
        if size == 0 and axis < len(first):
            second[axis] = first[axis]
    heads = _matches(first, second)
    tails = [(len(first) - i, len(second) - j) for i, j in _matches(first[::-1], second[::-1])][::-1]
    cuts = sorted(
        {*heads, *(each for each in tails if not heads or (each[0] >= heads[-1][0] and each[1] >= heads[-1][1]))}
    )
    cuts = [
        (0, 0),
        *(each for each in cuts if each not in ((0, 0), (len(first), len(second)))),
        (len(first), len(second)),
    ]
    return [(range(i, k), range(j, m)) for (i, j), (k, m) in itertools.pairwise(cuts)]


def _matches(first: list[object], second: list[object]) -> list[tuple[int, int]]:
    """Return the numbers of axes at the front of both that have equally many elements, in order."""
    found, i, j = [], 0, 0
    while i < len(first) or j < len(second):
        fits = False
        for end, last in sorted(
            ((e, s) for e in range(i, len(first) + 1) for s in range(j, len(second) + 1) if e > i or s > j), key=sum
        ):
            if _product(first[i:end]) == _product(second[j:last]):
                i, j, fits = end, last, True
                found.append((i, j))
                break
        if not fits:
            break
    return found


def _product(sizes: Sequence[object]) -> tuple[int, list[str]]:
    numbers = [size for size in sizes if isinstance(size, int)]
    return math.prod(numbers), sorted(repr(size) for size in sizes if not isinstance(size, int))


def known_sizes(sizes: Sequence[object]) -> list[int]:
    """Return sizes that are numbers. Raises Unrelated."""
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes):
        raise Unrelated("a size is not known")
    return known


def _regroup(array: np.ndarray, before: Shape, groups: Sequence[tuple[range, range]], after: Shape) -> np.ndarray:
    shape: list[int] = []
    full = list(array.shape)
    for read, made in groups:
        sizes = [array.shape[axis] for axis in read]
        if all(size == 1 for size in sizes):
            shape += [1] * len(made)
        elif len(read) == 1 and len(made) == 1:
            shape += sizes
        else:
            wanted = known_sizes([before[axis] for axis in read])
            for axis, known in zip(read, wanted, strict=True):
                full[axis] = known
            shape += [math.prod(wanted)] if len(made) == 1 else known_sizes([after[axis] for axis in made])
    return np.broadcast_to(array, full).reshape(shape)


MOVEMENTS: dict[str, Callable[[Reading], Move]] = {
    "Transpose": _transposed,
    "Squeeze": _squeezed,
    "Unsqueeze": _unsqueezed,
    **dict.fromkeys(("Reshape", "Flatten"), _reshaped),
    "Slice": _sliced,
    "Split": _split,
    "Expand": _spread,
    "Tile": _tiled,
    "Gather": _taken,
    "SpaceToDepth": _to_channels,
    "Pad": _padded,
}


def concatenated(node: Reading, relations: Sequence[Relation]) -> Relation:
    """Join the relations of a Concat's operands along its axis."""
    rank = next((rank for index in range(len(relations)) if (rank := node.rank(index)) is not None), None)
    rank = node.known_rank() if rank is None else rank
    axis = get_int(node.node, "axis", 1) % rank
    sizes = [None if (shape := node.shape(index)) is None else shape[axis] for index in range(len(relations))]
    return _joined([scale for scale, _ in relations], sizes, axis, rank), _joined(
        [shift for _, shift in relations], sizes, axis, rank
    )


def positions(node: Reading, numbers: Numbers) -> Numbers:
    """DepthToSpace: channels that become positions of one have to be mapped alike."""
    if numbers.shape == ():
        return numbers
    block = get_int(node.node, "blocksize", 1) ** 2
    parts = []
    for array in np.broadcast_arrays(numbers.values, numbers.error):
        wide = require_ones(array, (0, 2, 3), 4).reshape(-1)
        parts.append(
            wide.reshape(-1, block).T if get_string(node.node, "mode", "DCR") == "CRD" else wide.reshape(block, -1)
        )
    return alike([Numbers(*each) for each in zip(*parts, strict=True)]).apply(lambda array: array.reshape(1, -1, 1, 1))


def alike(parts: Sequence[Numbers]) -> Numbers:
    """Return the numbers that all parts are, within their errors. Raises Unrelated where they differ."""
    first = parts[0]
    if all(part is first for part in parts):
        return first
    error = first.error
    for part in parts[1:]:
        spread = np.abs(part.values - first.values)
        if not (spread <= part.error + first.error).all():
            raise Unrelated("parts of one channel are mapped in several ways")
        error = np.maximum(error, spread + part.error)
    return Numbers(np.broadcast_to(first.values, error.shape) if np.ndim(error) else first.values, error)


def _joined(parts: Sequence[Numbers], sizes: Sequence[object], axis: int, rank: int) -> Numbers:
    wides = [part.apply(lambda array: with_rank(array, rank)) for part in parts]
    if all(part.shape == () or part.shape[axis] == 1 for part in wides):
        with contextlib.suppress(Unrelated):
            return alike(wides)
    counts, arrays = known_sizes(sizes), []
    for which in ("values", "error"):
        wide = [with_rank(np.asarray(getattr(part, which)), rank) for part in parts]
        others = np.broadcast_shapes(*(each.shape[:axis] + (1,) + each.shape[axis + 1 :] for each in wide))
        full = [
            np.broadcast_to(each, (*others[:axis], size, *others[axis + 1 :]))
            for each, size in zip(wide, counts, strict=True)
        ]
        arrays.append(np.concatenate(full, axis))
    return Numbers(*arrays)
