"""Search, loading and registration of the compiled libraries.

They belong to the installed distribution, not to the folder this file lies in: an editable install keeps Python files
in the checkout and the compiled files in site-packages. So the record of the installation is asked first.

The environment variable BNEXPORT_LIBRARY, when set, names the operators' library to use and overrides everything; it
serves development builds. The other two lie next to it; BNEXPORT_CUDA_LIBRARY names another CUDA library, or none.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bnexport import __version__
from bnexport.errors import LibraryError, UsageError, first_line

if TYPE_CHECKING:
    import onnxruntime

__all__ = [
    "CUDA_ENVIRONMENT_VARIABLE",
    "ENVIRONMENT_VARIABLE",
    "Kind",
    "file_name",
    "find",
    "get_library_path",
    "load",
    "register",
    "version",
]

ENVIRONMENT_VARIABLE = "BNEXPORT_LIBRARY"
CUDA_ENVIRONMENT_VARIABLE = "BNEXPORT_CUDA_LIBRARY"
OTHERS_VARIABLE = "BNEXPORT_OTHER_LIBRARIES"  # custom-op libraries of other projects, separated as in PATH

Kind = Literal["ops", "cuda", "training"]

_DISTRIBUTION = "bnexport"
_STEMS: dict[str, str] = {"ops": "bnexport_ops", "cuda": "bnexport_ops_cuda", "training": "bnexport_training"}
_VERSIONS = {"ops": "bnexport_version", "cuda": "bnexport_cuda_version", "training": "bnexport_training_version"}
_WAYS_OUT = {
    "cuda": "bnexport was built without it: in a clone, `make cuda`, or pip install . "
    f"-C cmake.define.BNEXPORT_CUDA=ON with nvcc on PATH; or set {CUDA_ENVIRONMENT_VARIABLE} if it lies elsewhere",
    "training": "install bnexport again, or put all libraries of one build into one folder",
}


def file_name(kind: Kind) -> str:
    """Return the library's file name; CMake names MODULE libraries .so on Linux and macOS alike."""
    return f"{_STEMS[kind]}.dll" if sys.platform == "win32" else f"lib{_STEMS[kind]}.so"


def is_pure() -> bool:
    """Whether the wheel for any system is installed, which has no compiled library."""
    try:
        wheel = importlib.metadata.distribution(_DISTRIBUTION).read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return False
    return "Root-Is-Purelib: true" in wheel


def _installed() -> Path | None:
    try:
        files = importlib.metadata.distribution(_DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == file_name("ops"):
            path = Path(str(file.locate()))
            if path.is_file():
                return path.resolve()
    return None


def get_library_path(kind: Literal["ops", "cuda", "training"] = "ops") -> str:
    """Return the absolute path of a compiled library, for `SessionOptions.register_custom_ops_library` in any language.

    kind: "ops", batch norm and its gradient, all that deployment needs; "training", the kernels of training steps, which
    is registered next to the first; "cuda", the CUDA kernels, which the first opens itself.

    Raises:
        LibraryError: there is no such library, or an environment variable names a file that does not exist.
        UsageError: another kind.
    """
    if kind not in _STEMS:
        raise UsageError(f"kind: got {kind!r}, expected one of {', '.join(map(repr, _STEMS))}")
    found = find(kind)
    if found is not None:
        return found
    if is_pure():
        raise LibraryError(
            f"{file_name(kind)}: got none, this is bnexport's wheel for any system; a kept node needs the compiled library:"
            " install a wheel for this system, or compile one: pip install --no-binary bnexport bnexport"
        )
    if kind == "ops":
        raise LibraryError(
            f"{file_name(kind)} is not installed with bnexport; install bnexport with pip (it compiles the library), "
            f"or set {ENVIRONMENT_VARIABLE} to a built one"
        )
    raise LibraryError(f"{file_name(kind)}: got none next to {get_library_path()}; {_WAYS_OUT[kind]}")


def find(kind: Kind) -> str | None:
    """Return the absolute path of a compiled library, or None if it is not there.

    Raises LibraryError where an environment variable names a file that does not exist.
    """
    variable = {"ops": ENVIRONMENT_VARIABLE, "cuda": CUDA_ENVIRONMENT_VARIABLE}.get(kind)
    override = os.environ.get(variable) if variable else None
    if override:
        if not Path(override).is_file():
            raise LibraryError(
                f"{variable}: got {override!r}, expected an existing {file_name(kind)}; correct the variable or unset it"
                + (" (`make cuda` builds one)" if kind == "cuda" else "")
            )
        return str(Path(override).resolve())
    if kind == "ops":
        beside = Path(__file__).resolve().parent.parent / "lib" / file_name(kind)
        path = _installed() or beside
    elif override is not None or (operators := find("ops")) is None:
        return None
    else:
        path = Path(operators).parent / file_name(kind)
    return str(path.resolve()) if path.is_file() else None


def load(kind: Kind) -> ctypes.CDLL:
    """Load the library. Raise LibraryError if it is missing, cannot be loaded, or has another version."""
    path = get_library_path(kind)
    try:
        loaded = ctypes.CDLL(path)
        function = getattr(loaded, _VERSIONS[kind])
    except (OSError, AttributeError) as error:
        raise LibraryError(
            f"{path}: cannot be loaded: {error}; expected the library of this bnexport; reinstall bnexport"
        ) from error
    function.restype = ctypes.c_char_p
    found = function().decode("utf-8", "replace")
    if found != __version__:
        raise LibraryError(f"{path}: got version {found}, expected {__version__}, that of bnexport; reinstall bnexport")
    return loaded


def version(kind: Kind) -> str:
    """Return the version of a library. Raise LibraryError, see `load`."""
    return str(getattr(load(kind), _VERSIONS[kind])().decode())


# A session accepts a domain once and says so only when it is built; asking twice is no mistake.
_registered: dict[str, weakref.WeakSet[Any]] = {"ops": weakref.WeakSet(), "training": weakref.WeakSet()}


def register(session_options: onnxruntime.SessionOptions, training: bool = False) -> None:
    """Add the operators to `session_options`. A second call changes nothing.

    training: also the kernels of training steps, which graphs of `export_training_step` need. They serve every session
    of the process from then on.

    Raises:
        LibraryError: a library is missing or of another version, or this ONNX Runtime cannot load it.
    """
    kinds: tuple[Kind, ...] = ("ops", "training") if training else ("ops",)
    for kind in kinds:
        path = get_library_path(kind)
        if session_options in _registered[kind]:
            continue
        load(kind)
        _register(session_options, path, "onnxruntime 1.17 or newer; reinstall bnexport")
        _registered[kind].add(session_options)


def register_others(session_options: onnxruntime.SessionOptions) -> None:
    """Add the custom-op libraries that BNEXPORT_OTHER_LIBRARIES names. Raise LibraryError where one cannot be loaded."""
    for path in filter(None, os.environ.get(OTHERS_VARIABLE, "").split(os.pathsep)):
        _register(session_options, path, "this version of it (--library, BNEXPORT_OTHER_LIBRARIES)")


def _register(session_options: onnxruntime.SessionOptions, path: str, expected: str) -> None:
    try:
        session_options.register_custom_ops_library(path)
    except Exception as error:
        import onnxruntime

        raise LibraryError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load {path}: {first_line(error)}; expected a library built "
            f"for this system and {expected}"
        ) from error
