"""Placement of a map: the search for operators that absorb it, the ways to split and move it, and the rewrite of its nodes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine, round_vector
from bnexport.folding.context import Addend, Context, Exact, Plan, insert_add
from bnexport.folding.sites import Site
from bnexport.graph.nodes import Refused, get_float, input_at, is_standard, label
from bnexport.graph.scopes import new_constant

# Search for a place of a map: upwards into the operators that make its input, or downwards into its readers.
#
# `backward(value, axis, affine)` plans the edits after which `value` carries affine(value).
# `forward(value, axis, affine)` plans the edits after which everything that reads `value` behaves as if
# it read affine(value). Both hand over to the rule of the operator they meet; a rule may call them again
# for the values behind it. Where one branch refuses, the whole plan is dropped.

# A path from a map to its place is at most this long. Upwards each value has one reader, so that every
# operator is met once by a map; downwards paths may meet again, and the number of steps has a bound of its own.
_DEPTH = 64
_STEPS_DOWN = 256

# backward(node, axis, affine, search): make the node's output carry the map along `axis`.
Backward = Callable[[ir.Node, int, ChannelAffine, "Search"], None]
# forward(node, index, axis, affine, search): make the node read its input `index` as if mapped.
Forward = Callable[[ir.Node, int, int, ChannelAffine, "Search"], None]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Handlers of one family of operators that absorb or pass a map. None: unsupported in this direction.

    all_outputs: whether `backward` may be asked for other outputs than the first. any_input: whether `forward` may be asked
    for other inputs than the first. domains: of the operators. into: what
    folds into them, as reports call the operators; empty where maps only pass. forms, behind, front: for the documentation,
    the operators and their forms, and what becomes of a map on the result and of one on the input.
    """

    name: str
    op_types: tuple[str, ...]
    backward: Backward | None = None
    forward: Forward | None = None
    all_outputs: bool = False
    any_input: bool = False
    domains: tuple[str, ...] = ("",)
    into: str = ""
    forms: str = ""
    behind: str = ""
    front: str = ""


def check_axis(node: ir.Node, axis: int) -> None:
    """Raise Refused for a map along another axis than the channels of an operator on images."""
    if axis != 1:
        raise Refused("axis", f"the map acts on axis {axis}, the channels of {label(node)} are axis 1")


@dataclasses.dataclass(frozen=True)
class Search:
    """One step of an attempt to place one map; the edits planned so far, and their rules, are in `plan`.

    depth: steps between the map and here. asked: the output of its node that a `backward` rule is asked for.
    """

    plan: Plan
    rules: Mapping[str, Rule]
    depth: int = 0
    asked: ir.Value | None = None

    @property
    def context(self) -> Context:
        return self.plan.context

    def backward(self, value: ir.Value, axis: int, affine: ChannelAffine) -> None:
        """Plan the edits after which `value` carries affine(value). Raises Refused."""
        node = value.producer()
        if node is None:
            raise Refused("no-producer", f"its input {value.name!r} is an input of the graph or a parameter")
        if value.is_graph_output():
            raise Refused("graph-output", f"{value.name!r} is an output of the graph as well")
        # Its sizes stay: who asks for them alone is no reader.
        asking = [use.node for use in value.uses() if is_standard(use.node, "Shape")]
        readers = [use.node for use in value.uses() if use.node not in asking]
        if len(readers) != 1:
            raise Refused("shared", f"{value.name!r} is read by {len(readers)} nodes")
        if any(reader.graph is not node.graph for reader in (*readers, *asking)):
            raise Refused("captured", f"{value.name!r} is computed outside the body that normalises it")
        rule = self._rule(node)
        if rule.backward is None or (value is not node.outputs[0] and not rule.all_outputs):
            raise Refused("no-rule", f"{node.op_type} ({label(node)}) cannot take a per-channel map in")
        self.plan.passed.update(dict.fromkeys((node, *asking)))
        rule.backward(node, axis, affine, self._step(rule, value))

    def forward(self, value: ir.Value, axis: int, affine: ChannelAffine) -> None:
        """Plan the edits after which all readers of `value` behave as if they read affine(value). Raises Refused."""
        if value.is_graph_output():
            raise Refused("graph-output", f"{value.name!r} is an output of the graph")
        if not value.uses():
            raise Refused("unused", f"nothing reads {value.name!r}")
        graph = value.graph
        for use in value.uses():
            if use.node.graph is not graph:
                raise Refused("captured", f"{value.name!r} is read inside a body of {label(use.node)}")
            if is_standard(use.node, "Shape"):
                self.plan.passed[use.node] = None
                continue
            rule = self._rule(use.node)
            if rule.forward is None:
                raise Refused("no-rule", f"{use.node.op_type} ({label(use.node)}) cannot take a per-channel map in")
            if use.idx != 0 and not rule.any_input:
                raise Refused("not-data", f"the map reaches input {use.idx} of {label(use.node)}")
            step = self._step(rule, None)
            self.plan.steps_down += 1
            if self.plan.steps_down > _STEPS_DOWN:
                raise Refused("too-far", f"more than {_STEPS_DOWN} operators would change")
            self.plan.passed[use.node] = None
            rule.forward(use.node, use.idx, axis, affine, step)

    def _rule(self, node: ir.Node) -> Rule:
        rule = self.rules.get(node.op_type)
        if rule is None or node.domain not in rule.domains:
            self.context.check_refused(node)
            raise Refused("no-rule", f"{node.op_type} ({label(node)}) is not linear in each channel")
        return rule

    def _step(self, rule: Rule, asked: ir.Value | None) -> Search:
        if self.depth == _DEPTH:
            raise Refused("too-far", f"its place is more than {_DEPTH} operators away")
        self.plan.rules[rule.name] = None
        return Search(self.plan, self.rules, self.depth + 1, asked)


