"""Ranges of the labels and indices in a batch, read from a recorded step.

torch raises an error for a label beyond the classes. ONNX's GatherElements reads -1 as the last class, and ONNX Runtime
fails in the middle of a step for those beyond. So a session checks the arrays before the step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from bnexport import torch_versions

_ATEN = torch.ops.aten
# What keeps every number of an array.
_VIEWS = {
    "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "flatten", "permute", "transpose", "t", "clone", "alias",
    "detach", "_to_copy", "expand", "contiguous",
}  # fmt: skip
_LOSSES = {_ATEN.nll_loss_forward.default, _ATEN.nll_loss2d_forward.default}
_SHIFTS = {_ATEN.add.Tensor: operator.sub, _ATEN.sub.Tensor: operator.add}
_ASKS_FOR_NAN = {_ATEN.isnan.default, _ATEN.nan_to_num.default}


def index_ranges(graph: fx.Graph, names: Sequence[str]) -> dict[str, list[list[int]]]:
    """Return for each of the graph's inputs `names` the ranges of its whole numbers, each as [first, last, ignored...]."""
    ranges: dict[str, list[list[int]]] = {}
    for name, node in zip(names, graph.find_nodes(op="placeholder"), strict=True):
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and value.dtype != torch.bool:
            found = list(_ranges_of(node, 0))
            if found:
                ranges[name] = [each for index, each in enumerate(found) if each not in found[:index]]
    return ranges


def _ranges_of(node: fx.Node, shift: int) -> Iterator[list[int]]:
    """Yield the ranges of an array; `node` holds its numbers minus `shift`."""
    for user in node.users:
        count, ignored = _indexed(user, node)
        if count is not None:
            yield [shift, shift + count - 1, *(shift + each for each in ignored)]
        elif user.args and user.args[0] is node and isinstance(user.target, torch_versions.Operator):
            if user.target.overloadpacket.__name__ in _VIEWS and not user.meta["val"].dtype.is_floating_point:
                yield from _ranges_of(user, shift)
            elif user.target in _SHIFTS and isinstance(user.args[1], int) and not user.kwargs:
                yield from _ranges_of(user, _SHIFTS[user.target](shift, user.args[1]))


def _indexed(user: fx.Node, node: fx.Node) -> tuple[int | None, tuple[int, ...]]:
    """Return the number of what `user` selects from by the numbers of `node`, None if it does not; and its ignored
    number.
    """
    arguments: Sequence[Any] = user.args
    if user.target in _LOSSES and arguments[1] is node:
        scores = arguments[0].meta["val"]
        return _fixed(scores.shape[1 if scores.dim() > 1 else 0]), (arguments[4],)
    if user.target is _ATEN.embedding.default and arguments[1] is node:
        return _fixed(arguments[0].meta["val"].shape[0]), ()
    if user.target is _ATEN.gather.default and arguments[2] is node:
        return _fixed(arguments[0].meta["val"].shape[arguments[1]]), ()
    return None, ()


def _fixed(size: int | torch.SymInt) -> int | None:
    return size if isinstance(size, int) else None


def asks_for_nan(graph: fx.Graph) -> bool:
    """Whether a step looks for NaN itself, which may then stand for missing numbers."""
    return any(
        node.target in _ASKS_FOR_NAN or (node.target is _ATEN.ne.Tensor and node.args[0] is node.args[1])
        for node in graph.nodes
    )
