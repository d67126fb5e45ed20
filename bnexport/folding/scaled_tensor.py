"""A weight times a factor for each of its slices, computed block by block.

    W'[s, j] = round(W[s, j] * factor[s])          in float64, rounded once to the type of W

A slice s is the set of elements that share one factor. A large weight is never held in float64, and one
that lies in a file is never held at all: it is read, scaled and written in blocks, each time it is asked
for. What the type cannot hold is found by a pass over the same blocks, either before (`check_scaled`) or
while they are scaled, which saves reading the weight twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.errors import MalformedModelError
from bnexport.folding.affine import Outputs, check_range, holds
from bnexport.graph.evaluate import read_tensor
from bnexport.model_io import ContainedTensor

# Elements of a block: 2 MiB in float64, so that a block and its product stay in the cache.
_BLOCK = 1 << 18

# Largest weight, in elements, to keep in memory.
_SMALL = 1 << 14

# The types of parameters.
FLOAT_DATA_TYPES = frozenset((ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE))

Index = tuple[slice, ...]


def is_small(view: tuple[int, ...]) -> bool:
    """Whether a weight of this shape is small enough to keep in memory."""
    return math.prod(view) <= _SMALL


def scale_small(
    weight: ir.TensorProtocol, factor: np.ndarray, view: tuple[int, ...], outputs: Outputs | None = None
) -> np.ndarray:
    """Multiply a small weight, in the shape `view`, by `factor`, in its own type and shape; Refused as
    `check_scaled`.
    """
    array = read_tensor(weight)
    product = np.multiply(array.reshape(view), factor, dtype=np.float64)
    if product.size:
        largest = np.maximum.reduce(np.abs(product), axis=_shared(factor), keepdims=True)
        if not holds(largest, array.dtype):
            check_scaled(array, factor, view, outputs)
    return product.astype(array.dtype).reshape(array.shape)


class ScaledTensor(ir.LazyTensor):
    """Product of `base`, in the shape `view`, and `factor`, which broadcasts to it and has its rank. Nothing is kept
    in memory.

    checked: `check_scaled` has accepted it. Otherwise whatever asks for all elements gets Refused, behind the last
    one, where their type cannot hold them. outputs: as `check_scaled` takes it.
    """

    __slots__ = ("_base", "_checked", "_factor", "_outputs", "_view")

    def __init__(
        self,
        base: ir.TensorProtocol,
        factor: np.ndarray,
        view: tuple[int, ...],
        *,
        checked: bool = True,
        outputs: Outputs | None = None,
    ) -> None:
        super().__init__(self._compute, base.dtype, ir.Shape(base.shape.numpy()), name=base.name)
        self._base = base
        self._factor = factor
        self._view = view
        self._checked = checked
        self._outputs = outputs

    @property
    def base(self) -> ir.TensorProtocol:
        """The tensor before it was scaled."""
        return self._base

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the scaled elements in order, as contiguous arrays of the tensor's type, each valid until the next."""
        extent = None if self._checked else _Extent(self._factor)
        # Memory that is used again stays in the cache and costs no page faults: half of the time at 250 MB.
        product, rounded = np.empty(0), np.empty(0, self.dtype.numpy())
        for index, block in blocks(self._base, self._view):
            if extent is not None:
                extent.see(index, block)
            if product.size < block.size:
                product, rounded = np.empty(block.size), np.empty(block.size, rounded.dtype)
            exact = product[: block.size].reshape(block.shape)
            np.copyto(exact, block)
            exact *= self._factor[at(self._factor, index)]
            result = rounded[: block.size].reshape(block.shape)
            with np.errstate(over="ignore"):  # the extent tells
                np.copyto(result, exact, casting="same_kind")
            yield result
        if extent is not None:
            extent.check(rounded.dtype, self._outputs)

    def tofile(self, file: Any) -> None:
        """Write the bytes block by block."""
        for block in self.blocks():
            file.write(block.reshape(-1).view(np.uint8).data)

    def _compute(self) -> ir.Tensor:
        array = np.empty(self.shape.numpy(), self.dtype.numpy())
        flat, start = array.reshape(-1), 0
        for block in self.blocks():
            flat[start : start + block.size] = block.reshape(-1)
            start += block.size
        return ir.Tensor(array)


