"""MODULE:FACTORY arguments as torch modules, and what torch has against them in one line."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bnexport.cli.console import detail, is_verbose, say
from bnexport.cli.input_options import Argument, missing_input
from bnexport.errors import MissingDependencyError, MissingFileError, UnsupportedModelError, UsageError, summary
from bnexport.interface import LIBRARIES, suggestion

_WEIGHTS = (".pth", ".pt", ".ckpt", ".bin", ".safetensors")
_NAMED = 8  # names that a note lists


def check_reference(reference: str, argument: str = "MODULE:FACTORY") -> None:
    """Raise UsageError for a MODULE:NAME that cannot be meant, before anything slow is imported."""
    module_name, separator, attribute = reference.partition(":")
    if reference.endswith(".onnx") and not separator:
        raise UsageError(
            f"{argument}: got the ONNX file {reference!r}, expected a function that builds a torch module; to fold a file: "
            f"bnexport fold {reference} OUT.onnx"
        )
    if reference.endswith(_WEIGHTS) and not separator:
        raise UsageError(
            f"{argument}: got the file of weights {reference!r}, expected a function that builds the module; then "
            f"--checkpoint {reference}"
        )
    path, extension, _ = module_name.partition(".py")
    if extension and (separator or os.path.isfile(reference)):
        folder, stem = os.path.split(path)
        place = f", and run it in the folder {folder!r} or with that on PYTHONPATH" if folder else ""
        raise UsageError(
            f"{argument}: got the file {module_name!r}, expected a module: write {stem}:{attribute or 'FUNCTION'}{place}"
        )
    if "?" in attribute:
        raise UsageError(
            f"{argument}: got {reference!r}; arguments behind ? are for models of {', '.join(LIBRARIES)}; write a function "
            "without arguments that builds the module"
        )
    if not separator or not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise UsageError(f"{argument}: got {reference!r}, expected such as models.resnet:digits_resnet")
    shown = f"{argument} {reference}" if argument.startswith("--") else reference
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    top = module_name.partition(".")[0]
    if not _is_installed(top):
        raise UsageError(
            f"{shown}: cannot be imported: No module named {top!r}; "
            f"modules are looked for in {folder!r} and on PYTHONPATH"
        )


def imported(reference: str, shown: str) -> Any:
    """Import what MODULE:NAME names. Raises UsageError. shown: how messages name it."""
    check_reference(reference)
    module_name, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        place = f"; modules are looked for in {os.getcwd()!r} and on PYTHONPATH" if error.name == module_name else ""
        raise UsageError(f"{shown}: cannot be imported: {error}{place}") from error
    except Exception as error:
        near = suggestion(attribute, dir(sys.modules.get(module_name))) if isinstance(error, AttributeError) else ""
        raise UsageError(f"{shown}: cannot be imported: {summary(error)}{near}") from error


def build(factory: str) -> Any:
    """Build the module that MODULE:FACTORY names; raise UsageError with the factory's own error."""
    import torch

    target = imported(factory, factory)
    if isinstance(target, torch.nn.Module):
        return target
    if not callable(target):
        raise UsageError(
            f"{factory}: got a {type(target).__name__}, expected a function that returns a torch.nn.Module"
        )
    try:
        model = target()
    except Exception as error:
        raise UsageError(
            f"{factory}: calling it without arguments failed: {summary(error)}; "
            "write a function of your own that builds the module"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{factory}: returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


def load_weights(model: Any, path: Path, key: str | None, allow_unexpected: bool) -> None:
    """Load a checkpoint into the module, and say what was taken and what was not."""
    from bnexport.exporting.checkpoint import load_checkpoint

    loaded = load_checkpoint(model, path, key=key, allow_unexpected=allow_unexpected)
    detail(f"weights of {path}, from {loaded.container or 'the top'!r}, without {loaded.prefix!r}")
    if loaded.others:
        others = ", ".join(repr(name) if name else "the top" for name in loaded.others)
        say(f"note: {path}: the weights are those of {loaded.container or 'the top'!r}; {others} has others (--key)")
    for what, names in (("objects that were not built", loaded.ignored_objects), ("unexpected", loaded.unexpected)):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            say(f"note: {path}: {what}: {', '.join(names[:_NAMED])}{more}")


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """Without the warnings and graphs that torch prints, unless -v asks for them; our own notes are in the result."""
    if is_verbose():
        yield
        return
    unread = io.StringIO()
    with contextlib.redirect_stdout(unread), contextlib.redirect_stderr(unread):
        yield


@contextlib.contextmanager
def explained(factory: str, exporter: str | None = None) -> Iterator[None]:
    """Errors of the module and of torch's exporters in the words of the command line."""
    from bnexport.exporting.wrapper import ExporterFailure, ForwardFailure

    try:
        yield
    except ForwardFailure as error:
        raise UsageError(f"--input: {factory} {error.what}") from error
    except ExporterFailure as error:
        other = "dynamo" if exporter == "torchscript" else "torchscript"
        text = error.text(factory, error.__cause__ or error, "--exporter {}", "--format {}", f"--exporter {other}")
        raise UnsupportedModelError(f"{text}; -v shows all of the error") from error


# Names of models in known libraries, LIBRARY:MODEL?option=value, read without importing torch.


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
