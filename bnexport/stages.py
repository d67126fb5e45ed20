"""Report what long work is doing, to whoever listens: the command line shows it, the library alone is silent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

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
