"""Operators that move elements, repeat them, or leave some out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.forms.case import DATA, Case, Operand, Other, Setting, axes_of, form

LARGE = np.iinfo(np.int64).max


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def reshape(setting: Setting) -> Iterator[Case]:
    shape, size = setting.shape, int(np.prod(setting.shape))
    targets: list[Sequence[int]] = [shape, (-1,), (1, -1), (size,)]
    if setting.rank >= 2:
        n, c, *rest = shape
        inner = int(np.prod(rest))
        targets += [
            (0, -1),
            (0, 0, -1),
            (n, c, -1),
            (-1, c, *rest),
            (n * c, *rest),
            (n, c * inner),
            (c, n, *rest),
            (-1, c),
        ]
        targets += [(n, c, *rest[::-1]), (n, *rest, c), (0, c, inner), (0, 1, *shape[1:]), (0, -1, *rest), (1, *shape)]
        targets += [(*shape, 1), (n, c, 1, *rest), (c, n, -1), (-1, *rest), (0,) * setting.rank, (n, -1, c)]
        if c % 2 == 0:
            targets += [(n, 2, c // 2, *rest), (0, c // 2, -1), (n * 2, c // 2, *rest)]
        if rest and rest[-1] % 2 == 0:
            targets += [(n, c, *rest[:-1], 2, rest[-1] // 2), (n, c * 2, *rest[:-1], rest[-1] // 2)]
    for target in targets:
        yield from (form(DATA, integers(*target), **each) for each in setting.each({"allowzero": [0, 1]}))


def transpose(setting: Setting) -> Iterator[Case]:
    orders = list(itertools.permutations(range(setting.rank)))
    chosen = orders if len(orders) <= 24 else [orders[i] for i in setting.generator.permutation(len(orders))[:24]]
    yield from map(Case, setting.each({"perm": [list(order) for order in chosen]}))


def flatten(setting: Setting) -> Iterator[Case]:
    if setting.rank:
        yield from map(Case, setting.each({"axis": [*axes_of(setting.rank), setting.rank]}))


def squeeze(setting: Setting) -> Iterator[Case]:
    single = [axis for axis, size in enumerate(setting.shape) if size == 1]
    sets = [[axis] for axis in single] + [[axis - setting.rank] for axis in single] + [[]] * bool(single)
    sets += [single, single[::-1], [each - setting.rank for each in single]] if len(single) > 1 else []
    yield form()
    yield from _with_axes(setting, sets)


def unsqueeze(setting: Setting) -> Iterator[Case]:
    rank = setting.rank
    yield from _with_axes(setting, [[axis] for axis in range(-rank - 1, rank + 1)] + [[0, 1], [1, 2], [0, -1], [2, 0]])


def _with_axes(setting: Setting, sets: Sequence[Sequence[int]], **others: Any) -> Iterator[Case]:
    """The axes are an attribute in older versions, an input in newer ones."""
    for axes in sets:
        yield form(axes=list(axes), **others) if setting.knows("axes") else form(DATA, integers(*axes), **others)


def reduction(setting: Setting) -> Iterator[Case]:
    rank = setting.rank
    sets: list[list[int]] = [[axis] for axis in axes_of(rank)]
    sets += [list(pair) for pair in itertools.combinations(range(rank), 2)]
    sets += [list(range(2, rank)), list(range(-1, 1 - rank, -1)), list(range(rank)), [0, *range(2, rank)]]
    for others in setting.each({"keepdims": [0, 1], "noop_with_empty_axes": [0, 1]}):
        yield form(**others)
        yield from _with_axes(setting, sets if setting.knows("axes") else [[], *sets], **others)


def concat(setting: Setting) -> Iterator[Case]:
    for axis in axes_of(setting.rank):
        shape = list(setting.shape)
        shape[axis] = 2
        constant, other = setting.floats(*shape), Other(tuple(shape))
        operands: list[list[Operand]] = [[DATA], [DATA, DATA], [DATA, constant], [constant, DATA], [DATA, other]]
        operands += [[other, DATA, constant], [setting.floats(*setting.shape), DATA]]
        yield from (form(*each, axis=axis) for each in operands)


def split(setting: Setting) -> Iterator[Case]:
    def equal(count: int) -> dict[str, int]:
        return {"num_outputs": count} if setting.knows("num_outputs") else {}

    yield Case(equal(2), outputs=2)
    for axis in axes_of(setting.rank):
        size = setting.shape[axis]
        for parts in ([size], [1, size - 1], [size // 2, size - size // 2], [size, 0], [1] * size):
            if not parts or min(parts) < 0 or len(parts) > 4:
                continue
            for read in {0, len(parts) - 1}:
                of = {"outputs": len(parts), "read": read, "axis": axis}
                yield form(**of, split=parts) if setting.knows("split") else form(DATA, integers(*parts), **of)
                yield form(**of, **equal(len(parts)))


def slices(setting: Setting) -> Iterator[Case]:
    def of(*parts: Sequence[int] | None) -> Case:
        """starts, ends, axes and steps"""
        if setting.knows("starts"):
            names = zip(("starts", "ends", "axes"), parts)
            return Case({name: list(each) for name, each in names if each is not None})
        return form(DATA, *(None if each is None else integers(*each) for each in parts))

    for axis in axes_of(setting.rank):
        size = setting.shape[axis]
        for start, end, step in (
            *((0, size, 1), (1, LARGE, 1), (-2, LARGE, 1), (0, -1, 1), (1, 2, 1), (-LARGE, LARGE, 1), (0, 0, 1)),
            *((0, LARGE, 2), (1, LARGE, 3), (-1, -LARGE, -1), (LARGE, 0, -2), (size, 2 * size, 1)),
        ):
            if not setting.knows("starts"):
                yield of([start], [end], [axis], [step])
            if step == 1:
                yield of([start], [end], [axis])
    for starts, ends in (([1], [LARGE]), ([0, 1], [LARGE, LARGE]), ([0] * setting.rank, [3] * setting.rank)):
        yield of(starts, ends)
        if not setting.knows("starts"):
            yield of(starts, ends, None, [1] * len(starts))
            yield of(starts, ends, range(-1, -1 - len(starts), -1))


def pad(setting: Setting) -> Iterator[Case]:
    rank = setting.rank
    for mode in (None, "constant", "reflect", "edge", *(["wrap"] if setting.version >= 19 else [])) if rank else ():
        base = {} if mode is None else {"mode": mode}
        for pads in _pads(rank):
            if setting.knows("pads"):
                yield form(**base, pads=pads)
                yield form(**base, pads=pads, value=1.5)
            else:
                for value in ((), (np.float32(0),), (np.float32(1.5),)):
                    yield form(DATA, integers(*pads), *value, **base)
        for axes in ([1], [-1], [2], [-2, -1], [rank - 1, 0], [0]) if setting.version >= 18 else ():
            for before, behind in ((1, 1), (1, 0), (0, -1)):
                ends = integers(*[before] * len(axes), *[behind] * len(axes))
                yield form(DATA, ends, None, integers(*axes), **base)


def _pads(rank: int) -> Iterator[list[int]]:
    yield [0] * (2 * rank)
    for axis in range(rank):
        for before, behind in ((1, 0), (0, 2), (1, 1), (-1, 0), (0, -1), (1, -1)):
            pads = [0] * (2 * rank)
            pads[axis], pads[axis + rank] = before, behind
            yield pads
    if rank > 2:
        yield [0, 0, *[1] * (rank - 2)] * 2


def blocks(setting: Setting) -> Iterator[Case]:
    if setting.rank != 4:
        return
    _, channels, height, width = setting.shape
    for size in (1, 2, 4):
        rest = channels % size**2 if setting.op_type == "DepthToSpace" else height % size or width % size
        if not rest:
            yield from map(Case, setting.each({"mode": ["DCR", "CRD"]}, {"blocksize": size}))


def gather(setting: Setting) -> Iterator[Case]:
    for axis in [None, *axes_of(setting.rank)]:
        size = setting.shape[axis or 0] if setting.rank else 0
        last = max(0, size - 1)
        for indices in (np.int64(0), np.int64(-1), integers(last), integers(0, last), integers(*range(size))[::-1].copy(),
                        integers(*range(size)), np.array([[0, -1], [last, 0]]), np.array([last, 0], np.int32)):  # fmt: skip
            yield Case({} if axis is None else {"axis": axis}, (DATA, np.asarray(indices)))


def expand(setting: Setting) -> Iterator[Case]:
    shape, ones = setting.shape, (1,) * setting.rank
    targets = [
        shape,
        ones,
        (1,),
        (1, *shape),
        (3, *shape),
        shape[1:],
        tuple(3 if s == 1 else s for s in shape),
        (2, 1, *shape),
    ]
    targets += [(*ones[:axis], 3, *ones[axis + 1 :]) for axis in range(setting.rank)]
    yield from (form(DATA, integers(*target)) for target in targets)


def tile(setting: Setting) -> Iterator[Case]:
    ones = (1,) * setting.rank
    for count in (2, 0):
        yield form(DATA, integers(*ones))
        yield from (form(DATA, integers(*ones[:axis], count, *ones[axis + 1 :])) for axis in range(setting.rank))


def shape_of(setting: Setting) -> Iterator[Case]:
    ends = [-setting.rank - 1, -1, 0, 1, 2, setting.rank, setting.rank + 3]
    yield from map(Case, setting.each({"start": ends, "end": ends}))
