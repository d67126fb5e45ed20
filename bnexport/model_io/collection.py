"""Suspension of Python's cyclic garbage collector while a model is built.

Each full collection visits every object there is. A model of 10,000 convolutions is a million objects, none
of them garbage, and visiting them took half of the time of loading and of folding it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# Objects from which a look at them is worth avoiding. Fewer are collected as usual: in the oldest generation their garbage
# would stay until that has grown by a quarter, which a process that folds many small models takes for a leak.
_MANY = 100_000


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Disable cyclic garbage collection inside, then restore the previous state. Also a decorator."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
            # Into the oldest generation, without a look at them, which the first collection would take.
            gc.freeze()
            gc.unfreeze()
        gc.enable()
