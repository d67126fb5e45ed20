"""Folder of the batch norms of a torch module, guided by its trace.

requires: a model of the caller's own, in eval mode, whose batch norms are torch's; its trace.
ensures: its class, its other modules and its hooks stay; a folded batch norm becomes an Identity and
the layers beside it get new parameters; every batch norm is in the report.

A module may be called several times. It takes a map only when all of its calls want that map: all of
them lead to (or come from) calls of this one batch norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.module import layers
from bnexport.folding.module.layers import Layer, Trace, has_hooks, is_plain_batch_norm
from bnexport.folding.report import Refusal, SiteReport
from bnexport.graph.nodes import Refused
from bnexport.torch_versions import BatchNormBase

# Routes from a batch norm to the layers that make its input or read its output, with the channel axis.
#
# A route leads through what leaves each value as it is: identity, dropout at inference, contiguous,
# transpose and permute, flattening of (C, *) on the way down. Upwards each value on it has one reader
# only; downwards every reader has to be a layer that takes the map.

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


@dataclasses.dataclass(frozen=True)
class ModuleOptions:
    """only, skip: paths of batch norms. max_scale: largest |gamma| / sqrt(var + eps) that is folded."""

    only: frozenset[str] | None = None
    skip: frozenset[str] = frozenset()
    max_scale: float = 1e6


class ModuleFolder:
    """Folder that edits `model` in place."""

    def __init__(self, model: nn.Module, trace: Trace, options: ModuleOptions) -> None:
        self._model = model
        self._options = options
        self._modules = dict(model.named_modules())
        self._calls = trace.calls()
        self._layers: dict[str, Layer] = {}
        unfit: dict[str, Refused] = {}
        self._changed: set[str] = set()
        self._read = {id(_tensor(model, path)) for path in trace.read}
        self._hidden = self._below_opaque(trace)
        self._opaque = trace.opaque
        self._routes = Routes(trace, self._modules, self._layers, unfit)
        for path, module in self._modules.items():
            if layers.is_known(module) and path in self._calls:
                try:
                    self.refuse_module(path, module)
                    self._layers[path] = Layer.read(module)
                except Refused as reason:
                    unfit[path] = reason

    def run(self) -> list[SiteReport]:
        """Fold batch norms: into preceding layers, top to bottom, then into following layers, bottom to top."""
        norms = {path: module for path, module in self._modules.items() if isinstance(module, BatchNormBase)}
        order = [path for path in self._calls if path in norms] + [path for path in norms if path not in self._calls]
        affines: dict[str, ChannelAffine] = {}
        reports: dict[str, SiteReport] = {}
        for path in order:
            report = SiteReport((path,), type(norms[path]).__name__, "", "kept")
            try:
                affines[path] = self._affine(path, norms[path])
            except Refused as reason:
                report = dataclasses.replace(report, refusals=(Refusal("batch_norm", path, reason.code, reason.text),))
            else:
                sizes = np.abs(affines[path].scale)
                report = dataclasses.replace(
                    report,
                    channels=int(sizes.size),
                    scale_min=float(sizes.min()) if sizes.size else None,
                    scale_max=float(sizes.max()) if sizes.size else None,
                )
            reports[path] = report
        for attempt, paths in ((self._backward, list(affines)), (self._forward, list(affines)[::-1])):
            for path in paths:
                if reports[path].outcome != "folded":
                    reports[path] = self._try(attempt, path, affines[path], reports[path])
        for path in self._changed:
            self._layers[path].write()
        for path in self._routes.removed:
            _replace_everywhere(self._model, norms[path], nn.Identity())
        return list(reports.values())

    def _try(
        self,
        attempt: Callable[[str, ChannelAffine], dict[str, Layer]],
        path: str,
        affine: ChannelAffine,
        report: SiteReport,
    ) -> SiteReport:
        try:
            changed = attempt(path, affine)
        except Refused as reason:
            refusal = Refusal("layer", path, reason.code, reason.text)
            return dataclasses.replace(report, refusals=(*report.refusals, refusal))
        self._layers.update(changed)
        self._changed.update(changed)
        self._routes.removed.add(path)
        return dataclasses.replace(
            report,
            outcome="folded",
            rules=tuple(sorted({each.rule for each in changed.values()})),
            targets=tuple(changed),
            refusals=(),
        )

    def _affine(self, path: str, module: nn.Module) -> ChannelAffine:
        if path in self._options.skip or (self._options.only is not None and path not in self._options.only):
            raise Refused("skipped", "it was left alone on request")
        if not is_plain_batch_norm(module):
            raise Refused("own-forward", f"{type(module).__name__} has a forward of its own")
        self.refuse_module(path, module)
        if path not in self._calls:
            raise Refused("unused", "the forward does not call it")
        return layers.read_batch_norm(module, self._options.max_scale)

    def _backward(self, path: str, affine: ChannelAffine) -> dict[str, Layer]:
        ends = [self._routes.up(call) for call in self._calls[path]]
        return {target: layer.mapped(affine) for target, layer in self._targets(ends, "output").items()}

    def _forward(self, path: str, affine: ChannelAffine) -> dict[str, Layer]:
        ends = [end for call in self._calls[path] for end in self._routes.down(call)]
        result = {}
        for target, layer in self._targets(ends, "input").items():
            flattened = {end.flattened for end in ends if self._routes.trace.paths[end.node] == target}
            if len(flattened) > 1:
                raise Refused("axis", f"{target} reads it flattened and as it is")
            spread = affine
            if flattened == {True}:
                if layer.inputs % affine.channels:
                    raise Refused("shape", f"{target} reads {layer.inputs} features of {affine.channels} channels")
                spread = affine.repeat(layer.inputs // affine.channels)
            result[target] = layer.preceded(spread)
        return result

    def _targets(self, ends: list[End], side: str) -> dict[str, Layer]:
        """Return the layers at the ends. Raise Refused if one is called elsewhere or has its channels on another
        axis.
        """
        found: dict[str, Layer] = {}
        nodes = {end.node for end in ends}
        for end in ends:
            target = self._routes.trace.paths[end.node]
            layer = self._layers[target]
            other = [call for call in self._calls[target] if call not in nodes]
            if other:
                raise Refused("called-elsewhere", f"{target} is called {len(self._calls[target])} times, not only here")
            self._check_axis(end, target, layer, side)
            found[target] = layer
        return found

    def _check_axis(self, end: End, target: str, layer: Layer, side: str) -> None:
        node = end.node if side == "output" else data_input(end.node)
        rank = self._routes.rank(node)
        if end.flattened and end.axis == 1 and layer.is_linear:
            return
        if layer.is_linear:
            if rank is None:
                raise Refused("rank", f"the rank of the {side} of {target} is not known without example_inputs")
            if end.axis != rank - 1:
                raise Refused("axis", f"the map acts on axis {end.axis} of {rank}, {target} (Linear) on the last")
            return
        # A convolution takes input without a batch as well; batch norm does not.
        if end.flattened or end.axis != 1 or (rank is not None and rank != layer.rank):
            raise Refused(
                "axis", f"the map acts on axis {end.axis}, {target} ({type(layer.module).__name__}) on axis 1"
            )

    def _below_opaque(self, trace: Trace) -> dict[int, str]:
        """Return modules that unknown code may call: those below an opaque one, except parts with a graph."""
        hidden: dict[int, str] = {}
        for path in sorted({*trace.opaque, *trace.parts}, key=_depth):
            for module in self._modules[path].modules():
                if path in trace.opaque:
                    hidden.setdefault(id(module), path)
                else:
                    hidden.pop(id(module), None)
        return hidden

    def refuse_module(self, path: str, module: nn.Module) -> None:
        """Raises Refused for a module whose values or parameters other code sees."""
        hidden = self._hidden.get(id(module))
        if hidden is not None:
            raise Refused(
                "opaque", f"inside {hidden or 'the model'}, which torch.fx cannot trace: {self._opaque[hidden]}"
            )
        if has_hooks(module):
            raise Refused("hook", f"{path} has hooks")
        if any(id(tensor) in self._read for tensor in (*module.parameters(), *module.buffers())):
            raise Refused("read-elsewhere", f"code outside of {path} reads its parameters or statistics")


def _replace_everywhere(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    new.training = old.training
    for module in model.modules():
        for name, child in list(module._modules.items()):
            if child is old:
                module._modules[name] = new


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _tensor(model: nn.Module, path: str) -> object:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)
