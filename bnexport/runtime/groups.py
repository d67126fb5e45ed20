"""Groups of processes for nodes inside ONNX Runtime: torch.distributed behind the library's callback.

A node with group_size > 1 finds its group by name in the library's registry. `register_group` puts
there a C callback that gathers float64 numbers with torch.distributed over its backend for CPU tensors (gloo);
nodes on the CUDA provider copy their 2 C + 1 numbers to the host and back. What goes wrong in it - a dead peer, a
timeout - comes back as a message, never as an exception through C frames, and ONNX Runtime raises it from
`session.run`.

Every process of the group must run the same nodes in the same order: one session at a time, in the
(default) sequential execution mode. The library compares a header in every exchange and reports a
mismatch on every rank.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from bnexport.errors import GroupError, UsageError
from bnexport.native import capi

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


__all__ = ["register_group", "unregister_group"]

# Callbacks by group name. The library holds bare pointers to them, so they live until they are
# unregistered; a run in progress may still use one that was just replaced, hence the second place.
_callbacks: dict[str, Any] = {}
_replaced: list[Any] = []


def _write_error(address: int, capacity: int, message: str) -> None:
    if capacity == 0:
        return
    text = message.encode("utf-8", "replace")[: capacity - 1] + b"\0"
    ctypes.memmove(address, text, len(text))


def _make_callback(group_name: str, size: int) -> Any:
    import torch

    from bnexport.sync_bn import distributed

    def all_gather(_: None, send: int, receive: int, count: int, error: int, capacity: int) -> int:
        try:
            numbers = (ctypes.c_double * count).from_address(send)
            rows = distributed.all_gather(torch.frombuffer(numbers, dtype=torch.float64).clone(), group_name)
            ctypes.memmove(receive, rows.data_ptr(), 8 * size * count)
            return 0
        except BaseException as exception:  # nothing may leave a callback, KeyboardInterrupt included
            _write_error(error, capacity, " ".join(str(exception).split()) or type(exception).__name__)
            return 1

    return capi.ALL_GATHER(all_gather)


def register_group(name: str, process_group: ProcessGroup | None = None) -> None:
    """Register `process_group` under `name` for nodes; replace an earlier registration.

    Call it in every process of the group before a session runs. Exporters write "world" for the
    default group. The group needs a backend for CPU tensors (gloo, or "cpu:gloo,cuda:nccl"), for nodes on
    GPUs, too. The group's timeout bounds how long a run waits for a missing peer.

    Args:
        name: the value of the nodes' `group` attribute.
        process_group: a torch.distributed group that this process belongs to; None for the default group.

    Raises:
        UsageError: the name is empty or not a string.
        GroupError: torch.distributed is not initialised, this process is not in the group, or the group has no backend
            for CPU tensors.
        LibraryError: the compiled library is missing.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise UsageError(
            f"register_group: name: got {name!r}, expected the value of the nodes' group attribute, such as 'world'"
        )
    from bnexport.sync_bn import distributed

    if not distributed.is_initialized():
        raise GroupError(
            f"register_group({name!r}): torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )
    group_name = distributed.name_of(process_group)
    group = distributed.resolve(group_name)
    size, rank = group.size(), group.rank()
    if rank < 0:
        raise GroupError(
            f"register_group({name!r}): this process is not a member of the group; register it in members only"
        )
    if distributed.backend_of(group_name, "cpu") is None:
        raise GroupError(
            f"register_group({name!r}): got a group without a backend for CPU tensors, expected one: nodes gather rows"
            ' of a few numbers on the host; make it with gloo, or "cpu:gloo,cuda:nccl"'
        )
    distributed.publish(name, group_name)
    callback = _make_callback(group_name, size)
    _forget(name)
    capi.register_group(name, size, rank, callback)
    _callbacks[name] = callback


def _forget(name: str) -> None:
    if name not in _callbacks:
        return
    capi.unregister_group(name)
    _replaced.append(_callbacks.pop(name))


def unregister_group(name: str) -> None:
    """Remove the registration of the group `name`. Its nodes then fail until it is registered again, and no export
    writes the name.

    Raises:
        GroupError: no group is registered under that name.
    """
    if name not in _callbacks:
        raise GroupError(f"unregister_group: got {name!r}, expected one of {sorted(_callbacks)}")
    from bnexport.sync_bn import distributed

    distributed.withdraw(name)
    _forget(name)
