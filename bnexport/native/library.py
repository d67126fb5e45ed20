"""Where the compiled library is, and how it gets into an ONNX Runtime session.

The library belongs to the installed distribution, not to the folder this file lies in: an editable
install keeps Python files in the checkout and the compiled file in site-packages. So the record of
the installation is asked first.

The environment variable BNEXPORT_LIBRARY, when set, names the file to use and overrides everything;
it serves development builds.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnexport.errors import LibraryError

if TYPE_CHECKING:
    import onnxruntime

__all__ = ["CUDA_ENVIRONMENT_VARIABLE", "ENVIRONMENT_VARIABLE", "get_cuda_library_path", "get_library_path", "register"]

ENVIRONMENT_VARIABLE = "BNEXPORT_LIBRARY"
CUDA_ENVIRONMENT_VARIABLE = "BNEXPORT_CUDA_LIBRARY"

_DISTRIBUTION = "bnexport"
# CMake names MODULE libraries .so on Linux and on macOS alike.
_FILE_NAME = "bnexport_ops.dll" if sys.platform == "win32" else "libbnexport_ops.so"
_CUDA_FILE_NAME = "bnexport_ops_cuda.dll" if sys.platform == "win32" else "libbnexport_ops_cuda.so"


def _installed() -> Path | None:
    try:
        files = importlib.metadata.distribution(_DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == _FILE_NAME:
            path = Path(str(file.locate()))
            if path.is_file():
                return path.resolve()
    return None


def get_library_path() -> str:
    """Absolute path of the custom-op library, for `SessionOptions.register_custom_ops_library` in any language.

    Raises:
        LibraryError: no library is installed, or BNEXPORT_LIBRARY names a file that does not exist.
    """
    override = os.environ.get(ENVIRONMENT_VARIABLE)
    if override:
        path = Path(override)
        if not path.is_file():
            raise LibraryError(
                f"{ENVIRONMENT_VARIABLE}: got {override!r}, expected an existing {_FILE_NAME}; correct the variable or unset it"
            )
        return str(path.resolve())
    beside = Path(__file__).resolve().parent.parent / "lib" / _FILE_NAME
    found = _installed() or (beside if beside.is_file() else None)
    if found is None:
        raise LibraryError(
            f"{_FILE_NAME} is not installed with bnexport; install bnexport with pip (it compiles the library), "
            f"or set {ENVIRONMENT_VARIABLE} to a built one"
        )
    return str(found)


def get_cuda_library_path() -> str | None:
    """Absolute path of the library with the CUDA kernels, which lies beside the other; None where there is none.

    The environment variable BNEXPORT_CUDA_LIBRARY, when set, names the file to use; empty, it means none.

    Raises:
        LibraryError: see `get_library_path`; or the variable names a file that does not exist.
    """
    override = os.environ.get(CUDA_ENVIRONMENT_VARIABLE)
    if override and not Path(override).is_file():
        raise LibraryError(
            f"{override}: got no such file, expected the CUDA library; build it with `make cuda`, or correct or unset "
            f"{CUDA_ENVIRONMENT_VARIABLE}"
        )
    path = Path(get_library_path()).parent / _CUDA_FILE_NAME if override is None else Path(override)
    return str(path.resolve()) if path.is_file() else None


# A session accepts a domain once and says so only when it is built; asking twice is no mistake.
_registered: weakref.WeakSet[Any] = weakref.WeakSet()


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Adds the operators to `session_options`. Doing it again changes nothing.

    Raises:
        LibraryError: the library is missing, or this ONNX Runtime cannot load it.
    """
    path = get_library_path()
    if session_options in _registered:
        return
    try:
        session_options.register_custom_ops_library(path)
    except Exception as error:
        import onnxruntime

        raise LibraryError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load {path}: {error}; expected a library built for this system and "
            "onnxruntime 1.17 or newer; reinstall bnexport"
        ) from error
    _registered.add(session_options)
