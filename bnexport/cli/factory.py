"""MODULE:FACTORY arguments as torch modules, and what torch has against them in one line."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from bnexport.cli.console import is_verbose
from bnexport.errors import BnexportError, UnsupportedModelError, UsageError, first_line


def build(factory: str) -> Any:
    import torch

    module_name, separator, attribute = factory.partition(":")
    if not separator or not module_name or not attribute:
        raise UsageError(f"MODULE:FACTORY: got {factory!r}, expected such as models.resnet:digits_resnet")
    sys.path.insert(0, os.getcwd())
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        place = f"; modules are looked for in {os.getcwd()!r} and on PYTHONPATH" if error.name == module_name else ""
        raise UsageError(f"{factory}: cannot be imported: {error}{place}") from error
    except Exception as error:
        raise UsageError(f"{factory}: cannot be imported: {_summary(error)}") from error
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
            f"{factory}: calling it without arguments failed: {_summary(error)}; "
            "write a function of your own that builds the module"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{factory}: returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


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
def explained(factory: str, model: Any, args: tuple[Any, ...]) -> Iterator[None]:
    """torch's own errors, in one line: do the inputs not fit the module, or can the module not be exported?"""
    import torch

    try:
        yield
    except Exception as raised:
        error: BaseException = raised
        if isinstance(raised, BnexportError):
            from bnexport.exporting.wrapper import ExporterFailure

            if not isinstance(raised, ExporterFailure) or raised.__cause__ is None:
                raise
            error = raised.__cause__
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in args)
        try:
            with torch.no_grad():
                model.eval()(*args)
        except Exception as reason:
            raise UsageError(
                f"--input: {factory} does not run on inputs of shape {shapes}: {_summary(reason)}"
            ) from error
        raise UnsupportedModelError(
            f"{factory}: torch cannot export it, though it runs: {_summary(error)}; "
            "see all of it with -v, or try --exporter torchscript or --format torchscript"
        ) from error


def _summary(error: BaseException) -> str:
    """Its kind, and the first line of its text that says something."""
    kind, text = type(error).__name__, first_line(error)
    return kind if text == kind else f"{kind}: {text}"
