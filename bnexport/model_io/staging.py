"""Atomic writing of files: into a temporary place first, then moved.

Everything is written into a folder beside the target, flushed, and renamed into place. Data goes first,
under a name that no model refers to yet, so the rename of the model file is the single moment of change:
whenever a run ends, by a signal or a full disk, the target is the old model or the new one, each with its
data. What such a run leaves behind is removed by the next one for the same target; the folder's name
tells the process that made it, its file `data` the data files that may have lost their model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator

from bnexport.errors import BnexportError, StorageError, UsageError
from bnexport.model_io import limits, validate
from bnexport.model_io.read import read_proto

_DATA_NAMES = "data"
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
# safetensors tells the number of the system's error in its text alone.
_FULL = re.compile(rf"os error ({'|'.join(map(str, sorted(_DISK)))})\b")


@dataclasses.dataclass(frozen=True)
class Staged:
    """A complete model in a temporary folder next to its target; `commit` moves it into place.

    data_name: its file of external data, None where the weights are inside. too_large: they are outside
    because one protobuf message cannot hold them.
    """

    folder: str
    target: str
    data_name: str | None
    too_large: bool = False

    @property
    def path(self) -> str:
        """The staged model file; it loads as the final one will."""
        return os.path.join(self.folder, os.path.basename(self.target))

    def commit(self) -> None:
        directory, name = os.path.split(self.target)
        stale = _own_data(self.target)
        if self.data_name:
            _note(self.folder, [self.data_name, *stale])
            _move_new(os.path.join(self.folder, self.data_name), os.path.join(directory, self.data_name))
        elif stale:
            _note(self.folder, stale)
        limits.sync_folder(directory)
        os.rename(self.path, self.target)
        limits.sync_folder(directory)
        _remove_unused(directory, name, stale)
        self.discard()

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def make_folder(target: str) -> str:
    """Create a temporary folder next to `target`; remove leftovers of earlier runs that have ended."""
    directory, name = os.path.split(target)
    _remove_leftovers(directory, name)
    folder = os.path.join(directory, f".{name}.{os.getpid()}-{secrets.token_hex(4)}.bnexport")
    try:
        os.mkdir(folder)
    except OSError as error:
        raise write_error(target, error) from error
    return folder


def write_error(target: str | os.PathLike[str], error: Exception) -> BnexportError:
    """Return the error to raise for a file that could not be written: a full or failing disk is no wrong argument."""
    number = error.errno if isinstance(error, OSError) else None
    kind = StorageError if number in _DISK or _FULL.search(str(error)) else UsageError
    reason = (os.strerror(number) if number else None) or str(error)
    return kind(f"cannot write {os.fspath(target)!r}: {reason}; nothing was changed")


def check_space(target: str | os.PathLike[str], length: int) -> None:
    """Raise StorageError where the disk of `target` has fewer than `length` bytes left, before any work is done."""
    folder = os.path.dirname(os.path.realpath(target))
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    if free < length:
        raise StorageError(
            f"cannot write {os.fspath(target)!r}: it takes about {length / 1e9:.3g} GB and {folder!r} has "
            f"{free / 1e9:.3g} GB left; nothing was changed"
        )


@contextlib.contextmanager
def whole_file(target: str | os.PathLike[str]) -> Iterator[str]:
    """Write a file atomically: yield a temporary path that replaces the target at the end. On an error nothing changes.

    A target that exists and is no regular file, such as /dev/null or a pipe, is written to as it is.

    Raises UsageError where the target's folder is missing or may not be written to, and OSError, which names the
    target, where the disk fails.
    """
    real = os.path.realpath(target)
    if os.path.exists(real) and not os.path.isfile(real) and not os.path.isdir(real):
        yield real
        return
    directory, name = os.path.split(real)
    if os.path.isdir(real) or not os.path.isdir(directory):
        raise UsageError(f"cannot write {os.fspath(target)!r}: it is a folder, or its folder does not exist")
    folder = make_folder(real)
    staged = os.path.join(folder, name)
    try:
        yield staged
        # Writers such as safetensors make files of mode 0600: the folder, as mkdir made it, has the umask's.
        os.chmod(staged, stat.S_IMODE(os.stat(folder).st_mode) & 0o666)
        with open(staged, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(staged, real)
        limits.sync_folder(directory)
    except OSError as error:
        if error.filename is not None and not str(error.filename).startswith(folder):
            raise
        raise OSError(error.errno, f"cannot be written: {error.strerror}", os.fspath(target)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_data_name(target: str) -> str:
    """Return model.onnx.data, with a number if that name is taken."""
    directory, name = os.path.split(target)
    candidate, number = f"{name}.data", 1
    while os.path.lexists(os.path.join(directory, candidate)):
        candidate, number = f"{name}.{number}.data", number + 1
    return candidate


def _move_new(source: str, target: str) -> None:
    """Rename without replacing an existing file."""
    try:
        os.link(source, target)
    except FileExistsError as error:
        raise UsageError(
            f"{os.path.basename(target)!r} was made by another run in the meantime; nothing was changed"
        ) from error
    except OSError:  # a file system without hard links
        os.rename(source, target)
    else:
        os.unlink(source)


def _note(folder: str, names: list[str]) -> None:
    with open(os.path.join(folder, _DATA_NAMES), "w", encoding="utf-8") as file:
        file.write("\n".join(names))
        file.flush()
        os.fsync(file.fileno())


def _remove_leftovers(directory: str, name: str) -> None:
    """Remove temporary folders of this target whose process has ended, and data files whose model is gone."""
    pattern = re.compile(rf"\.{re.escape(name)}\.([0-9]+)-[0-9a-f]{{8}}\.bnexport\Z")
    with contextlib.suppress(OSError):
        for entry in os.listdir(directory):
            match = pattern.match(entry)
            if not match or limits.is_alive(int(match.group(1))):
                continue
            folder = os.path.join(directory, entry)
            with (
                contextlib.suppress(OSError, UnicodeDecodeError),
                open(os.path.join(folder, _DATA_NAMES), encoding="utf-8") as file,
            ):
                _remove_unused(directory, name, file.read(1 << 16).split("\n"))
            shutil.rmtree(folder, ignore_errors=True)


def _remove_unused(directory: str, name: str, candidates: list[str]) -> None:
    """Remove data files of the model `name` that it does not refer to; keep all if it cannot be read."""
    if not candidates:
        return
    target, pattern = os.path.join(directory, name), _data_pattern(name)
    used = _locations(target) if os.path.lexists(target) else set()
    if used is None:
        return
    for candidate in candidates:
        if pattern.match(candidate) and candidate not in used:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, candidate))


def _own_data(target: str) -> list[str]:
    """Return the data files that the model at `target` refers to and that carry its name."""
    directory, name = os.path.split(target)
    pattern = _data_pattern(name)
    found = [each for each in os.listdir(directory or ".") if pattern.match(each)]
    used = _locations(target) if found and os.path.exists(target) else None
    return sorted(each for each in found if each in (used or ()))


def _data_pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(name)}(\.[0-9]+)?\.data\Z")


def _locations(path: str) -> set[str] | None:
    """Return the names of the data files that a model refers to, or None if it is not a model."""
    try:
        proto, _ = read_proto(path, path, limits.current())
    except BnexportError:
        return None
    return {
        entry.value for tensor in validate.tensors(proto) for entry in tensor.external_data if entry.key == "location"
    }
