"""Training data in NumPy files: arrays of equal length, one for each input of a step, read row by row."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bnexport.errors import MissingFileError, UsageError

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Arrays by input name, the target last; dimension 0 of each counts the rows."""

    arrays: dict[str, Array]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, indices: Array) -> tuple[Array, ...]:
        """Return the rows at `indices`, int64 (n,), copied out of the files, in order."""
        return tuple(array[indices] for array in self.arrays.values())

    def shapes(self) -> dict[str, str]:
        """Return the type and shape of each array, which identify a data set."""
        return {name: f"{array.dtype}{list(array.shape)}" for name, array in self.arrays.items()}


def load_rows(source: str, names: Sequence[str], option: str = "data") -> Rows:
    """Open the arrays of a step's inputs `names`.

    source: one .npz file that holds them by name, or .npy files in the order of `names` with commas between.
    A .npy file is mapped into memory and read when its rows are asked for; a .npz file is read completely.
    option: what messages call the argument. Pickled objects are refused.

    Raises UsageError: a file is missing or no NumPy file, names or lengths do not fit.
    """
    parts = source.split(",")
    if len(parts) == 1 and source.endswith(".npz"):
        arrays = _load_npz(source, names, option)
    elif len(parts) != len(names):
        raise UsageError(
            f"{option}: got {len(parts)} files in {source!r}, expected one .npz file, or a .npy file for each of "
            f"{', '.join(names)}, in this order"
        )
    else:
        arrays = {name: _load(part, option) for name, part in zip(names, parts)}
    lengths = {name: array.shape[0] if array.ndim else None for name, array in arrays.items()}
    if None in lengths.values() or len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {'none' if length is None else length}" for name, length in lengths.items())
        raise UsageError(f"{option}: {source}: got arrays of different numbers of rows: {listed}")
    if 0 in lengths.values():
        raise UsageError(f"{option}: {source}: got no rows, expected one or more")
    return Rows(arrays)


def _load(path: str, option: str) -> Array:
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _unreadable(path, option, error) from error
    if not isinstance(loaded, np.ndarray):
        raise UsageError(f"{option}: {path}: got several arrays in one of several files, expected a .npy file")
    return loaded


def _load_npz(path: str, names: Sequence[str], option: str) -> dict[str, Array]:
    try:
        loaded: Mapping[str, Array] = np.load(path, allow_pickle=False)
        held = sorted(loaded)
        if set(held) != set(names):
            raise UsageError(f"{option}: {path}: holds {', '.join(held) or 'nothing'}, expected {', '.join(names)}")
        return {name: loaded[name] for name in names}
    except UsageError:
        raise
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise _unreadable(path, option, error) from error


def _unreadable(path: str, option: str, error: Exception) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    kind = MissingFileError if isinstance(error, FileNotFoundError) else UsageError
    return kind(f"{option}: cannot read {path!r} as a NumPy file: {reason}")
