"""Room on Python's stack for models of deeply nested modules: copies and exporters take many calls for each level."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from torch import nn

# Calls for each level of nesting: 8 of copy.deepcopy, 13 of torch.export. And levels that fit on the system's stack.
_CALLS, _LEVELS = 20, 400
_lock = threading.Lock()
_needs: list[int] = []
_before: list[int] = []  # the limit while nobody needs more


@contextlib.contextmanager
def room_for(model: nn.Module) -> Iterator[None]:
    """Raise Python's recursion limit as far as `model` needs it. Several threads may do so at a time."""
    need = _CALLS * min(_depth(model), _LEVELS)
    with _lock:
        if not _needs:
            _before[:] = [sys.getrecursionlimit()]
        _needs.append(need)
        sys.setrecursionlimit(_before[0] + max(_needs))
    try:
        yield
    finally:
        with _lock:
            _needs.remove(need)
            # A limit below the calls of now is an error; the next one in another place sets it.
            with contextlib.suppress(RecursionError):
                sys.setrecursionlimit(_before[0] + max(_needs, default=0))


def _depth(model: nn.Module) -> int:
    """Return the levels of modules below `model`; itself without recursion."""
    depth, level, seen = 0, [model], {id(model)}
    while level:
        children = [child for module in level for child in module._modules.values() if child is not None]
        level = [child for child in children if id(child) not in seen]
        seen.update(id(child) for child in level)
        depth += bool(level)
    return depth
