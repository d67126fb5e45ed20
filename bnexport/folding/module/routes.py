"""Routes from a batch norm to the layers that make its input or read its output, with the channel axis.

A route leads through what leaves each value as it is: identity, dropout at inference, contiguous,
transpose and permute, flattening of (C, *) on the way down. Upwards each value on it has one reader
only; downwards every reader has to be a layer that takes the map.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any

import torch
from torch import fx, nn

from bnexport.folding.module.tracing import Trace
from bnexport.graph.refusal import Refused

_SAME_METHODS = ("contiguous",)
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_DROPOUT_FUNCTIONS = {
    nn.functional.dropout,
    nn.functional.dropout1d,
    nn.functional.dropout2d,
    nn.functional.dropout3d,
    nn.functional.alpha_dropout,
}


@dataclasses.dataclass(frozen=True)
class End:
    """A call at the end of a route. axis: of the channels there; flattened: (C, *) lies on it, C slowest."""

    node: fx.Node
    axis: int
    flattened: bool = False


class Routes:
    """Routes in one trace.

    modules: of each path. layers: those that take maps. unfit: layers that do not, with the reason.
    removed: paths of batch norms that are folded already.
    """

    def __init__(
        self,
        trace: Trace,
        modules: dict[str, nn.Module],
        layers: Container[str],
        unfit: dict[str, Refused],
    ) -> None:
        self.trace = trace
        self.removed: set[str] = set()
        self._modules = modules
        self._layers = layers
        self._unfit = unfit

    def up(self, call: fx.Node) -> End:
        """Return the call of a layer that makes the input of `call`, a batch norm."""
        node, axis = data_input(call), 1
        while True:
            self._refuse_hooked(node)
            if len(node.users) > 1:
                raise Refused("used-elsewhere", f"{self.describe(node)} is read {len(node.users)} times")
            if self._takes_maps(node):
                return End(node, axis)
            if not self._keeps_values(node):
                raise Refused("not-linear", f"its input comes from {self.describe(node)}, which cannot absorb it")
            axis = self._axis_above(node, axis)
            node = data_input(node)

    def down(self, call: fx.Node) -> list[End]:
        """Return the calls of all layers that read the output of `call`, a batch norm."""
        ends: list[End] = []
        pending = [End(call, 1)]
        while pending:
            reached = pending.pop()
            self._refuse_hooked(reached.node)
            for user in reached.node.users:
                if self._takes_maps(user):
                    if data_input(user) is not reached.node:
                        raise Refused("not-data", f"{self.describe(user)} takes it as something else than its input")
                    ends.append(dataclasses.replace(reached, node=user))
                elif self._keeps_values(user) or _flattens(user, self._module(user)):
                    pending.append(self._step_down(user, reached))
                else:
                    raise Refused("not-linear", f"its output goes to {self.describe(user)}, which cannot absorb it")
        if not ends:
            raise Refused("unused", "nothing reads its output")
        return ends

    def rank(self, node: fx.Node) -> int | None:
        shape = self.trace.shapes.get(node)
        return None if shape is None else len(shape)

    def describe(self, node: fx.Node) -> str:
        path = self.trace.paths.get(node)
        if path is not None:
            return f"{path} ({type(self._modules[path]).__name__})"
        if node.op in ("placeholder", "output"):
            return "an input of the model" if node.op == "placeholder" else "the model's output"
        return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))

    def _takes_maps(self, node: fx.Node) -> bool:
        path = self.trace.paths.get(node, "")
        if path in self._unfit:
            raise self._unfit[path]
        return path in self._layers

    def _module(self, node: fx.Node) -> nn.Module | None:
        path = self.trace.paths.get(node)
        return None if path is None else self._modules[path]

    def _refuse_hooked(self, node: fx.Node) -> None:
        if node in self.trace.seen_by_hooks:
            raise Refused("hook", f"a hook sees {self.describe(node)}")

    def _keeps_values(self, node: fx.Node) -> bool:
        module = self._module(node)
        if module is not None:
            same = type(module) is nn.Identity or type(module) in _DROPOUTS
            return same or self.trace.paths[node] in self.removed
        if node.op == "call_method":
            return node.target in (*_SAME_METHODS, "permute", "transpose")
        if node.op == "call_function":
            dropout = node.target in _DROPOUT_FUNCTIONS and node.kwargs.get("training") is False
            return dropout or node.target in (torch.permute, torch.transpose)
        return False

    def _axis_above(self, node: fx.Node, axis: int) -> int:
        order = self._order(node)
        return axis if order is None else order[axis]

    def _step_down(self, node: fx.Node, reached: End) -> End:
        if not self._keeps_values(node):
            if reached.axis != 1 or reached.flattened:
                raise Refused("axis", f"{self.describe(node)} mixes channels and positions")
            return End(node, 1, flattened=True)
        order = self._order(node)
        if order is None:
            return dataclasses.replace(reached, node=node)
        return End(node, order.index(reached.axis), reached.flattened)

    def _order(self, node: fx.Node) -> list[int] | None:
        """Return the permutation that a node makes: output dimension k is input dimension order[k]; None for none."""
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if self._module(node) is not None or name not in ("permute", "transpose"):
            return None
        rank = self.rank(node)
        if rank is None:
            raise Refused("rank", f"the rank at {self.describe(node)} is not known without example_inputs")
        given: Any = [*node.args[1:], *(node.kwargs.get(key) for key in ("dims", "dim0", "dim1") if key in node.kwargs)]
        dims = list(given[0]) if len(given) == 1 and isinstance(given[0], (list, tuple)) else list(given)
        if not all(isinstance(dim, int) for dim in dims):
            raise Refused("axis", f"the dimensions of {self.describe(node)} are computed")
        dims = [dim % rank for dim in dims]
        if name == "permute":
            return dims
        order = list(range(rank))
        order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
        return order


def data_input(node: fx.Node) -> fx.Node:
    """Return the node that `node` reads its data from, by position or as the keyword `input`."""
    value = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(value, fx.Node):
        raise Refused("not-data", f"the input of {node.target} is no value of the trace")
    return value


def _flattens(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether (N, C, *) becomes (N, C * positions), the channel slowest."""
    if module is not None:
        return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    function = node.op == "call_function" and node.target is torch.flatten
    if not function and not (node.op == "call_method" and node.target == "flatten"):
        return False
    start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
    end = node.args[2] if len(node.args) > 2 else node.kwargs.get("end_dim", -1)
    return (start, end) == (1, -1)
