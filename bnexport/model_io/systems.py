"""What differs between operating systems where files and processes are concerned. Linux is tested, and Linux without what
POSIX alone has; Windows and macOS are not.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat

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
