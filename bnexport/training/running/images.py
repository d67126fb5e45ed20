"""A folder of images as an array of rows, read through Pillow when its rows are asked for.

    folder/cat/1.jpg, folder/dog/2.png     class 0 is cat, class 1 is dog: the names in order, as torchvision's ImageFolder

An image is scaled and cut at its centre to the size that the step takes (PIL.ImageOps.fit, bilinear), in the
step's number of channels, and becomes (value / 255 - mean) / std in float32.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bnexport import extras
from bnexport.errors import UsageError

Array = np.ndarray[Any, Any]

# Those of torchvision's ImageFolder.
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# Pillow's modes by number of channels.
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclasses.dataclass(frozen=True)
class Images:
    """Images (n, C, H, W), float32. files: paths in the folder `root`. mean, std: one number a channel, or one for all."""

    root: str
    files: tuple[str, ...]
    channels: int
    height: int
    width: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    dtype = np.dtype("float32")

    def __post_init__(self) -> None:
        _pillow()
        for name, values in (("mean", self.mean), ("std", self.std)):
            if (
                len(values) not in {1, self.channels}
                or not np.isfinite(values).all()
                or (name == "std" and 0 in values)
            ):
                raise UsageError(
                    f"{name}: got {', '.join(map(str, values))}, expected {self.channels} numbers, or one for all channels"
                    f"{', none of them 0' * (name == 'std')}"
                )

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.files), self.channels, self.height, self.width)

    @property
    def ndim(self) -> int:
        return 4

    def read(self, indices: Array, flipped: Array | None = None) -> Array:
        """Read the images at `indices`; mirrored left to right where `flipped`, bool (n,), says so.

        Raises UsageError for a file that is no image.
        """
        made = np.empty((len(indices), *self.shape[1:]), self.dtype)

        def read(place: int) -> None:
            image = self._read(os.path.join(self.root, self.files[indices[place]]))
            made[place] = image[:, :, ::-1] if flipped is not None and flipped[place] else image

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(read, range(len(indices))))
        return made

    def _read(self, path: str) -> Array:
        from PIL import Image, ImageOps

        try:
            with Image.open(path) as opened:
                image = ImageOps.fit(
                    opened.convert(_MODES[self.channels]), (self.width, self.height), Image.Resampling.BILINEAR
                )
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UsageError(f"{path}: cannot be read as an image: {error}") from error
        pixels = np.asarray(image, np.float32).reshape(self.height, self.width, self.channels)
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        return ((pixels / np.float32(255) - mean) / std).transpose(2, 0, 1)

    def identity(self) -> str:
        """Return what identifies the images in a checkpoint: their names in order, and the numbers of their scale."""
        digest = hashlib.sha256("\n".join(self.files).encode()).hexdigest()[:16]
        return f"images{list(self.shape)} {digest} mean {list(self.mean)} std {list(self.std)}"


def find(folder: str, option: str) -> tuple[str, ...]:
    """Return the images in a folder and its subfolders: their paths in it, in order. Raises UsageError for none."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise UsageError(f"{option}: {folder}: got no image in it, expected {', '.join(SUFFIXES)}")
    return tuple(path.relative_to(folder).as_posix() for path in paths)


def classes_of(folder: str, files: Sequence[str], option: str) -> tuple[tuple[str, ...], Array]:
    """Return the names of the subfolders in order, and the number of each file's, int64 (n,).

    Raises UsageError for a file that is in none, and a subfolder without images.
    """
    names = tuple(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()))
    numbers = {name: number for number, name in enumerate(names)}
    labels = [numbers.get(file.partition("/")[0], -1) for file in files]
    if -1 in labels:
        raise UsageError(
            f"{option}: {folder}: got the image {files[labels.index(-1)]!r} in no subfolder, expected one for each class"
        )
    empty = set(numbers.values()) - set(labels)
    if empty:
        raise UsageError(
            f"{option}: {folder}: class {names[min(empty)]!r} has no image; add some, or remove its folder"
        )
    return names, np.array(labels, np.int64)


def for_input(
    folder: str,
    files: tuple[str, ...],
    name: str,
    shape: Sequence[int | str],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Images:
    """Return the images for a step's input `name` of `shape` (N, C, H, W). Raises UsageError for another one."""
    sizes = tuple(shape[1:])
    if len(sizes) != 3 or not all(isinstance(size, int) for size in sizes) or sizes[0] not in _MODES:
        raise UsageError(
            f"{name}: takes an array of shape ({', '.join(map(str, shape))}), and images are (N, C, H, W) with 1, 3 or 4"
            " channels; give arrays as .npy files"
        )
    channels, height, width = (int(size) for size in sizes)
    return Images(folder, files, channels, height, width, mean, std)


def _pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise extras.missing("pillow", "folders of images need it") from error
