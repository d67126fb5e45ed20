"""External tensor data that cannot leave the model's folder.

A location is a relative path of plain components. Each component is opened relative to the folder's
descriptor without following links, so there is no moment between the check and the use of a name.
The identity (device, inode, size, time) seen when the model was loaded is compared at every read.
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
from bnexport.model_io.limits import Limits
from bnexport.model_io.validate import tensor_bytes

_KEYS = frozenset({"location", "offset", "length", "checksum", "basepath"})
_NUMBER = re.compile(r"[0-9]{1,19}\Z")
_COPY_CHUNK = 1 << 24
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
    """One external data file: the folder's real path, the components below it, what it looked like."""

    folder: str
    parts: tuple[str, ...]
    identity: _Identity
    allow_links: bool

    @property
    def path(self) -> str:
        return os.path.join(self.folder, *self.parts)

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The file, opened again under the same rules and still the same file."""
        descriptor = _open_below(self.folder, self.parts, self.allow_links)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if _Identity.of(os.fstat(descriptor)) != self.identity:
                raise UnsafeModelError(
                    f"external data {'/'.join(self.parts)!r} changed since the model was loaded; load the model again"
                )
            yield file


def split_location(location: str, tensor: str) -> tuple[str, ...]:
    """The components of a location, or UnsafeModelError."""

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
    """A read-only descriptor of a regular file below `folder`. Never blocks on a pipe or device."""
    shown = "/".join(parts)
    try:
        if allow_links:
            real = os.path.realpath(os.path.join(folder, *parts))
            if os.path.commonpath([folder, real]) != folder:
                raise UnsafeModelError(f"external data {shown!r} is a link that leaves the model's folder")
            parts = tuple(os.path.relpath(real, folder).split(os.sep))
        current = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_NONBLOCK if last else os.O_DIRECTORY)
            try:
                below = os.open(part, flags, dir_fd=current)
            finally:
                os.close(current)
            current = below
    except FileNotFoundError as error:
        raise MalformedModelError(f"external data {shown!r} is missing; it must lie beside the model file") from error
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
            raise UnsafeModelError(
                f"external data {shown!r} is, or lies behind, a symbolic link; links are refused"
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
        raise UnsafeModelError(f"external data {shown!r} {reason}; copy the data into a file of its own")
    return current


class ContainedTensor(ir.ExternalTensor):
    """An external tensor whose every read goes through `DataFile.open`. Nothing is kept in memory."""

    __slots__ = ("_file",)

    def __init__(self, file: DataFile, offset: int, nbytes: int, **fields: Any) -> None:
        super().__init__("/".join(file.parts), offset, nbytes, base_dir=file.folder, **fields)
        self._file = file

    @property
    def file(self) -> DataFile:
        return self._file

    def tobytes(self) -> bytes:
        with self._file.open() as file:
            return _read_exactly(file, self.offset or 0, self.length or 0)

    def numpy(self) -> np.ndarray:
        data = self.tobytes()
        if self.dtype.bitwidth < 8:
            proto = onnx.TensorProto(data_type=self.dtype.value, dims=self.shape.numpy(), raw_data=data)
            return ir.serde.TensorProtoTensor(proto).numpy()
        return np.frombuffer(data, dtype=self.dtype.numpy().newbyteorder("<")).reshape(self.shape.numpy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().__array__(dtype)

    def tofile(self, file: Any) -> None:
        with self._file.open() as source:
            offset, left = self.offset or 0, self.length or 0
            while left:
                chunk = _read_exactly(source, offset, min(left, _COPY_CHUNK))
                file.write(chunk)
                offset, left = offset + len(chunk), left - len(chunk)


def _read_exactly(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    pieces = []
    while length:
        piece = file.read(length)
        if not piece:
            raise MalformedModelError(f"external data file ends {length} bytes too early; it changed while it was read")
        pieces.append(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Folder:
    """The files below one folder that a model refers to, each checked once."""

    def __init__(self, folder: str | None, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._files: dict[tuple[str, ...], DataFile] = {}

    def tensor(self, proto: onnx.TensorProto, limits: Limits) -> ContainedTensor:
        """The external tensor that `proto` describes; its place in the file is checked, nothing is read."""
        name, nbytes = proto.name, tensor_bytes(proto, limits)
        entries = _entries(proto)
        if self._folder is None:
            raise UnsafeModelError(
                f"tensor {name!r} has external data, but a model in memory has no folder; pass the model's path"
            )
        file = self._file(split_location(entries.get("location", ""), name))
        offset = _number(entries.get("offset", "0"), "offset", name)
        length = _number(entries["length"], "length", name) if "length" in entries else nbytes
        if length != nbytes:
            raise UnsafeModelError(
                f"tensor {name!r}: external length is {length} bytes, its type and shape need {nbytes}"
            )
        if offset + length > file.identity.size:
            raise UnsafeModelError(
                f"tensor {name!r}: external data ends at byte {offset + length},"
                f" the file {'/'.join(file.parts)!r} has {file.identity.size}"
            )
        return ContainedTensor(
            file,
            offset,
            nbytes,
            dtype=ir.DataType(proto.data_type),
            shape=ir.Shape(proto.dims),
            name=name,
            doc_string=proto.doc_string or None,
            metadata_props={entry.key: entry.value for entry in proto.metadata_props},
        )

    def _file(self, parts: tuple[str, ...]) -> DataFile:
        if parts not in self._files:
            assert self._folder is not None
            descriptor = _open_below(self._folder, parts, self._limits.allow_links)
            identity = _Identity.of(os.fstat(descriptor))
            os.close(descriptor)
            self._files[parts] = DataFile(self._folder, parts, identity, self._limits.allow_links)
        return self._files[parts]


def _entries(proto: onnx.TensorProto) -> Mapping[str, str]:
    entries: dict[str, str] = {}
    for entry in proto.external_data:
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