class _Extent:
    """The largest magnitude of each slice, updated block by block. factor has one element for each slice."""

    def __init__(self, factor: np.ndarray) -> None:
        self._factor = factor
        self._largest: np.ndarray | None = None
        self._shared = _shared(factor)

    def see(self, index: Index, block: np.ndarray) -> None:
        if block.size == 0:
            return
        # max(|w|) without an array of magnitudes.
        highest = np.maximum(
            block.max(axis=self._shared, keepdims=True), -block.min(axis=self._shared, keepdims=True)
        ).astype(np.float64)
        if self._largest is None:
            if highest.shape == self._factor.shape:
                self._largest = highest
                return
            self._largest = np.zeros(self._factor.shape)
        part = self._largest[at(self._largest, index)]
        np.maximum(part, highest, out=part)

    def check(self, dtype: np.dtype, outputs: Outputs | None = None) -> None:
        """Raise Refused if `dtype` cannot represent the result, after every block has been seen."""
        if self._largest is not None:
            check_range(self._largest, np.abs(self._factor), dtype, outputs)


def _shared(factor: np.ndarray) -> tuple[int, ...]:
    """Return the axes along which elements have the same factor."""
    return tuple(axis for axis, size in enumerate(factor.shape) if size == 1)


def check_scaled(
    weight: ir.TensorProtocol | np.ndarray,
    factor: np.ndarray,
    view: tuple[int, ...],
    outputs: Outputs | None = None,
) -> None:
    """Raise Refused for a scaling that the weight's type cannot represent (`affine.check_range`).

    `factor` has the view's rank; the shift of `outputs` broadcasts to it.
    """
    extent, dtype = _Extent(factor), np.dtype(np.float64)
    for index, block in blocks(weight, view):
        extent.see(index, block)
        dtype = block.dtype
    extent.check(dtype, outputs)


def weighted_sums(
    weight: ir.TensorProtocol | np.ndarray, factor: np.ndarray, view: tuple[int, ...], kept: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Sum weight * factor over all axes except `kept`, in float64; return the sums and the sums of the magnitudes.

    factor broadcasts to `view` and has its rank. Both results have the sizes of the kept axes.
    """
    others = tuple(axis for axis in range(len(view)) if axis not in kept)
    shape = tuple(size if axis in kept else 1 for axis, size in enumerate(view))
    total, magnitude = np.zeros(shape), np.zeros(shape)
    for index, block in blocks(weight, view):
        terms = block.astype(np.float64)
        terms *= factor[at(factor, index)]
        place = at(total, index)
        total[place] += terms.sum(axis=others, keepdims=True)
        magnitude[place] += np.abs(terms, out=terms).sum(axis=others, keepdims=True)
    sizes = [view[axis] for axis in kept]
    return total.reshape(sizes), magnitude.reshape(sizes)


def blocks(tensor: ir.TensorProtocol | np.ndarray, view: tuple[int, ...]) -> Iterator[tuple[Index, np.ndarray]]:
    """Yield the tensor in the shape `view` in pieces: position and elements, valid until the next piece."""
    if isinstance(tensor, ContainedTensor) and tensor.dtype.bitwidth >= 8:
        dtype = tensor.dtype.numpy().newbyteorder("<")
        with tensor.file.open() as file:
            file.seek(tensor.offset or 0)
            buffer = np.empty(0, dtype)
            for index in _indices(view):
                shape = tuple(place.stop - place.start for place in index)
                if buffer.size < math.prod(shape):
                    buffer = np.empty(math.prod(shape), dtype)
                block = buffer[: math.prod(shape)]
                _read_into(file, block.view(np.uint8).data, tensor.name)
                yield index, block.reshape(shape)
        return
    array = (tensor if isinstance(tensor, np.ndarray) else read_tensor(tensor)).reshape(view)
    for index in _indices(view):
        yield index, array[index]


def at(factor: np.ndarray, index: Index) -> Index:
    """Return the position of the factors of a piece."""
    return tuple(slice(None) if size == 1 else place for size, place in zip(factor.shape, index, strict=True))


def _indices(view: tuple[int, ...]) -> Iterator[Index]:
    """Yield contiguous pieces of at most _BLOCK elements, or of one element of the axis that must be cut."""
    whole = tuple(slice(0, size) for size in view)
    if math.prod(view) <= _BLOCK:
        yield whole
        return
    axis, step = len(view) - 1, 1
    while axis > 0 and step * view[axis] <= _BLOCK:
        step *= view[axis]
        axis -= 1
    rows = max(1, _BLOCK // step)
    for outer in np.ndindex(*view[:axis]):
        head = tuple(slice(place, place + 1) for place in outer)
        for start in range(0, view[axis], rows):
            yield (*head, slice(start, min(start + rows, view[axis])), *whole[axis + 1 :])


def _read_into(file: Any, buffer: memoryview, name: str | None) -> None:
    while len(buffer):
        count = file.readinto(buffer)
        if not count:
            raise MalformedModelError(f"tensor {name!r}: its file ends {len(buffer)} bytes too early")
        buffer = buffer[count:]
