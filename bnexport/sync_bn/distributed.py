"""Access to torch.distributed (the only file that imports it): groups by name, agreement between members, one
gather.

Operators carry a group as a string. A name is local to this process unless it is "world": it
resolves to a torch.distributed group here and is never written into a model as it stands.

Members that run different layers at the same time must get an error, but gloo aborts a process that
receives a longer message than it expects. Hence two measures:

- Before a layer's first gather the members compare a small header through the group's store, whose
  waiting ends with the group's timeout wherever the others are.
- On CPU every gather of a group has one length, that of its widest layer, and ends with the number
  of the layer's agreement: a member that skipped a layer is found at once, on every member.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bnexport import schema, torch_versions
from bnexport.errors import GroupError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclasses.dataclass
class _Membership:
    """State of this process in a group: its layers by agreement number, and the longest row."""

    name: str
    group: weakref.ref[Any]
    size: int
    rank: int
    agreements: int = 0
    numbers: dict[tuple[int, str], int] = dataclasses.field(default_factory=dict)
    headers: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    row_length: int = 0


# Weak references: destroy_process_group must free the group. A gloo group that lives on keeps its threads, and one of
# them may let go of its last tensor while the interpreter shuts down, which ends the process in std::terminate.
_groups: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_memberships: dict[str, _Membership] = {}
# For messages: the usual reason why a member does not come.
_UNEVEN = "a process that runs out of batches before the others must go on with empty ones, of shape (0, C, *)"
_published: dict[str, str] = {}
_silent: list[bool] = []


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def name_of(group: ProcessGroup | None) -> str:
    """Return the name under which operators find `group`: "world" for the default group, "" for no group.

    None means the default group when torch.distributed is initialised.
    """
    if not is_initialized():
        return ""
    if group is None or group is dist.group.WORLD:
        return schema.WORLD_GROUP
    name = group.group_name
    if (
        not torch.compiler.is_compiling()
    ):  # a compiler breaks its graph here, and the module that it traces has called this
        _groups[name] = group
    return name


def size_of(group: ProcessGroup | None) -> int:
    """Return the number of members; 1 if torch.distributed is not initialised."""
    return dist.get_world_size(group) if is_initialized() else 1


def backend_of(name: str, device: str) -> str | None:
    """Return the backend of the group `name` for tensors on "cpu" or "cuda", such as "gloo" or "nccl"; None if there
    is none.
    """
    config = dist.get_backend_config(resolve(name))
    entries = (entry.partition(":") for entry in config.split(","))
    return next((backend for kind, _, backend in entries if kind == device), None)


def store_of(name: str) -> Any:
    """Return the key-value store of the group `name`; waiting in it ends with the group's timeout."""
    return torch_versions.group_store(resolve(name))


