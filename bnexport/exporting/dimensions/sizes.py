"""Other sizes for the dynamic dimensions of a model's inputs, and inputs of these sizes.

Dimensions that have to be equal mostly have the same size and place in the example: those change together, as a group.
A model may ask for more - multiples of 32, equal height and width, an input at half the size of another - so each
stage of `stages` (larger, odd, smaller) has several alternatives, and the first that the model runs at is taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

Tensors = tuple[torch.Tensor, ...]
Shapes = tuple[tuple[int, ...], ...]

# Dimensions of networks are multiples of up to 32: the product of their strides.
_LARGEST_STEP = 32
# Elements of all inputs together, relative to the example's; small examples may grow up to the second. The last is for a size
# beyond a limit that the model's code asks for.
_LARGEST_GROWTH = 2.0
_SMALL = 1 << 16
_LARGEST = 1 << 22
# A far size is a prime above this and above four times the example's.
_FAR = 128


@dataclasses.dataclass(frozen=True)
class DimensionGroup:
    """Dimensions that change together.

    place: 0 for batches, else counted from the end, as -1. size: in the example. axes: (input, dimension).
    """

    place: int
    size: int
    axes: tuple[tuple[int, int], ...]


Changes = dict[DimensionGroup, int]
_Move = Callable[[int, int], int]


def groups(inputs: Tensors, dynamic: Sequence[Collection[int]]) -> list[DimensionGroup]:
    """Return the groups of the dynamic dimensions, batches first. dynamic: dimensions of each input."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, (tensor, dimensions) in enumerate(zip(inputs, dynamic)):
        for dimension in sorted(dimensions):
            place = dimension - tensor.dim() if dimension else 0
            found.setdefault((place, tensor.shape[dimension]), []).append((index, dimension))
    made = [DimensionGroup(place, size, tuple(axes)) for (place, size), axes in found.items()]
    return sorted(made, key=lambda group: (group.place != 0, group.place, group.size))


def smallest_batch(inputs: Tensors, groups: Sequence[DimensionGroup]) -> list[Changes]:
    """Return the changes that make every batch one row."""
    return allowed(inputs, [{group: 1 for group in groups if group.place == 0}])


