"""Groups between GPUs, for nodes on the CUDA provider: one NCCL communicator for each registered group.

The id that its members share travels through the store of the torch.distributed group.
"""

from __future__ import annotations

from bnexport.errors import GroupError
from bnexport.native import nccl
from bnexport.sync_bn import distributed

__all__ = ["join"]

_joined: dict[tuple[str, int], int] = {}


def join(group_name: str, size: int, rank: int) -> nccl.Communicator:
    """Create a communicator of the torch.distributed group `group_name`, on this process's current CUDA device.

    Every member calls it, the same number of times; it returns when all have. `group_name` is the name of
    bnexport.sync_bn.distributed.

    Raises:
        GroupError: NCCL is missing or fails, or a member does not come within the group's timeout.
        LibraryError: there is no CUDA library.
    """
    import torch

    store = distributed.store_of(group_name)
    number = _joined[group_name, rank] = _joined.get((group_name, rank), 0) + 1
    key = f"bnexport/nccl/{number}"
    if rank == 0:
        store.set(key, nccl.unique_id())
    try:
        identifier = store.get(key)
    except RuntimeError as error:
        raise GroupError(f"group {group_name!r}: rank 0 did not join within the group's timeout: {error}") from error
    torch.cuda.synchronize()  # the device has a context, and it is the current one
    return nccl.join(identifier, size, rank, store.timeout.total_seconds())
