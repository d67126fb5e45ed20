"""External tensor data, confined to the model's folder.

A location is a relative path of plain components. Each component is opened relative to the folder's
descriptor without following links, so there is no moment between the check and the use of a name.
The identity (device, inode, size, time) seen when the model was loaded is compared at every read.
The large tensors of the model file itself are read in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx_ir as ir

from bnexport.errors import MalformedModelError, UnsafeModelError
from bnexport.model_io.limits import Limits, open_below
from bnexport.model_io.validate import tensor_bytes

_KEYS = frozenset({"location", "offset", "length", "checksum", "basepath"})
# Where ONNX Runtime keeps a weight in the layout of one machine, beside the weight itself; read by nothing else.
_PREPACKED = "prepacked_"
_NUMBER = re.compile(r"[0-9]{1,19}\Z")
_COPY_CHUNK = 1 << 20
# Kernels and file systems say with these that they cannot copy from file to file by themselves.
_NO_KERNEL_COPY = frozenset((errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV, errno.EBADF))
# ONNX Runtime's marker for "this is an address in my memory"; never legal in a file.
_MEMORY_MARKER = "_ORT_MEM_ADDR_"


@dataclasses.dataclass(frozen=True)
class _Identity:
    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Identity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclasses.dataclass(frozen=True)
class DataFile:
    """One file with tensor data: the folder's real path, the components below it, and its identity when checked.

    is_model: it is the model file itself, not external data.
    """

    folder: str
    parts: tuple[str, ...]
    identity: _Identity
    allow_links: bool
    is_model: bool = False

    @classmethod
    def of_model(cls, path: str, status: os.stat_result) -> DataFile:
        """Return the model file at a real path, which may have several hard links."""
        folder, name = os.path.split(path)
        return cls(folder, (name,), _Identity.of(status), allow_links=True, is_model=True)

    @property
    def path(self) -> str:
        return os.path.join(self.folder, *self.parts)

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file again under the same rules, and check that it has not changed."""
        descriptor = _open_below(self.folder, self.parts, self.allow_links)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if _Identity.of(os.fstat(descriptor)) != self.identity:
                what = "the model file" if self.is_model else "external data"
                raise UnsafeModelError(
                    f"{what} {'/'.join(self.parts)!r} changed since the model was loaded; load the model again"
                )
            yield file


def split_location(location: str, tensor: str) -> tuple[str, ...]:
    """Return the components of a location. Raise UnsafeModelError if it leaves the folder."""

    def refuse(reason: str) -> UnsafeModelError:
        return UnsafeModelError(
            f"tensor {tensor!r}: external data location {location[:200]!r} {reason};"
            " it must be a relative path below the model's folder"
        )

    if not location:
        raise refuse("is empty")
    if _MEMORY_MARKER in location:
        raise refuse("is an in-memory address marker")
    if any(ord(character) < 32 for character in location):
        raise refuse("holds a control character")
    if "\\" in location or os.path.isabs(location) or re.match(r"[A-Za-z]:", location):
        raise refuse("is absolute or uses another system's separators")
    parts = tuple(part for part in location.split("/") if part not in ("", "."))
    if not parts or ".." in parts:
        raise refuse("leaves the folder")
    return parts


def _open_below(folder: str, parts: tuple[str, ...], allow_links: bool) -> int:
    """Open a regular file below `folder` and return its read-only descriptor. Never block on a pipe or device."""
    shown = "/".join(parts)
    try:
        if allow_links:
            real = os.path.realpath(os.path.join(folder, *parts))
            if os.path.commonpath([folder, real]) != folder:
                raise UnsafeModelError(f"external data {shown!r} is a link that leaves the model's folder")
            parts = tuple(os.path.relpath(real, folder).split(os.sep))
        current = open_below(folder, parts)
    except FileNotFoundError as error:
        raise MalformedModelError(f"external data {shown!r} is missing; it must lie beside the model file") from error
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
            raise UnsafeModelError(
                f"external data {shown!r} is, or lies behind, a symbolic link; copy the data, or allow links"
                " inside the folder with --limit allow_links=yes"
            ) from error
        raise MalformedModelError(f"external data {shown!r} cannot be opened: {error}") from error
    status = os.fstat(current)
    reason = None
    if not stat.S_ISREG(status.st_mode):
        reason = "is not a regular file"
    elif status.st_nlink > 1 and not allow_links:
        reason = f"has {status.st_nlink} hard links"
    if reason:
        os.close(current)
        way_out = ", or pass --limit allow_links=yes" if status.st_nlink > 1 else ""
        raise UnsafeModelError(f"external data {shown!r} {reason}; copy the data into a file of its own{way_out}")
    return current


