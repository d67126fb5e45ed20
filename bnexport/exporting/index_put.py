"""aten::index_put that adds, the gradient of indexing and of embeddings, and aten::index_add.

torch.onnx writes them as ScatterND with reduction "add". ONNX Runtime shares that out over threads without regard to
indices that come twice (microsoft/onnxruntime#18048), and loses values: with two threads, sums of 100 values are off
by 10. Here they are taken apart into scatter_add, which becomes ScatterElements and runs in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor

_ATEN = torch.ops.aten


def _add(self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *_: bool) -> Any:
    """Compute self with values added at indices (one for each leading dimension of self, or None); NotImplemented
    where nothing is added.
    """
    used = [dim for dim, index in enumerate(indices) if index is not None]
    given = torch.broadcast_tensors(*(index for index in indices if index is not None))
    if not accumulate or any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return NotImplemented
    rest = [dim for dim in range(self.dim()) if dim not in used]
    # The indices' dimensions stand where the first of adjacent ones does; else in front.
    lead = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    shape, count = [self.shape[dim] for dim in rest], given[0].dim()
    values = values.expand([*shape[:lead], *given[0].shape, *shape[lead:]])
    values = values.movedim(list(range(lead, lead + count)), list(range(count)))
    position = torch.zeros_like(given[0], dtype=torch.int64)
    for dim, index in zip(used, given):
        size = self.shape[dim]
        position = position * size + torch.where(index < 0, index + size, index)
    ordered = self.permute([*used, *rest])
    rows = ordered.reshape(math.prod(ordered.shape[: len(used)]), math.prod(shape))
    added = values.reshape(position.numel(), math.prod(shape))
    result = rows.scatter_add(0, position.reshape(-1, 1).expand(added.shape), added).reshape(ordered.shape)
    order = [*used, *rest]
    return result.permute([order.index(dim) for dim in range(self.dim())])


def _add_in_place(self: Tensor, *arguments: Any) -> Any:
    result = _add(self, *arguments)
    return result if result is NotImplemented else self.copy_(result)


def _index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    shape = [-1 if axis == dim % self.dim() else 1 for axis in range(self.dim())]
    return self.scatter_add(dim, index.to(torch.int64).view(shape).expand(source.shape), alpha * source)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _ATEN.index_put.default: _add,
    _ATEN._unsafe_index_put.default: _add,
    _ATEN.index_put_.default: _add_in_place,
    _ATEN._index_put_impl_.default: _add_in_place,
    _ATEN.index_add.default: _index_add,
}


def rewrite(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Take them apart in a program that has one."""
    if any(_adds(node) for node in program.graph.nodes):
        return program.run_decompositions(DECOMPOSITIONS)
    return program


def _adds(node: torch.fx.Node) -> bool:
    accumulates = True in node.args[3:4] or node.kwargs.get("accumulate", False)
    return node.target is _ATEN.index_add.default or (node.target in DECOMPOSITIONS and bool(accumulates))
