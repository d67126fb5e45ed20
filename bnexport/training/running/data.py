"""Training data: NumPy files and folders of images of equal length, one for each input of a step, read row by row."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bnexport.errors import MissingFileError, UsageError
from bnexport.training.running import images
from bnexport.training.running.images import Images

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Arrays by input name, the target last; dimension 0 of each counts the rows. classes: names, of a folder's."""

    arrays: dict[str, Array | Images]
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return int(next(iter(self.arrays.values())).shape[0])

    def read(self, indices: Array, flipped: Array | None = None) -> tuple[Array, ...]:
        """Return the rows at `indices`, int64 (n,), in order. flipped: bool (n,), images that are mirrored.

        Raises UsageError for an image that cannot be read.
        """
        return tuple(
            array.read(indices, flipped) if isinstance(array, Images) else array[indices]
            for array in self.arrays.values()
        )

    def shapes(self) -> dict[str, str]:
        """Return the type and shape of each array, or the names of images, which identify a data set."""
        return {
            name: array.identity() if isinstance(array, Images) else f"{array.dtype}{list(array.shape)}"
            for name, array in self.arrays.items()
        }

    def can_flip(self) -> bool:
        """Whether images can be mirrored without their targets: one number each."""
        *inputs, target = self.arrays.values()
        return target.ndim == 1 and any(isinstance(array, Images) for array in inputs)


def load_rows(
    source: str,
    names: Sequence[str],
    option: str = "data",
    *,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[float, ...] = (1.0,),
) -> Rows:
    """Open the arrays of a step's inputs `names`.

    source: one .npz file that holds them by name; or a .npy file or folder of images for each, in the order of `names`
    with commas between. Without one for the target, images are in a subfolder for each class, which is the target.
    A .npy file is mapped into memory and read when its rows are asked for, as images are; a .npz file is read completely.
    option: what messages call the argument. shapes: of the inputs, for images. mean, std: of the images' channels.
    Pickled objects are refused.

    Raises UsageError: a file is missing or of another kind, names or lengths do not fit.
    MissingPackageError: images without Pillow.
    """
    parts = source.split(",")
    classes: tuple[str, ...] = ()
    folders = [part for part in parts if os.path.isdir(part)]
    arrays: dict[str, Array | Images]
    if len(parts) == 1 and source.endswith(".npz") and not folders:
        arrays = dict(_load_npz(source, names, option))
    elif len(parts) != len(names) - bool(folders) and len(parts) != len(names):
        raise UsageError(
            f"{option}: got {len(parts)} files in {source!r}, expected one .npz file, or a .npy file or folder of images "
            f"for each of {', '.join(names)}, in this order; a folder with a subfolder a class has the target, too"
        )
    else:
        arrays = {}
        for name, part in zip(names, parts):
            if part in folders:
                files = images.find(part, option)
                arrays[name] = images.for_input(part, files, name, (shapes or {}).get(name, ()), mean, std)
            else:
                arrays[name] = _load(part, option)
        if len(parts) < len(names):
            first = next(array for array in arrays.values() if isinstance(array, Images))
            classes, arrays[names[-1]] = images.classes_of(first.root, first.files, option)
    lengths = {name: array.shape[0] if array.ndim else None for name, array in arrays.items()}
    if None in lengths.values() or len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {'none' if length is None else length}" for name, length in lengths.items())
        raise UsageError(f"{option}: {source}: got arrays of different numbers of rows: {listed}")
    if 0 in lengths.values():
        raise UsageError(f"{option}: {source}: got no rows, expected one or more")
    return Rows(arrays, classes)


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