# Rewriting of a site's nodes: bypassed once its map is placed, merged or restated otherwise.
#
# Merging keeps the first batch norm, with its variance and epsilon, and gives it the whole map
# scale * (x - center) + shift: mean = center, bias = shift, and a scale of scale * sqrt(var + eps).


def parameter_type(site: Site, plan: Plan) -> np.dtype:
    """Return the type of the data, or of the weight that takes the scale if the model does not declare it."""
    for value in (site.input, site.output):
        if value.dtype is not None and value.dtype.is_floating_point():
            return value.dtype.numpy()
    node, index = next(iter(plan.edits), (next(node for node in site.nodes if len(node.inputs) > 1), 1))
    return plan.context.constants.describe(input_at(node, index), "weight").dtype


def bypass(site: Site, context: Context) -> ir.Value:
    """Remove the nodes of a site: redirect readers of its output to its input, which is returned."""
    source, output = site.input, site.output
    was_output = output.is_graph_output()
    context.surgery.replace(output, source)
    if was_output:
        # `source` was no graph output itself (backward refuses that), so it can take the name over.
        name, output.name = output.name, None
        source.name = name
        source.type, source.shape = output.type or source.type, output.shape or source.shape
    else:
        # The shape stays: what the file declares for the output may be wrong, and engines infer it less often for the source.
        source.type = source.type or output.type
    remove(site.nodes, source, context)
    return source


def merge(site: Site, context: Context) -> ir.Node:
    """Merge all nodes of a site that contains a batch norm into one; Refused if its type cannot represent the map."""
    kept = next(node for node in site.nodes if is_standard(node, "BatchNormalization"))
    source, output, result = site.input, site.output, kept.outputs[0]
    std = np.sqrt(context.current(kept, 4, "variance") + get_float(kept, "epsilon", 1e-5))
    plan = Plan(context)
    for index, values in ((1, site.affine.scale * std), (2, site.affine.shift), (3, site.affine.center)):
        dtype = context.constants.describe(input_at(kept, index), "parameter").dtype
        plan.replace(kept, index, values, dtype, "batch norm parameter")
    plan.commit()
    kept.replace_input_with(0, source)
    if output is not result:
        take_over(output, result, context)
    remove([node for node in site.nodes if node is not kept], source, context)
    return kept