def stages(inputs: Tensors, groups: Sequence[DimensionGroup], *, one: bool) -> list[list[Changes]]:
    """Return lists of alternatives, which change several groups at once: far larger, odd and smaller sizes, other
    batches.

    In the first two one dimension becomes far larger; large images become narrower by as much. one: whether the model runs on
    batches of one, which leave room for larger images.
    """
    batches = [group for group in groups if group.place == 0]
    spatial = [group for group in groups if group.place != 0]
    order = {place: index for index, place in enumerate(sorted({group.place for group in spatial}))}
    last = len(order) - 1

    def alternatives(moves: Iterable[_Move], *choices: Callable[[int], int]) -> list[Changes]:
        return allowed(
            inputs,
            (
                {group: batch(group.size) for group in batches}
                | {group: move(group.size, order[group.place]) for group in spatial}
                for move in moves
                for batch in choices
            ),
        )

    def first(change: Callable[[int], int]) -> _Move:
        return lambda n, j: change(n) if j == 0 else n

    def final(change: Callable[[int], int]) -> _Move:
        return lambda n, j: change(n) if j == last else n

    def strip(place: int, long: Callable[[int], int], short: Callable[[int], int]) -> _Move:
        return lambda n, j: long(n) if j == place else short(n)

    # None keeps the area: a flattened image fits into a Linear then, and at hardly any other size.
    larger: list[_Move] = [
        strip(0, _far, _same),
        strip(0, _far, _quarter),
        strip(0, _four_times, _half),
        lambda n, j: n + (j + 1) * _step(n),
        final(_double),
        first(_stepped),
        lambda n, _: n + n // 2,
    ]
    wide: list[_Move] = [strip(last, _far, _same), strip(last, _far, _quarter), strip(last, _four_times, _half)]
    odd: list[_Move] = [lambda n, j: (n + max(1, n * (last - j + 1) // 6)) | 1, final(_odd)]
    smaller: list[_Move] = [lambda n, _: n // 2, lambda n, _: n - _step(n), first(_half)]
    if not spatial:
        return [
            alternatives([lambda n, _: n], _far, _double),
            alternatives([lambda n, _: n], lambda n: 3 if n == 1 else n + 1, _triple),
        ]
    return [
        alternatives(larger, _one if one else _same),
        alternatives([*(wide if last else ()), *odd], _next, _same),
        alternatives(smaller, _many, _triple, _double),
    ]


def alone(inputs: Tensors, group: DimensionGroup) -> list[Changes]:
    """Return changes of one group only."""
    return allowed(inputs, ({group: move(group.size)} for move in _SINGLE))


def together(inputs: Tensors, group: DimensionGroup, groups: Sequence[DimensionGroup]) -> list[Changes]:
    """Return changes of a group and of others that may be tied to it: of its size, or all but batches."""
    tied = [other for other in groups if other.size == group.size and (other.place == 0) is (group.place == 0)]
    spatial = [other for other in groups if other.place != 0] if group.place else []
    sets = [each for each in (tied, spatial) if len(each) > 1 and group in each]
    return allowed(inputs, ({other: move(other.size) for other in each} for each in sets for move in _SINGLE))


def resized(inputs: Tensors, changes: Changes) -> Tensors:
    """Create inputs of other sizes: float values drawn from the example's, others repeated in their order.

    Where the example is one number throughout, as zeros are, random numbers above it: on equal values a wrong pooling
    or a wrong order looks right.
    """
    generator = torch.Generator().manual_seed(0)
    return tuple(_resized(tensor, shape, generator) for tensor, shape in zip(inputs, shapes(inputs, changes)))


def shapes(inputs: Tensors, changes: Changes) -> Shapes:
    """Return the shapes of the inputs with these changes."""
    sizes = [list(tensor.shape) for tensor in inputs]
    for group, size in changes.items():
        for index, dimension in group.axes:
            sizes[index][dimension] = size
    return tuple(tuple(shape) for shape in sizes)


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether a float tensor holds one number throughout."""
    return tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all())


def beyond(inputs: Tensors, group: DimensionGroup, size: int, groups: Sequence[DimensionGroup]) -> list[Changes]:
    """Return changes of one group to a size beyond a limit; batches become one where that is too large."""
    batches = {other: 1 for other in groups if other.place == 0 and other is not group}
    return allowed(inputs, [{group: size}, {**batches, group: size}], most=_LARGEST)


def allowed(inputs: Tensors, candidates: Iterable[Changes], *, most: float = _SMALL) -> list[Changes]:
    """Return actual changes without repetitions, of at most twice the elements, or `most`."""
    most = max(_LARGEST_GROWTH * sum(tensor.numel() for tensor in inputs), most)

    def fitting() -> Iterator[Changes]:
        for candidate in candidates:
            changes = {group: size for group, size in candidate.items() if size != group.size and size > 0}
            if changes and sum(map(math.prod, shapes(inputs, changes))) <= most:
                yield changes

    found: list[Changes] = []
    for changes in fitting():
        if changes not in found:
            found.append(changes)
    return found


def _resized(tensor: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        for dimension, size in enumerate(shape):
            index = torch.arange(size, device=tensor.device) % max(tensor.shape[dimension], 1)
            tensor = tensor.index_select(dimension, index)
        return tensor
    if is_constant(tensor):
        value = float(tensor.flatten()[0])
        noise = torch.rand(shape, generator=generator, dtype=torch.float64) * max(abs(value), 1.0)
        return (value + noise).to(tensor.device, tensor.dtype)
    index = torch.randint(tensor.numel(), shape, generator=generator)
    return tensor.detach().flatten()[index.to(tensor.device)]


def _step(n: int) -> int:
    """Return the largest power of two that divides a size, up to 32."""
    return min(n & -n, _LARGEST_STEP)


def _same(n: int) -> int:
    return n


def _one(n: int) -> int:
    return 1


def _double(n: int) -> int:
    return 2 * n


def _triple(n: int) -> int:
    return 3 * n


def _many(n: int) -> int:
    """Return a multiple of 3, as of models that take their batch apart, above four times a batch."""
    return 9 if n <= 2 else 3 * (4 * n // 3 + 1)


def _four_times(n: int) -> int:
    return 4 * n


def _quarter(n: int) -> int:
    return n // 4


def _far(n: int) -> int:
    """Return the next prime above 128 and above four times a size."""
    size = max(_FAR, 4 * n) + 1
    while any(size % divisor == 0 for divisor in range(2, math.isqrt(size) + 1)):
        size += 1
    return size


def _next(n: int) -> int:
    return n + 1


def _half(n: int) -> int:
    return n // 2


def _stepped(n: int) -> int:
    return n + _step(n)


def _odd(n: int) -> int:
    return (n + max(1, n // 8)) | 1


_SINGLE: tuple[Callable[[int], int], ...] = (
    _double,
    _stepped,
    _half,
    lambda n: n + 1,
    lambda n: n + n // 2,
)
