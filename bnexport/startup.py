"""A process of ours, a command or the one that verifies, starts fast and ends fast.

onnx-ir imports sympy for arithmetic on symbolic sizes, a quarter of a second in which `fold` could be done with a
small model, and neither does such arithmetic. What a command imports lives until its end, and the collector of cycles
looks through it over a hundred times while it grows, a tenth of the start. So do the models of a command; at the end
Python would look through all their objects once more before it throws them away: half a second for 10,000 nodes.

All of this changes the process as a whole, so it is not for the library in somebody else's.
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
# New objects between two looks of the collector; Python's default is 700.
_OBJECTS = 50_000


def prepare() -> None:
    """Makes this process one that ends with its command. What has been imported already stays as it is."""
    if not _prepared():
        sys.meta_path.insert(0, _Deferring())
        gc.set_threshold(_OBJECTS)
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
