"""Suspension of Python's cyclic garbage collector while a model is built.

Each full collection visits every object there is. A model of 10,000 convolutions is a million objects, none
of them garbage, and visiting them took half of the time of loading and of folding it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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
        if not gc.get_freeze_count():
            # Into the oldest generation, without a look at them, which the first collection would take.
            gc.freeze()
            gc.unfreeze()
        gc.enable()
