"""Merges sums of parallel branches in a traced module: one convolution does the work of all.

    conv3(x) + conv1(x) + norm(x)    one of the three becomes the convolution that is their sum, the others zero

The code of the module stays, and so do its additions: what is added is a zero without dimensions. A branch is a chain of
modules (convolutions, batch norms, average pools, zero padding) that nothing else reads. x itself cannot be taken out of
the code; it counts only where a batch norm of the sum follows: norm(M x + x) = k M x + k x + h is N x + x with
N = k M + (k - 1), and norm becomes an Identity. The algebra is that of `folding/parallel`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from bnexport.folding.affine import ChannelAffine, round_vector
from bnexport.folding.branches.collapse import Cost, Evaluated, check_cost
from bnexport.folding.branches.windows import Kernel, Window
from bnexport.folding.module import layers
from bnexport.folding.module.layers import Trace, Zero, from_numpy, is_plain_batch_norm, to_numpy
from bnexport.folding.report import SiteReport
from bnexport.folding.rules.parallel import NAME
from bnexport.graph.nodes import Refused
from bnexport.torch_versions import BatchNormBase

_CONVS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLS: tuple[type[nn.Module], ...] = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_PADS: tuple[type[nn.Module], ...] = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
# Sign of the second operand, and whether the first one is changed in place.
_SUMS: dict[Any, tuple[float, bool]] = {
    operator.add: (1.0, False),
    torch.add: (1.0, False),
    "add": (1.0, False),
    operator.iadd: (1.0, True),
    "add_": (1.0, True),
    operator.sub: (-1.0, False),
    torch.sub: (-1.0, False),
    "sub": (-1.0, False),
    operator.isub: (-1.0, True),
    "sub_": (-1.0, True),
}


@dataclasses.dataclass(frozen=True)
class _Branch:
    """What `nodes`, calls of modules from the base down, make of it; without nodes, the base. sign: in the sum."""

    base: fx.Node
    nodes: tuple[fx.Node, ...]
    sign: float


class Merger:
    """Merges the branches of `model` in place.

    refuse: raises Refused for a module that must stay, by path. allowed: whether a merge may take these batch norms.
    """

    def __init__(
        self,
        model: nn.Module,
        trace: Trace,
        refuse: Callable[[str, nn.Module], None],
        allowed: Callable[[list[str]], bool],
        max_scale: float,
    ) -> None:
        self._model = model
        self._trace = trace
        self._modules = dict(model.named_modules())
        self._calls = trace.calls()
        self._refuse = refuse
        self._allowed = allowed
        self._max_scale = max_scale
        self._owners: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for owner in model.modules():
            for name, child in owner._modules.items():
                if child is not None:
                    self._owners.setdefault(child, []).append((owner, name))

    def run(self) -> list[SiteReport]:
        """Merge the sums of all graphs and return a report for each."""
        reports = []
        for graph in self._trace.graphs:
            order = {node: index for index, node in enumerate(graph.nodes)}
            for node in graph.nodes:
                if _is_sum(node) and not self._is_part(node):
                    reports += self._merge(node, order)
        return reports

    def _merge(self, root: fx.Node, order: dict[fx.Node, int]) -> list[SiteReport]:
        branches, sums = self._branches(root, order)
        groups: dict[fx.Node, list[_Branch]] = {}
        for branch in branches:
            groups.setdefault(branch.base, []).append(branch)
        reports = []
        for base, group in groups.items():
            tail = self._tail(root) if len(groups) == 1 else None
            for end in dict.fromkeys((tail, None)):
                try:
                    reports.append(self._merge_group(base, group, sums, end, order))
                except Refused:
                    continue
                break
        return reports

    def _merge_group(
        self, base: fx.Node, group: list[_Branch], sums: list[fx.Node], tail: fx.Node | None, order: dict[fx.Node, int]
    ) -> SiteReport:
        chains = sorted((branch for branch in group if branch.nodes), key=lambda branch: order[branch.nodes[0]])
        if len(chains) < (2 if tail is None else 1) or not any(self._conv(branch) for branch in chains):
            raise Refused("no-rule", "there is nothing to merge")
        last = order[chains[-1].nodes[0]]
        own = {node for branch in chains for node in branch.nodes} | set(sums)
        node = chains[0].nodes[0]
        while order[node] < last:
            if node not in own and self._may_change_values(node):
                raise Refused("used-elsewhere", "code between the branches may change their input in place")
            node = node.next
        sizes = {size for branch in chains for size in map(_sizes, self._modules_of(branch)[:1]) if size is not None}
        if len(sizes) != 1:
            raise Refused("shape", "the channels of the branches differ, or are not known")
        evaluated = [self._evaluate(branch, *next(iter(sizes))) for branch in chains]
        total = evaluated[0]
        for each in evaluated[1:]:
            total = total.joined(each)
        kernel = total.kernel
        if tail is not None:
            raw = sum(branch.sign for branch in group if not branch.nodes)
            kernel = self._behind(total, raw, tail)
        carrier = self._carrier(chains, sums)
        kernel = _signed(kernel, carrier.sign)
        nodes = [node for branch in chains for node in branch.nodes] + ([] if tail is None else [tail])
        paths = [self._trace.paths[node] for node in nodes]
        norms = [path for path in paths if isinstance(self._modules[path], BatchNormBase)]
        if not self._allowed(norms):
            raise Refused("skipped", "it was left alone on request")
        like = max((conv for branch in chains for conv in self._convs(branch)), key=lambda conv: conv.weight.numel())
        merged = _module(kernel, like)
        for branch in chains:
            head, *others = (self._trace.paths[node] for node in branch.nodes)
            self._put(head, merged if branch is carrier else Zero())
            for path in others:
                self._put(path, nn.Identity())
        if tail is not None:
            self._put(self._trace.paths[tail], nn.Identity())
        target = self._trace.paths[carrier.nodes[0]]
        counted = f", {len(norms)} batch norm{'' if len(norms) == 1 else 's'}" if norms else ""
        size = "x".join(map(str, kernel.window.sizes))
        summary = f"{len(chains)} branches{counted} -> 1 {type(merged).__name__} {size}"
        names = (*norms, *(path for path in paths if path not in norms))
        return SiteReport(names, "", "", "folded", (NAME,), (target,), channels=kernel.outputs, summary=summary)

    def _branches(self, root: fx.Node, order: dict[fx.Node, int]) -> tuple[list[_Branch], list[fx.Node]]:
        """Return the signed terms of a sum, and its additions, inner ones first."""
        found: list[_Branch] = []
        sums: list[fx.Node] = []
        pending = [(root, 1.0)]
        while pending:
            node, sign = pending.pop()
            sums.append(node)
            for operand, own in zip(node.args, (sign, sign * _SUMS[node.target][0]), strict=True):
                if not isinstance(operand, fx.Node):
                    continue
                above = self._through(operand)
                if _is_sum(above) and self._is_only_here(above):
                    pending.append((above, own))
                else:
                    found.append(self._branch(operand, own))
        return found, sorted(sums, key=lambda node: order[node])

    def _is_part(self, node: fx.Node) -> bool:
        """Whether another sum takes it up."""
        while len(node.users) == 1:
            user = next(iter(node.users))
            if _is_sum(user):
                return True
            if self._through(user) is user:
                return False
            node = user
        return False

    def _through(self, node: fx.Node) -> fx.Node:
        """Follow a value upwards through modules that return their input."""
        while type(self._modules.get(self._trace.paths.get(node, ""))) is nn.Identity:
            if not self._is_only_here(node) or not self._takes_part(node):
                break
            node = node.args[0]  # type: ignore[assignment]
        return node

    def _branch(self, node: fx.Node, sign: float) -> _Branch:
        nodes: list[fx.Node] = []
        while self._is_only_here(node) and self._takes_part(node):
            nodes.insert(0, node)
            node = node.args[0]  # type: ignore[assignment]
        return _Branch(node, tuple(nodes), sign)

    def _is_only_here(self, node: fx.Node) -> bool:
        return len(node.users) == 1 and node not in self._trace.seen_by_hooks

    def _takes_part(self, node: fx.Node) -> bool:
        path = self._trace.paths.get(node)
        if path is None or len(self._calls[path]) != 1 or node.kwargs or len(node.args) != 1:
            return False
        module = self._modules[path]
        known = is_plain_batch_norm(module) or type(module) in (*_POOLS, *_PADS, nn.Identity)
        if not isinstance(node.args[0], fx.Node) or not (known or (layers.is_known(module) and _is_conv(module))):
            return False
        try:
            self._refuse(path, module)
        except Refused:
            return False
        return True

    def _tail(self, root: fx.Node) -> fx.Node | None:
        """Return the batch norm that alone reads the sum, if there is one."""
        user = next(iter(root.users)) if self._is_only_here(root) else None
        if user is None or not self._takes_part(user):
            return None
        return user if isinstance(self._modules[self._trace.paths[user]], BatchNormBase) else None

    def _convs(self, branch: _Branch) -> list[Any]:
        return [module for module in self._modules_of(branch) if _is_conv(module)]

    def _modules_of(self, branch: _Branch) -> list[nn.Module]:
        return [self._modules[self._trace.paths[node]] for node in branch.nodes]

    def _may_change_values(self, node: fx.Node) -> bool:
        """Whether a node may write to a tensor that it reads: by the names that torch gives such functions."""
        if node.op == "call_module":
            module = self._modules[self._trace.paths[node]]
            return not type(module).__module__.startswith("torch.nn.") or bool(getattr(module, "inplace", False))
        if node.op not in ("call_function", "call_method"):
            return False
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
        in_place = getattr(operator, f"__{name}__", None) if name.startswith("i") else None
        known = name in ("setitem", "setattr", "getattr") or in_place is node.target
        return (
            known or name.endswith("_") or bool(node.kwargs.get("inplace")) or any(value is True for value in node.args)
        )

    def _conv(self, branch: _Branch) -> bool:
        return bool(self._convs(branch))

    def _evaluate(self, branch: _Branch, channels: int, rank: int) -> Evaluated:
        result = Evaluated(Kernel.identity(channels, rank), Cost())
        for module in self._modules_of(branch):
            result = _applied(module, result, self._max_scale)
        return Evaluated(_signed(result.kernel, branch.sign), result.cost)

    def _behind(self, total: Evaluated, raw: float, tail: fx.Node) -> Kernel:
        """Return N with N x + raw x = tail(M x + raw x), where M is the kernel of `total` and `tail` a batch norm."""
        norm = self._modules[self._trace.paths[tail]]
        kernel = total.kernel
        affine = layers.read_batch_norm(norm, self._max_scale)
        if affine.channels != kernel.outputs:
            raise Refused("shape", f"the batch norm maps {affine.channels} channels, the sum has {kernel.outputs}")
        if raw:
            own = Kernel.identity(kernel.inputs, len(kernel.window.sizes))
            kernel = _plus(kernel, _signed(own, raw))
            kernel = _plus(kernel.mapped(affine), _signed(own, -raw))
        else:
            kernel = kernel.mapped(affine)
        cost = total.cost + Cost(affine.channels, 4 * affine.channels)
        check_cost(cost, kernel.weight.size, kernel.weight.size + kernel.outputs)
        return kernel

    def _carrier(self, chains: list[_Branch], sums: list[fx.Node]) -> _Branch:
        """Return the first branch that can carry the merged kernel. Raises Refused where none can."""
        for carrier in chains[:-1]:
            try:
                self._refuse_scalars(carrier, chains, sums)
            except Refused:
                continue
            return carrier
        self._refuse_scalars(chains[-1], chains, sums)
        return chains[-1]

    def _refuse_scalars(self, carrier: _Branch, chains: list[_Branch], sums: list[fx.Node]) -> None:
        """Refuse in-place additions to a zero without dimensions, or to a value that others read."""
        scalars = {branch.nodes[-1] for branch in chains if branch is not carrier}
        made = {branch.nodes[-1] for branch in chains if set(map(type, self._modules_of(branch))) != {nn.Identity}}
        fresh = made | set(sums)
        for node in sums:
            # A sum may come through modules that return their input.
            values = [value if value in fresh else self._through(value) for value in _values(node)]
            scalar = [value in scalars for value in values]
            if _SUMS[node.target][1] and (
                values[0] not in fresh or node.args[0] == 0 or (scalar[0] and not all(scalar))
            ):
                raise Refused("used-elsewhere", "the sum changes a branch in place")
            if all(scalar):
                scalars.add(node)

    def _put(self, path: str, module: nn.Module) -> None:
        module.training = self._modules[path].training
        for owner, name in self._owners[self._modules[path]]:
            owner._modules[name] = module
        self._modules[path] = module


def _is_sum(node: fx.Node) -> bool:
    """Whether a node adds two values, or a value and 0."""
    if node.op not in ("call_function", "call_method") or node.target not in _SUMS or node.kwargs:
        return False
    values = [value for value in node.args if isinstance(value, fx.Node)]
    others = [value for value in node.args if not isinstance(value, fx.Node)]
    return len(node.args) == 2 and bool(values) and all(type(value) in (int, float) and value == 0 for value in others)


def _values(node: fx.Node) -> list[fx.Node]:
    return [value for value in node.args if isinstance(value, fx.Node)]


def _is_conv(module: nn.Module) -> bool:
    return isinstance(module, _CONVS)


def _sizes(module: Any) -> tuple[int, int] | None:
    """Channels that a module reads, and axes of positions; None where they are not known from it alone."""
    if _is_conv(module):
        return int(module.in_channels), len(module.kernel_size)
    ranks = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
    rank = next((rank for kind, rank in ranks.items() if isinstance(module, kind)), None)
    return None if rank is None else (int(module.num_features), rank)


def _applied(module: Any, inner: Evaluated, max_scale: float) -> Evaluated:
    """`inner` followed by a module."""
    kernel = inner.kernel
    if isinstance(module, BatchNormBase):
        affine = layers.read_batch_norm(module, max_scale)
        if affine.channels != kernel.outputs:
            raise Refused("shape", f"a batch norm of {affine.channels} channels behind {kernel.outputs}")
        return Evaluated(kernel.mapped(affine), inner.cost + Cost(affine.channels, 4 * affine.channels))
    if _is_conv(module):
        layer = layers.Layer.read(module)
        if module.padding_mode != "zeros":
            raise Refused("padding", "a convolution pads with something else than zeros")
        padding = module._reversed_padding_repeated_twice
        rank = len(module.kernel_size)
        begins, ends = tuple(padding[::2][::-1]), tuple(padding[1::2][::-1])
        window = Window(tuple(module.kernel_size), begins, ends, tuple(module.stride), tuple(module.dilation))
        if len(kernel.window.sizes) != rank or not np.isfinite(layer.weight).all():
            raise Refused("not-finite", "a convolution's weight is not finite, or of another rank")
        weight = layer.weight.astype(np.float64).reshape(*layer.weight.shape[:3], *module.kernel_size)
        bias = None if module.bias is None else layer.bias
        cost = Cost(weight.size, weight.size + (0 if bias is None else bias.size))
        return Evaluated(Kernel.of(weight, bias, window).after(kernel), inner.cost + cost)
    if type(module) in _PADS:
        padding = tuple(module.padding)
        return dataclasses.replace(inner, kernel=kernel.padded(padding[::2][::-1], padding[1::2][::-1]))
    if type(module) in _POOLS:
        return _pooled(module, inner)
    return inner


def _pooled(module: Any, inner: Evaluated) -> Evaluated:
    rank = len(inner.kernel.window.sizes)
    sizes, strides, pads = (
        (value,) * rank if isinstance(value, int) else tuple(value)
        for value in (module.kernel_size, module.stride, module.padding)
    )
    if module.ceil_mode or getattr(module, "divisor_override", None) is not None:
        raise Refused("padding", "an average pool rounds its size up, or divides by another number")
    if any(pads) and not module.count_include_pad:
        raise Refused("padding", "an average pool divides by fewer positions at the borders")
    channels = inner.kernel.outputs
    weight = np.full((channels, 1, 1, *sizes), 1.0 / math.prod(sizes))
    kernel = Kernel.of(weight, None, Window(sizes, pads, pads, strides, (1,) * rank))
    return Evaluated(kernel.after(inner.kernel), inner.cost + Cost(weight.size, 0))


def _signed(kernel: Kernel, sign: float) -> Kernel:
    return kernel if sign == 1.0 else kernel.mapped(ChannelAffine.scaling(np.full(kernel.outputs, sign)))


def _plus(one: Kernel, two: Kernel) -> Kernel:
    return one.plus(two, one.window.joined(two.window))


def _module(kernel: Kernel, like: Any) -> Any:
    """Make a convolution with the type, device and gradient of `like`. Raises Refused for a padding that torch lacks."""
    window, dtype = kernel.window, to_numpy(like.weight).dtype
    if window.begins != window.ends:
        raise Refused("padding", "the branches pad more on one side than on the other")
    kernel.check_type(dtype)
    weight = kernel.weight.reshape(kernel.outputs, *kernel.weight.shape[2:]).astype(dtype)
    kind: Any = _CONVS[len(window.sizes) - 1]
    module: Any = kind(
        kernel.inputs,
        kernel.outputs,
        window.sizes,
        stride=window.strides,
        padding=window.begins,
        dilation=window.dilations,
        groups=kernel.groups,
        bias=bool(kernel.bias.any() or like.bias is not None),
        device="meta",
    )
    needs = like.weight.requires_grad
    module.weight = nn.Parameter(from_numpy(weight, like.weight), requires_grad=needs)
    if module.bias is not None:
        bias = round_vector(kernel.bias, dtype, "convolution's bias", kernel.bias_size)
        module.bias = nn.Parameter(from_numpy(bias, like.weight), requires_grad=needs)
    return module
