"""Errors and warnings of bnexport, each error with the exit code of the command line."""

from __future__ import annotations

__all__ = [
    "BnexportError",
    "DivergedError",
    "GroupError",
    "LibraryError",
    "MalformedModelError",
    "MissingDependencyError",
    "MissingFileError",
    "MissingPackageError",
    "ModelError",
    "NotConvertedWarning",
    "NotVerifiedWarning",
    "StorageError",
    "UnsafeModelError",
    "UnsupportedModelError",
    "UsageError",
    "VerificationError",
]


_LONGEST = 300


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's text, or the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip(" \t:")), type(error).__name__)


def summary(error: BaseException) -> str:
    """Return the kind of an error, and the first line of its text that says something."""
    kind, text = type(error).__name__, first_line(error)[:_LONGEST]
    return kind if text == kind else f"{kind}: {text}"


class BnexportError(Exception):
    """Base of all errors. The message says what, where, got, expected, and the way out."""

    exit_code = 3


class UsageError(BnexportError, ValueError):
    """An invalid argument."""

    exit_code = 2


class MissingFileError(UsageError, FileNotFoundError):
    """An input file does not exist."""


class StorageError(BnexportError, OSError):
    """A file cannot be written because the disk is full or fails; nothing was changed."""

    exit_code = 4


class ModelError(BnexportError):
    """A refused model."""

    exit_code = 3


class MalformedModelError(ModelError):
    """A model file is truncated, or not a valid ONNX model."""


class UnsafeModelError(ModelError):
    """A model file reaches outside its folder or past a limit."""


class UnsupportedModelError(ModelError):
    """A valid model with a property that cannot be handled correctly."""


class VerificationError(BnexportError):
    """A result that differs from its reference by more than the tolerance."""

    exit_code = 1


class DivergedError(BnexportError, ArithmeticError):
    """A training step gave NaN; the state is that of the step before."""

    exit_code = 1


class NotVerifiedWarning(UserWarning):
    """A file was kept although it could not be verified; the text gives the reason."""


class MissingDependencyError(BnexportError, RuntimeError):
    """A missing dependency or resource."""

    exit_code = 4


class MissingPackageError(ImportError, MissingDependencyError):
    """A Python package that is not installed."""


class LibraryError(MissingDependencyError):
    """A compiled library that cannot be found or loaded."""


class GroupError(MissingDependencyError):
    """A process group that is missing, has another size, or whose members disagree."""


class NotConvertedWarning(UserWarning):
    """A module derives from a batch norm but computes something else, so it is not converted."""
