"""The errors that bnexport raises on purpose, each with the exit code of the command line."""

from __future__ import annotations

__all__ = [
    "BnexportError",
    "GroupError",
    "LibraryError",
    "MalformedModelError",
    "MissingDependencyError",
    "MissingFileError",
    "ModelError",
    "NotConvertedWarning",
    "NotVerifiedWarning",
    "StorageError",
    "UnsafeModelError",
    "UnsupportedModelError",
    "UsageError",
    "VerificationError",
]


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, or its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip(" \t:")), type(error).__name__)


class BnexportError(Exception):
    """Base of all errors. The message says what, where, got, expected, and the way out."""

    exit_code = 3


class UsageError(BnexportError, ValueError):
    """An argument is wrong."""

    exit_code = 2


class MissingFileError(UsageError, FileNotFoundError):
    """A file that is to be read does not exist."""


class StorageError(BnexportError, OSError):
    """A file cannot be written because the disk is full or fails; nothing was changed."""

    exit_code = 4


class ModelError(BnexportError):
    """A model is refused."""

    exit_code = 3


class MalformedModelError(ModelError):
    """A model file is truncated, or not a valid ONNX model."""


class UnsafeModelError(ModelError):
    """A model file reaches outside its folder or past a limit."""


class UnsupportedModelError(ModelError):
    """A valid model asks for something that cannot be done correctly."""


class VerificationError(BnexportError):
    """A result differs from its reference by more than the tolerance."""

    exit_code = 1


class NotVerifiedWarning(UserWarning):
    """A file was kept although nothing could show that it is right; the text says why."""


class MissingDependencyError(BnexportError, RuntimeError):
    """Something that has to be installed or started is missing."""

    exit_code = 4


class LibraryError(MissingDependencyError):
    """The compiled custom-op library cannot be found or loaded."""


class GroupError(MissingDependencyError):
    """A process group is missing, has another size, or its members disagree."""


class NotConvertedWarning(UserWarning):
    """A module derives from a batch norm and computes something else: it stays as it is."""
