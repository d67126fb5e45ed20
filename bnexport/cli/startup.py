"""A process that is a command line starts fast and ends fast.

onnx-ir imports sympy for arithmetic on symbolic sizes, a quarter of a second in which `fold` could be done with a
small model, and no command does such arithmetic. The models of a command live until its end, where Python would look
through all their objects for cycles before it throws them away: half a second for 10,000 nodes.

Both change the process as a whole, so they are for the command line and not for the library.
"""

from __future__ import annotations

import atexit
import gc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

# What is imported and seldom used; the second is all that uses sympy while it is imported.
_DEFERRED = ("sympy", "onnx_ir._symbolic_shapes")


def prepare() -> None:
    """Makes this process one that ends with its command. What has been imported already stays as it is."""
    if not _prepared():
        sys.meta_path.insert(0, _Deferring())
        atexit.register(_leave)


def _leave() -> None:
    # Compiled modules beside torch complain on stderr about each object that is not thrown away.
    if "torch" not in sys.modules:
        gc.freeze()


def settle() -> None:
    """Exclude all objects that exist now from the collector: the process ends with its command, and so do they."""
    if _prepared():
        gc.freeze()


def _prepared() -> bool:
    return any(isinstance(finder, _Deferring) for finder in sys.meta_path)


class _Deferring:
    """Modules that are loaded when something is taken out of them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _DEFERRED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec
