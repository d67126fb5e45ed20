"""Words of the interface: choices of arguments, extras and their packages, progress."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
from collections.abc import Callable, Collection, Iterator

from bnexport.errors import MissingPackageError, UsageError, first_line

# Arguments with a fixed set of values, and the formats that suffixes name; checked without importing torch.

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


# Packages of the base installation and of the extras, and the advice for one that is missing.

# Distributions as pyproject.toml names them (a test compares). An extra counts as installed if its first one is.
REQUIRED = ("numpy", "ml_dtypes", "onnx", "onnx-ir", "typer", "rich")
EXTRAS = {
    "torch": ("torch", "onnxscript", "safetensors"),
    "cpu": ("onnxruntime",),
    "gpu": ("onnxruntime-gpu",),
}
_ADVICE = {
    "torch": "pip install torch onnxscript safetensors (extra [torch]), torch in the build for your device",
    "onnxruntime": "pip install onnxruntime (extra [cpu]), or onnxruntime-gpu (extra [gpu]), not both",
}


def advice(package: str) -> str | None:
    """Return what to install for a missing package; None for a package that no extra has."""
    if package in _ADVICE:
        return _ADVICE[package]
    if package in REQUIRED or package.replace("_", "-") in REQUIRED:
        return f"pip install {package}, or install bnexport again"
    for extra, packages in EXTRAS.items():
        if package in packages:
            return f"pip install {package} (extra [{extra}])"
    return None


def broken(package: str, error: BaseException) -> MissingPackageError:
    """Return the error for a package that is installed and cannot be loaded, as a build without its libraries."""
    return MissingPackageError(
        f"{package} is installed and cannot be loaded: {first_line(error)}; install it again, with what its build needs:"
        f" {advice(package)}",
        name=package,
    )


def missing(package: str, use: str = "") -> MissingPackageError:
    """Return the error for a package that is not installed. use: a clause such as "HTML reports need it"."""
    way_out = advice(package) or f"pip install {package}"
    return MissingPackageError(f"{package} is not installed{', ' * bool(use)}{use}; {way_out}", name=package)


# Report what long work is doing, to whoever listens: the command line shows it, the library alone is silent.

# Called with the stage, how much of it is done, and how much there is; None where that is not counted.
Listener = Callable[[str, "int | None", "int | None"], None]
_listener: Listener | None = None


def report(stage: str, done: int | None = None, total: int | None = None) -> None:
    """Tell the listener which stage has begun, or how far it is; nothing without a listener."""
    if _listener is not None:
        _listener(stage, done, total)


@contextlib.contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Send reports to `listener` while the context is open; one at a time in a process."""
    global _listener  # noqa: PLW0603 - a property of the process, as the terminal is
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