def restate(site: Site, form: str, context: Context) -> list[ir.Node]:
    """Write a site as a depthwise 1x1 Conv ("conv") or as a Mul and an Add ("arithmetic"), what is neutral left out.

    Data of rank 2, and another axis than a Conv's, have no Conv: there it is arithmetic. Returns the new nodes; Refused
    where the type cannot represent the map, or an Add needs the rank, which is not known.
    """
    source, output, affine = site.input, site.output, site.affine
    rank, dtype = context.known_rank(source, site.nodes[0]), parameter_type(site, Plan(context))
    if context.opset < 7 and form == "arithmetic":
        raise Refused("opset", "Mul and Add before opset 7 broadcast by an attribute")
    size = np.abs(affine.scale * affine.center) + np.abs(affine.shift)
    scale = Exact(affine.scale, round_vector(affine.scale, dtype, "scale"))
    shift = Exact(affine.offset, round_vector(affine.offset, dtype, "shift", size))
    graph, name = site.nodes[-1].graph, label(site.nodes[0])
    assert graph is not None
    steps: list[tuple[str, list[tuple[Exact, tuple[int, ...]]]]] = []
    if form == "conv" and rank > 2 and site.axis == 1:
        steps.append(("Conv", [(scale, (-1, *[1] * (rank - 1))), (shift, (-1,))]))
    else:
        wide = (-1, *[1] * (rank - site.axis - 1))
        steps += [("Mul", [(scale, wide)])] if (scale.rounded != 1).any() else []
        steps += [("Add", [(shift, wide)])] if shift.rounded.any() or not steps else []
    made: list[ir.Node] = []
    value = source
    for op_type, parameters in steps:
        attributes = [ir.AttrInt64("group", affine.channels)] if op_type == "Conv" else []
        own = context.names.fresh(f"{name}.{op_type.lower()}")
        node = ir.Node("", op_type, [value], attributes, name=own)
        graph.insert_after(made[-1] if made else site.nodes[-1], node)
        node.resize_inputs(1 + len(parameters))
        for index, (exact, shape) in enumerate(parameters, start=1):
            array = exact.rounded.reshape(shape)
            node.replace_input_with(index, new_constant(context, graph, node, array, f"{own}.constant"))
            # As behind `insert_add`: a later fold starts from the exact values.
            context.edits[node, index] = Exact(exact.values.reshape(shape), array)
        value = node.outputs[0]
        context.same_shape(value, output)
        value.name, value.type, value.shape = context.names.fresh(f"{own}.output"), output.type, output.shape
        made.append(node)
    context.created += made
    take_over(output, value, context)
    remove(site.nodes, source, context)
    return made


def take_over(old: ir.Value, new: ir.Value, context: Context) -> None:
    """Replace `old` by `new`; a graph output keeps its name."""
    new.type, new.shape = old.type or new.type, old.shape or new.shape
    was_output = old.is_graph_output()
    context.same_shape(new, old)
    context.surgery.replace(old, new)
    if was_output:
        new.name, old.name = old.name, new.name


def remove(nodes: Sequence[ir.Node], data: ir.Value | None, context: Context) -> None:
    """Remove nodes whose outputs have been replaced, with the constants that only they read. data: what they read besides."""
    gone = set(nodes)
    for node in nodes:
        for value in node.inputs:
            # What nodes of a site read beside the data are constants.
            if value is not None and value is not data and value.producer() not in gone:
                context.surgery.may_be_unused(value)
        context.surgery.remove(node)


# Placement of one map y = k (x - c) + t = k x + h: the ways to split and move it, in the order in which they are
# tried.
#
#     backward    the whole map into what makes x
#     forward     the whole map into everything that reads y
#     apart       y = (k x) + h:      k backward, h forward
#                 y = k (x + h / k):  h / k backward, k forward - through a Relu and through padding, for k > 0
#     scale       k backward, and an Add of h stays: for producers that have no bias, as MatMul
#     shift       k forward, and an Add of h / k stays, where arithmetic is wanted: in front of padded convolutions
#
# The first three remove the site; the others leave an Add in its place, which costs about as much as a batch
# norm (docs/folding.md), and are tried only where a missing bias or padding was the reason.

Attempt = Callable[[Site, Context, dict[str, Rule]], Plan]


