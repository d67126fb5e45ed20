"""Names of models in known libraries, LIBRARY:MODEL?option=value, read without importing torch."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from bnexport.choices import LIBRARIES
from bnexport.cli.console import say
from bnexport.cli.factory import calm
from bnexport.cli.inputs import Argument, missing_input
from bnexport.errors import MissingDependencyError, MissingFileError, UsageError


@dataclasses.dataclass(frozen=True)
class ModelName:
    """A model of a library. text: as it was given."""

    text: str
    library: str
    target: str
    options: dict[str, Any]


def parse_name(text: str) -> ModelName | None:
    """Return the parts of LIBRARY:MODEL?option=value&option=value; None where `text` names no known library.

    Raises:
        UsageError: the model or an option is missing, or the file that it names does not exist.
        MissingDependencyError: the library is not installed.
    """
    library, separator, rest = text.partition(":")
    if not separator or library not in LIBRARIES:
        return None
    known = LIBRARIES[library]
    target, question, query = rest.partition("?")
    options: dict[str, Any] = {}
    for part in query.split("&") if question else ():
        key, equals, value = part.partition("=")
        if not key or not equals:
            raise UsageError(f"{text}: got option {part!r}, expected such as {library}:{target}?in_channels=1")
        options[key] = _value(value)
    if not target:
        raise UsageError(f"{text}: got no model behind {library}:, expected such as {known.example}")
    if known.local and not Path(target).exists():
        raise MissingFileError(f"{text}: no such file {target!r}; a configuration is read from this machine only")
    if not _is_installed(library):
        needs = f"needs {library}, which is not installed; pip install {known.install}"
        raise MissingDependencyError(f"{text}: {needs}")
    return ModelName(text, library, target, options)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # A module without a spec, or one that may not be imported.
        return sys.modules.get(package) is not None


def _value(text: str) -> Any:
    """Return a number, None, True, a tuple or the like; a string where it is none of them."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def build_named(name: ModelName, arguments: list[Argument]) -> tuple[Any, list[Argument]]:
    """Build the model that `name` means, and return it with its example inputs: `arguments`, or what its library states.

    Libraries that could download something find themselves offline.

    Raises:
        UsageError: the library cannot build it, or states no input size.
        MissingDependencyError: a package that the model needs is not installed.
    """
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[variable] = "1"
    from bnexport.exporting import builders
    from bnexport.exporting.arguments import input_names

    with calm():
        built = builders.build(name.library, name.target, name.options, shown=name.text)
    for note in built.notes:
        say(f"note: {note}")
    if arguments:
        return built.module, arguments
    if built.shape is None:
        raise missing_input(name.text)
    (given,) = input_names(built.module, 1)
    say(f"note: input {given}:{','.join(map(str, built.shape))}, as {name.library} states; --input gives another")
    return built.module, [Argument(given, built.shape, None)]
