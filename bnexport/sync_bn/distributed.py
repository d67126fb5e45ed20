"""The only file that knows torch.distributed: groups by name, one gather, one agreement.

Operators carry a group as a string. A name is local to this process unless it is "world": it
resolves to a torch.distributed group here and is never written into a model as it stands.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bnexport import schema
from bnexport.errors import GroupError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Bytes of the header that members compare before their first gather: the same for every layer and
# rank, since members of different layers must be able to exchange it.
_HEADER_BYTES = 256

# torch 2.13 renamed the function and deprecates the old name.
_gather_single = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

_groups: dict[str, Any] = {}
# (group name, id of the group, layer): a group made anew under an old name agrees anew.
_agreed: set[tuple[str, int, int]] = set()


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def name_of(group: ProcessGroup | None) -> str:
    """The name under which operators find `group`; "world" for the default group, "" for no group.

    None means the default group when torch.distributed is initialised.
    """
    if not is_initialized():
        return ""
    if group is None or group is dist.group.WORLD:
        return schema.WORLD_GROUP
    name = group.group_name
    _groups[name] = group
    return name


def size_of(group: ProcessGroup | None) -> int:
    """Number of members; 1 when torch.distributed is not initialised."""
    if not is_initialized():
        return 1
    return dist.get_world_size(group)


def resolve(name: str) -> ProcessGroup:
    """The group called `name`. Raises GroupError when there is none."""
    if not is_initialized():
        raise GroupError(f"group {name!r}: torch.distributed is not initialised; call torch.distributed.init_process_group first")
    if name == schema.WORLD_GROUP:
        return dist.group.WORLD
    try:
        return _groups[name]
    except KeyError:
        raise GroupError(f"group {name!r}: unknown in this process; known: {sorted(_groups)}; pass the ProcessGroup to the module") from None


def all_gather(row: torch.Tensor, name: str) -> torch.Tensor:
    """Gathers rows (n,) of equal size to (group_size, n) in rank order: one collective.

    Raises GroupError when the collective fails or times out, as when a member died.
    """
    group = resolve(name)
    rows = row.new_empty(dist.get_world_size(group) * row.numel())
    try:
        _gather_single(rows, row, group=group)
    except RuntimeError as error:
        raise GroupError(f"group {name!r}: the exchange of statistics failed on rank {dist.get_rank(group)}: {error}") from error
    return rows.view(-1, row.numel())


def agree(name: str, layer: int, header: dict[str, Any], device: torch.device) -> None:
    """Compares `header` between the members before layer `layer` gathers for the first time.

    Members that disagree (on C, say) would gather buffers of different sizes, which aborts a
    process under gloo. The header has a fixed size, so the comparison itself is always safe.
    Raises GroupError on every member, naming the ranks and their values.
    """
    group = resolve(name)
    if (name, id(group), layer) in _agreed:
        return
    encoded = json.dumps(header, sort_keys=True).encode()
    if len(encoded) > _HEADER_BYTES:
        raise GroupError(f"group {name!r}: header of {len(encoded)} bytes, expected at most {_HEADER_BYTES}")
    mine = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
    mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    mine = mine.to(device)
    every = all_gather(mine, name).cpu()
    headers = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in every]
    different = sorted(key for key in header if any(other.get(key) != headers[0].get(key) for other in headers))
    if different:
        values = "; ".join(
            f"{key}: " + ", ".join(f"rank {rank} has {other.get(key)!r}" for rank, other in enumerate(headers)) for key in different
        )
        raise GroupError(f"group {name!r}: the members disagree in a sync batch norm layer ({values}); give every rank the same model")
    _agreed.add((name, id(group), layer))