class ContainedTensor(ir.ExternalTensor):
    """An external tensor that reads through `DataFile.open` every time. Nothing is kept in memory."""

    __slots__ = ("_file",)

    def __init__(self, file: DataFile, offset: int, nbytes: int, **fields: Any) -> None:
        super().__init__("/".join(file.parts), offset, nbytes, base_dir=file.folder, **fields)
        self._file = file

    @property
    def file(self) -> DataFile:
        return self._file

    def tobytes(self) -> bytes:
        return self._read().tobytes()

    def numpy(self) -> np.ndarray:
        data = self._read()
        if self.dtype.bitwidth < 8:
            proto = onnx.TensorProto(data_type=self.dtype.value, dims=self.shape.numpy(), raw_data=data.tobytes())
            return ir.serde.TensorProtoTensor(proto).numpy()
        return data.view(self.dtype.numpy().newbyteorder("<")).reshape(self.shape.numpy())

    def mapped(self) -> np.ndarray:
        """Return the numbers where they lie in the file, which must stay as it is as long as they are used."""
        if self.dtype.bitwidth < 8 or not self.length:
            return self.numpy()
        with self._file.open() as source:
            data = np.memmap(source, np.uint8, "c", self.offset or 0, (self.length,))
        return np.asarray(data).view(self.dtype.numpy().newbyteorder("<")).reshape(self.shape.numpy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().__array__(dtype)

    def tofile(self, file: Any) -> None:
        """Copy the bytes, inside the kernel if both ends are files that it can copy between."""
        with self._file.open() as source:
            offset, left = self.offset or 0, self.length or 0
            if hasattr(file, "fileno") and hasattr(os, "copy_file_range"):
                copied = _kernel_copy(source, file, offset, left)
                offset, left = offset + copied, left - copied
            buffer = memoryview(bytearray(min(left, _COPY_CHUNK)))
            source.seek(offset)
            while left:
                chunk = buffer[: min(left, len(buffer))]
                read_into(source, chunk)
                file.write(chunk)
                left -= len(chunk)

    def _read(self) -> np.ndarray:
        """Return the bytes in a new array."""
        data = np.empty(self.length or 0, np.uint8)
        with self._file.open() as source:
            source.seek(self.offset or 0)
            read_into(source, data.data)
        return data


def _kernel_copy(source: BinaryIO, file: Any, offset: int, length: int) -> int:
    """Copy to the end of `file` inside the kernel; return the number of bytes, 0 if the kernel cannot."""
    file.flush()
    start, copied = file.tell(), 0
    try:
        while copied < length:
            count = os.copy_file_range(source.fileno(), file.fileno(), length - copied, offset + copied, start + copied)
            if count == 0:
                break
            copied += count
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
    file.seek(start + copied)
    return copied


def read_into(file: Any, buffer: memoryview) -> None:
    while len(buffer):
        count = file.readinto(buffer)
        if not count:
            raise MalformedModelError(f"a data file ends {len(buffer)} bytes too early; it changed while it was read")
        buffer = buffer[count:]


class Folder:
    """The files that hold a model's tensors: files below one folder, each checked once, and the model file.

    model: the model file, where `places` lie: location -> (offset, length) of the tensors left in it.
    """

    def __init__(
        self,
        folder: str | None,
        limits: Limits,
        model: DataFile | None = None,
        places: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._files: dict[str, DataFile] = {}
        self._model = model
        self._places = places or {}

    def check(self, proto: onnx.TensorProto) -> None:
        """Raise a ModelError unless all data that `proto` declares lies inside its file; nothing is read.

        Entries of external data that mean nothing are removed.
        """
        name, nbytes = proto.name, tensor_bytes(proto, self._limits)
        if proto.external_data and proto.external_data[-1].value in self._places:
            del proto.external_data[:-1]  # without a meaning: the file says that the data is inside
            length = self._places[proto.external_data[0].value][1]
            if length != nbytes:
                raise MalformedModelError(
                    f"tensor {name!r} with shape {list(proto.dims)[:8]} carries {length} bytes, expected {nbytes}"
                )
            return
        if self._folder is None:
            raise UnsafeModelError(
                f"tensor {name!r} has external data, but a model in memory has no folder; pass the model's path"
            )
        entries = _entries(proto)
        file = self._file(entries.get("location", ""), name)
        offset = _number(entries.get("offset", "0"), "offset", name)
        # ONNX Runtime takes 0 for an absent length, too.
        length = _number(entries.get("length", "0"), "length", name) or nbytes
        if length != nbytes:
            raise UnsafeModelError(
                f"tensor {name!r}: external length is {length} bytes, its type and shape need {nbytes}"
            )
        if offset + length > file.identity.size:
            raise UnsafeModelError(
                f"tensor {name!r}: external data ends at byte {offset + length},"
                f" the file {'/'.join(file.parts)!r} has {file.identity.size}"
            )

    def tensor(self, declared: ir.ExternalTensor) -> ContainedTensor:
        """Return the tensor for `declared`, which was made from a checked proto."""
        location, offset = str(declared.location), declared.offset or 0
        if location in self._places:
            assert self._model is not None
            file, offset = self._model, self._places[location][0]
        else:
            file = self._file(location, str(declared.name))
        return ContainedTensor(
            file,
            offset,
            declared.nbytes,
            dtype=declared.dtype,
            shape=declared.shape,
            name=declared.name,
            doc_string=declared.doc_string,
            metadata_props=dict(declared.metadata_props),
        )

    def _file(self, location: str, tensor: str) -> DataFile:
        if location not in self._files:
            assert self._folder is not None
            parts = split_location(location, tensor)
            descriptor = _open_below(self._folder, parts, self._limits.allow_links)
            identity = _Identity.of(os.fstat(descriptor))
            os.close(descriptor)
            self._files[location] = DataFile(self._folder, parts, identity, self._limits.allow_links)
        return self._files[location]


def _entries(proto: onnx.TensorProto) -> Mapping[str, str]:
    kept = [entry for entry in proto.external_data if not entry.key.startswith(_PREPACKED)]
    if len(kept) < len(proto.external_data):
        del proto.external_data[:]
        proto.external_data.extend(kept)
    entries: dict[str, str] = {}
    for entry in kept:
        if entry.key not in _KEYS or entry.key in entries:
            raise UnsafeModelError(
                f"tensor {proto.name!r}: unknown or repeated external data key {entry.key[:60]!r},"
                f" expected {sorted(_KEYS)}"
            )
        entries[entry.key] = entry.value
    return entries


def _number(text: str, what: str, tensor: str) -> int:
    if not _NUMBER.match(text):
        raise UnsafeModelError(
            f"tensor {tensor!r}: external data {what} is {text[:40]!r}, expected a whole number >= 0"
        )
    return int(text)
