"""BatchedRows of NumPy files as batches for a model, read when they are needed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bnexport.errors import MissingFileError, UsageError

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class BatchedRows:
    """Arrays by input name, cut along dimension 0 into batches of `size` rows; the last one may be smaller."""

    arrays: Mapping[str, Sequence[Array]]
    size: int

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for first in range(0, len(self), self.size):
            yield {name: _cut(pieces, first, self.size) for name, pieces in self.arrays.items()}

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(len(piece) for piece in next(iter(self.arrays.values())))


def open_rows(files: Mapping[str, str | os.PathLike[str]], size: int) -> BatchedRows:
    """Map the rows of each input: a .npy file, or a folder whose .npy files follow each other by name.

    Raises UsageError: a file is missing or no array of rows, or inputs have different numbers of rows.
    """
    arrays = {name: _pieces(name, Path(path)) for name, path in files.items()}
    lengths = {name: sum(len(piece) for piece in pieces) for name, pieces in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UsageError(f"input: got different numbers of rows: {listed}; expected the same number for each input")
    if 0 in lengths.values():
        raise UsageError(f"input {next(iter(lengths))}: got no rows, expected one or more")
    return BatchedRows(arrays, size)


def _pieces(name: str, path: Path) -> list[Array]:
    paths = sorted(path.glob("*.npy")) if path.is_dir() else [path]
    if not paths:
        raise UsageError(f"input {name}: the folder {str(path)!r} has no .npy files")
    pieces = [_load(name, each) for each in paths]
    for each, piece in zip(paths, pieces, strict=True):
        if piece.shape[1:] != pieces[0].shape[1:] or piece.dtype != pieces[0].dtype:
            raise UsageError(
                f"input {name}: {str(each)!r} has {piece.dtype} rows of {piece.shape[1:]}, "
                f"{str(paths[0])!r} has {pieces[0].dtype} rows of {pieces[0].shape[1:]}; expected the same in all files"
            )
    return pieces


def _load(name: str, path: Path) -> Array:
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise MissingFileError(f"input {name}: {str(path)!r}: no such file; check the path") from error
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"input {name}: cannot read {str(path)!r}, expected a file that numpy.save wrote") from error
    if not isinstance(loaded, np.ndarray) or loaded.ndim == 0:
        raise UsageError(f"input {name}: {str(path)!r} holds no rows, expected an array with rows in dimension 0")
    return loaded


def _cut(pieces: Sequence[Array], first: int, count: int) -> Array:
    """Return rows `first` to `first + count` of arrays that follow each other."""
    found = []
    for piece in pieces:
        if first < len(piece) and count > 0:
            found.append(piece[first : first + count])
            count -= len(found[-1])
        first = max(0, first - len(piece))
    return np.ascontiguousarray(found[0] if len(found) == 1 else np.concatenate(found))
