"""Arguments with a fixed set of values, and the formats that suffixes name; checked without importing torch."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Collection

from bnexport.errors import UsageError

MODES = ("deploy", "custom_op")
EXPORTERS = ("dynamo", "torchscript")
OPTIMIZERS = ("sgd", "adam", "adamw")
CLASS_LOSSES = ("cross_entropy", "nll_loss")
VALUE_LOSSES = ("binary_cross_entropy_with_logits", "l1_loss", "mse_loss", "smooth_l1_loss")
LOSSES = (*CLASS_LOSSES, *VALUE_LOSSES)
# Formats by the suffix of their files.
SUFFIXES = {".onnx": "onnx", ".pt": "torchscript", ".pt2": "pt2"}
FORMATS = tuple(SUFFIXES.values())


@dataclasses.dataclass(frozen=True)
class Library:
    """A library of models, by the name of its package. install: what pip is told. example: of a name.

    local: whether names are files of this machine.
    """

    install: str
    example: str
    local: bool = False


# By what a name begins with, as timm in timm:resnet50d.
LIBRARIES = {
    "timm": Library("timm", "timm:resnet50d"),
    "torchvision": Library("torchvision", "torchvision:resnet18"),
    "mmengine": Library(
        "mmengine, mmcv and the library of the configuration, such as mmsegmentation", "mmengine:config.py", local=True
    ),
}


def suggestion(value: str, known: Collection[str]) -> str:
    """Return a clause for an error message that names the known value nearest to `value`; empty where none is near."""
    near = difflib.get_close_matches(value, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    """Raise UsageError for a value of the argument `name` that is not among those allowed."""
    if value not in allowed:
        raise UsageError(
            f"{name}: got {value!r}, expected one of {', '.join(allowed)}{suggestion(str(value), allowed)}"
        )


def choose_format(
    path: str | os.PathLike[str], given: str | None, *, path_name: str = "path", name: str = "format"
) -> str:
    """Return the format of the file at `path`: the one given, or the one that the suffix names.

    Raises UsageError for a format that is none, a suffix that names another one, and an unknown suffix alone.
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    named = SUFFIXES.get(suffix)
    if given is not None:
        check_choice(name, given, FORMATS)
    if named is None and given is None:
        listed = ", ".join(f"{each} ({kind})" for each, kind in SUFFIXES.items())
        raise UsageError(
            f"{path_name}: got {os.fspath(path)!r}, whose suffix names no format; expected one of {listed}, "
            f"or give {name} as well"
        )
    if named is not None and given is not None and named != given:
        raise UsageError(
            f"{name}: got {given!r} for {os.fspath(path)!r}, whose suffix {suffix} names {named!r}; change one of them"
        )
    return given or named or ""


def check_onnx_suffix(path: str | os.PathLike[str], name: str) -> None:
    """Raise UsageError for a file whose suffix names a format other than ONNX."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    named = SUFFIXES.get(suffix, "onnx")
    if named != "onnx":
        raise UsageError(
            f"{name}: got {os.fspath(path)!r}, whose suffix names {named!r}; an ONNX file is written, expected .onnx"
        )
