"""Documented limits for model files, and what differs between operating systems."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import stat
from collections.abc import Iterable

from bnexport.errors import UsageError

# Documented limits for model files.
#
# A caller raises one by passing a record of its own; a user by the command line's `--limit NAME=NUMBER`, or by the
# environment variable BNEXPORT_LIMITS, which holds the same settings separated by commas.

ENVIRONMENT_VARIABLE = "BNEXPORT_LIMITS"
_NUMBER = re.compile(r"([0-9]{1,18})([KMGT]?)\Z")
_SUFFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SWITCH = {"yes": True, "no": False}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one `load`. docs/security.md states the memory that they add up to.

    model_bytes: size of the .onnx file itself; protobuf cannot hold more than 2 GiB.
    structure_bytes: the same without raw_data of 4 KiB and more, which stays in the file.
    elements: texts and messages of the structure, each of which takes up to 200 bytes when it is parsed.
    nodes: nodes, graphs inside nodes and functions, together. tensors: initializers and attributes.
    values: names of inputs and outputs, attributes, and entries of attributes that are lists.
    name_length: characters of one name of a node, value, operator, domain or attribute.
    tensor_bytes: declared size of one tensor.
    graph_depth: graphs inside graphs (If, Loop, Scan bodies).
    allow_links: accept external data files that are symbolic links inside the folder's tree or have
        several hard links, as download caches make them. Containment still holds.
    """

    model_bytes: int = 2**31 - 1
    structure_bytes: int = 2**26
    elements: int = 2**22
    nodes: int = 2**18
    tensors: int = 2**18
    values: int = 2**21
    name_length: int = 2**16
    tensor_bytes: int = 2**40
    graph_depth: int = 32
    allow_links: bool = False


DEFAULT_LIMITS = Limits()


def current() -> Limits:
    """Return the default limits, with the settings of BNEXPORT_LIMITS applied.

    Raises UsageError for a setting that is none.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    return parse(text.split(","), ENVIRONMENT_VARIABLE) if text else DEFAULT_LIMITS


def parse(settings: Iterable[str], where: str) -> Limits:
    """Parse limits from settings such as nodes=5000000, structure_bytes=512M (binary units) or allow_links=yes."""
    names = [field.name for field in dataclasses.fields(Limits)]
    values: dict[str, int | bool] = {}
    for setting in settings:
        name, _, text = setting.strip().partition("=")
        number = _NUMBER.match(text)
        if name == "allow_links" and text in _SWITCH:
            values[name] = _SWITCH[text]
        elif name in names and name != "allow_links" and number is not None:
            values[name] = int(number.group(1)) * _SUFFIXES[number.group(2)]
        else:
            raise UsageError(
                f"{where}: got {setting[:100]!r}, expected NAME=NUMBER, such as nodes=5000000 or structure_bytes=512M,"
                f" or allow_links=yes; names are {', '.join(names)}"
            )
    return dataclasses.replace(DEFAULT_LIMITS, **values)  # type: ignore[arg-type]


def way_out(name: str) -> str:
    """Return the end of an error about a limit: how to raise it."""
    return f"a file that you trust may have more with --limit {name}=... (docs/security.md)"


# What differs between operating systems where files and processes are concerned. Linux is tested, and Linux without what
# POSIX alone has; Windows and macOS are not.

# Never block on a pipe, never hand a file to a process by accident, never translate line ends.
READ = os.O_RDONLY
for _name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"):
    READ |= getattr(os, _name, 0)
# Whether a process can be handed open files.
HANDS_OVER = hasattr(socket, "send_fds") and os.name == "posix"
_WALKS = hasattr(os, "O_NOFOLLOW") and os.open in os.supports_dir_fd


def open_below(folder: str, parts: tuple[str, ...]) -> int:
    """Open a file below `folder` for reading; no part of the way may be a symbolic link.

    Raises OSError. Without POSIX the ways are looked at before they are opened, not while they are.
    """
    if not _WALKS:
        way = folder
        for part in parts:
            way = os.path.join(way, part)
            if stat.S_ISLNK(os.lstat(way).st_mode):
                raise NotADirectoryError(20, "is a symbolic link", way)
        return os.open(way, READ)
    current = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for index, part in enumerate(parts):
        kind = READ if index == len(parts) - 1 else os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
        try:
            below = os.open(part, kind | os.O_NOFOLLOW, dir_fd=current)
        finally:
            os.close(current)
        current = below
    return current


def pread(descriptor: int, size: int, offset: int) -> bytes:
    """Read at most `size` bytes at `offset`."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, size)


def sync_folder(folder: str) -> None:
    """Make renames inside a folder survive a power failure, where a folder can be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_alive(pid: int) -> bool:
    """Whether a process is alive; True on systems where a query would end it."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
