"""Read stored tensors in blocks, so that a comparison holds a few megabytes at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.errors import MalformedModelError
from bnexport.model_io import ContainedTensor

# Elements of one block: it stays in the second-level cache.
BLOCK = 1 << 17


class TensorRows(contextlib.AbstractContextManager["TensorRows"]):
    """A tensor seen as (rows, row), read from the first row to the last."""

    def __init__(self, tensor: ir.TensorProtocol, rows: int) -> None:
        self._stack = contextlib.ExitStack()
        self._file: Any = None
        self._position = 0
        if isinstance(tensor, ContainedTensor) and tensor.dtype.bitwidth >= 8:
            self._file = self._stack.enter_context(tensor.file.open())
            self._file.seek(tensor.offset or 0)
            self._dtype = tensor.dtype.numpy().newbyteorder("<")
            self._row = tensor.size // rows if rows else 0
            self._buffer = np.empty(0, self._dtype)
        else:
            self._array = tensor.numpy().reshape(rows, -1) if tensor.size else np.zeros((rows, 0))

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def next(self, count: int) -> np.ndarray:
        """Return the next `count` rows, valid until the next call."""
        if self._file is None:
            self._position += count
            return self._array[self._position - count : self._position]
        if self._buffer.size != count * self._row:
            self._buffer = np.empty(count * self._row, self._dtype)
        left = self._buffer.view(np.uint8).data
        while len(left):
            got = self._file.readinto(left)
            if not got:
                raise MalformedModelError(f"a data file ends {len(left)} bytes too early; it changed while it was read")
            left = left[got:]
        return self._buffer.reshape(count, self._row)


def same_tensor(first: ir.TensorProtocol, second: ir.TensorProtocol) -> bool:
    """Equal type, shape and bytes."""
    if first is second:
        return True
    if first.dtype != second.dtype or first.shape.numpy() != second.shape.numpy():
        return False
    if _same_place(first, second):
        return True
    if first.dtype is ir.DataType.STRING:
        return bool(np.array_equal(first.numpy(), second.numpy()))
    if first.dtype.bitwidth < 8:
        return bool(first.tobytes() == second.tobytes())
    size = first.size
    if size == 0:
        return True
    with TensorRows(first, size) as one, TensorRows(second, size) as two:
        for count in pieces(size, 1):
            mine, other = one.next(count), two.next(count)
            unsigned = f"u{mine.dtype.itemsize}"
            if mine.dtype.itemsize > 8:
                if mine.tobytes() != other.tobytes():
                    return False
            elif not np.array_equal(
                np.ascontiguousarray(mine).reshape(-1).view(unsigned),
                np.ascontiguousarray(other).reshape(-1).view(unsigned),
            ):
                return False
    return True


def pieces(rows: int, row: int) -> Iterator[int]:
    """Yield how many rows to read at a time."""
    step = max(1, BLOCK // max(row, 1))
    for start in range(0, rows, step):
        yield min(step, rows - start)


def _same_place(first: ir.TensorProtocol, second: ir.TensorProtocol) -> bool:
    return (
        isinstance(first, ContainedTensor)
        and isinstance(second, ContainedTensor)
        and first.file == second.file
        and first.offset == second.offset
    )