def place(site: Site, context: Context, rules: dict[str, Rule]) -> Plan | list[tuple[str, Refused]]:
    """Commit the first way that succeeds and return its plan; otherwise return why the whole map moves neither up nor
    down.
    """
    refusals: list[tuple[str, Refused]] = []
    for name, attempt in _ATTEMPTS:
        if name in ("scale", "shift") and context.options.layers is not None:
            continue
        if name == "scale" and all(reason.code != "shift" for direction, reason in refusals if direction == "backward"):
            continue
        try:
            return attempt(site, context, rules)
        except Refused as reason:
            # The texts of the others would repeat one of the first two.
            if name not in ("apart", "shift"):
                refusals.append((name, reason))
    return refusals


def place_whole(site: Site, context: Context, rules: dict[str, Rule]) -> Plan | None:
    """Commit the first way that moves the whole map and adds no node, and return its plan; None where there is none."""
    for direction in ("backward", "forward"):
        search = Search(Plan(context), rules)
        value = site.input if direction == "backward" else site.output
        with contextlib.suppress(Refused):
            getattr(search, direction)(value, site.axis, site.affine)
            if not search.plan.adds:
                return _commit(search.plan, site)
    return None


def _backward(site: Site, context: Context, rules: dict[str, Rule]) -> Plan:
    search = Search(Plan(context), rules)
    search.backward(site.input, site.axis, site.affine)
    return _commit(search.plan, site)


def _forward(site: Site, context: Context, rules: dict[str, Rule]) -> Plan:
    if context.options.layers is not None and label(site.nodes[-1]) in context.options.layers.entangled:
        raise Refused("in-place", f"code changes what {label(site.nodes[-1])} reads or makes in place")
    search = Search(Plan(context), rules)
    search.forward(site.output, site.axis, site.affine)
    return _commit(search.plan, site)


def _scale_up(site: Site, context: Context, rules: dict[str, Rule]) -> Plan:
    search = Search(Plan(context), rules)
    search.forward(site.output, site.axis, ChannelAffine.shifting(site.affine.offset))
    search.backward(site.input, site.axis, site.affine.only_scale())
    return _commit(search.plan, site)


def _scale_down(site: Site, context: Context, rules: dict[str, Rule]) -> Plan:
    search = Search(Plan(context), rules)
    affine = site.affine
    shift = affine.shift * affine.inverse_scale(context.options.max_scale)
    search.forward(site.output, site.axis, affine.only_scale())
    search.backward(site.input, site.axis, ChannelAffine(affine.scale * 0 + 1, affine.center, shift))
    return _commit(search.plan, site)


def _scale_and_add(site: Site, context: Context, rules: dict[str, Rule]) -> Plan:
    rank = context.known_rank(site.input, site.nodes[0])
    search = Search(Plan(context), rules)
    search.backward(site.input, site.axis, site.affine.only_scale())
    addend = Addend(site.affine.offset, site.axis, rank, parameter_type(site, search.plan))
    search.plan.check_add(addend)
    search.plan.commit()
    insert_add(context, bypass(site, context), addend)
    return search.plan


def _scale_down_and_add(site: Site, context: Context, rules: dict[str, Rule]) -> Plan:
    affine = site.affine
    if context.options.leftover != "arithmetic" or affine.is_shift:
        raise Refused("shift", "arithmetic was not asked for, or is all there is")
    shift = affine.shift * affine.inverse_scale(context.options.max_scale)
    search = Search(Plan(context), rules)
    search.forward(site.output, site.axis, affine.only_scale())
    shifted = dataclasses.replace(site, affine=ChannelAffine(affine.scale * 0 + 1, affine.center, shift))
    restate(shifted, "arithmetic", context)
    search.plan.commit()
    return search.plan


def _commit(plan: Plan, site: Site) -> Plan:
    plan.commit()
    bypass(site, plan.context)
    return plan


_ATTEMPTS: tuple[tuple[str, Attempt], ...] = (
    ("backward", _backward),
    ("forward", _forward),
    ("apart", _scale_up),
    ("apart", _scale_down),
    ("scale", _scale_and_add),
    ("shift", _scale_down_and_add),
)