def resolve(name: str) -> Any:
    """Return the group `name`. Raise GroupError if it does not exist."""
    if not is_initialized():
        raise GroupError(
            f"group {name!r}: torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )
    if name == schema.WORLD_GROUP:
        return dist.group.WORLD
    try:
        return _groups[name]
    except KeyError:
        raise GroupError(
            f"group {name!r}: unknown in this process; known: {sorted(_groups)}; pass the ProcessGroup to the module"
        ) from None


def exchange(
    row: torch.Tensor, name: str, group_size: int, layer: int, purpose: str, header: dict[str, Any]
) -> torch.Tensor:
    """Gather this layer's float64 row (n,) from all members to (group_size, n) in rank order: one collective.

    layer names a module within this process; purpose ("forward", ...) tells its exchanges apart;
    header is compared before the first exchange.

    Raises GroupError when group_size is not the group's, when members disagree or are in different
    layers, and when the collective fails or times out, as when a member died.
    """
    membership = _membership(name)
    if _silent:
        row = torch.zeros_like(row)
    if membership.size != group_size:
        raise GroupError(
            f"group {name!r}: got group_size {group_size}, expected {membership.size}, the number of its members"
        )
    number = membership.numbers.get((layer, purpose))
    if number is None:
        number = _agree(membership, {"pass": purpose, "length": row.numel(), **header})
        membership.numbers[layer, purpose] = number
    if row.device.type != "cpu":
        return _gather(membership, row)
    padded = row.new_zeros(membership.row_length)
    padded[: row.numel()] = row
    padded[-1] = number
    rows = _gather(membership, padded)
    places = rows[:, -1].tolist()
    if any(place != number for place in places):
        raise GroupError(
            f"group {name!r}: the members are in different layers: "
            + ", ".join(f"rank {rank} in {_describe(membership, int(place))}" for rank, place in enumerate(places))
            + "; every rank must run the same layers in the same order"
        )
    return rows[:, : row.numel()].contiguous()


def all_gather(row: torch.Tensor, name: str) -> torch.Tensor:
    """Gather rows (n,), of one size on every member, to (group_size, n) in rank order. Raises GroupError."""
    return _gather(_membership(name), row)


def all_gather_objects(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Gather one picklable value of each member, of any size, in rank order. Raises GroupError."""
    if not is_initialized():
        return [value]
    membership = _membership(name_of(group))
    values = [None] * membership.size
    try:
        dist.all_gather_object(values, value, group=membership.group())
    except RuntimeError as error:
        raise GroupError(f"group {membership.name!r}: an exchange failed on rank {membership.rank}: {error}") from error
    return values


def all_reduce(tensor: torch.Tensor, name: str) -> None:
    """Sum `tensor`, of one size on every member, in place; every member gets the same bits. Raises GroupError."""
    membership = _membership(name)
    try:
        dist.all_reduce(tensor, group=membership.group())
    except RuntimeError as error:
        raise GroupError(
            f"group {name!r}: a sum over the processes failed on rank {membership.rank}: {error}"
        ) from error


def broadcast(tensors: Sequence[torch.Tensor], values: list[Any], name: str, rank: int) -> list[Any]:
    """Give every member the tensors, in place, and the picklable values of member `rank`. Raises GroupError."""
    membership = _membership(name)
    group, box = resolve(name), [values]
    source = dist.get_global_rank(group, rank)
    try:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), source, group=group)
        dist.broadcast_object_list(box, source, group=group)
    except RuntimeError as error:
        raise GroupError(f"group {name!r}: an exchange failed on rank {membership.rank}: {error}") from error
    return box[0]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Take part in exchanges of statistics with rows of an empty batch; in all threads, for autograd has its own."""
    _silent.append(True)
    try:
        yield
    finally:
        _silent.pop()


def is_silent() -> bool:
    return bool(_silent)


def publish(public_name: str, name: str) -> None:
    """Record that models refer to the group `name` of this process as `public_name`."""
    _published[name] = public_name


def withdraw(public_name: str) -> None:
    """Undo `publish`: no group of this process is called `public_name` in models."""
    for name in [name for name, known in _published.items() if known == public_name]:
        del _published[name]


def published_name(name: str) -> str | None:
    """Return the name of the group `name` in models: "world", or its registered name."""
    return name if name == schema.WORLD_GROUP else _published.get(name)


def _membership(name: str) -> _Membership:
    group = resolve(name)
    known = _memberships.get(name)
    if known is None or known.group() is not group:
        # A group made anew under an old name agrees anew.
        known = _memberships[name] = _Membership(
            name, weakref.ref(group), dist.get_world_size(group), dist.get_rank(group)
        )
    return known


def _gather(membership: _Membership, row: torch.Tensor) -> torch.Tensor:
    rows = row.new_empty(membership.size * row.numel())
    try:
        torch_versions.gather_single(rows, row, group=membership.group())
    except RuntimeError as error:
        raise GroupError(
            f"group {membership.name!r}: the exchange of statistics failed on rank {membership.rank}: {error}; {_UNEVEN}"
        ) from error
    return rows.view(membership.size, row.numel())


def _agree(membership: _Membership, header: dict[str, Any]) -> int:
    """Compare `header` between the members through the group's store; return the agreement's number."""
    number = membership.agreements
    membership.agreements += 1
    store = store_of(membership.name)
    keys = [f"bnexport/{number}/{rank}" for rank in range(membership.size)]
    store.set(keys[membership.rank], json.dumps(header, sort_keys=True))
    headers = []
    for rank, key in enumerate(keys):
        try:
            headers.append(json.loads(store.get(key)))
        except RuntimeError as error:
            raise GroupError(
                f"group {membership.name!r}: rank {rank} did not reach the layer that rank {membership.rank} is in "
                f"({_render(header)}) within the group's timeout: {error}; {_UNEVEN}"
            ) from error
    # The store may outlive the group, and serve one whose agreements have the same numbers.
    read = f"bnexport/{number}/read"
    if store.add(read, 1) == membership.size:
        for key in (*keys, read):
            store.delete_key(key)
    different = [key for key in header if any(other.get(key) != headers[0].get(key) for other in headers)]
    if different:
        values = "; ".join(
            f"{key}: " + ", ".join(f"rank {rank} has {other.get(key)!r}" for rank, other in enumerate(headers))
            for key in different
        )
        raise GroupError(
            f"group {membership.name!r}: the members disagree in a sync batch norm layer ({values}); give every rank the same model"
        )
    membership.headers[number] = header
    membership.row_length = max(membership.row_length, header["length"] + 1)
    return number


def _describe(membership: _Membership, number: int) -> str:
    header = membership.headers.get(number)
    return f"layer {number}" + (f" ({_render(header)})" if header else "")


def _render(header: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in header.items() if key != "length")
