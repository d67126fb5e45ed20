"""Build torch models by their names in known libraries, without weights and without network access."""

from __future__ import annotations

import importlib
from typing import Any

from bnexport.choices import LIBRARIES
from bnexport.errors import BnexportError, MissingDependencyError, UsageError, first_line
from bnexport.exporting.builders.built import BuiltModel

__all__ = ["BuiltModel", "build"]


def build(library: str, target: str, options: dict[str, Any], *, shown: str) -> BuiltModel:
    """Build the model `target` of a library with random weights.

    Args:
        library: a key of `bnexport.choices.LIBRARIES`.
        target: the model's name there, or the path of its configuration.
        options: keyword arguments of the library's builder; for "mmengine" changes of the configuration.
        shown: how messages name the model.

    Raises:
        UsageError: the library has no such model, or cannot build it with these options.
        MissingDependencyError: the library, or another one that it needs, is not installed.
    """
    builder = importlib.import_module(f"bnexport.exporting.builders.{LIBRARIES[library].builder}")
    try:
        return builder.build(target, options)
    except BnexportError as error:
        raise type(error)(f"{shown}: {error}") from error
    except ModuleNotFoundError as error:
        missing = f"the package {error.name}, which is not installed" if error.name else f"more: {first_line(error)}"
        raise MissingDependencyError(f"{shown}: needs {missing}") from error
    except Exception as error:
        raise UsageError(f"{shown}: building it failed: {type(error).__name__}: {first_line(error)}") from error
