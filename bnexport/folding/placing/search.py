"""Where a map can go: upwards into the operators that make its input, or downwards into its readers.

`backward(value, axis, affine)` plans the edits after which `value` carries affine(value).
`forward(value, axis, affine)` plans the edits after which everything that reads `value` behaves as if
it read affine(value). Both hand over to the rule of the operator they meet; a rule may call them again
for the values behind it. Where one branch refuses, the whole plan is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.editing.plan import Plan
from bnexport.graph.nodes import is_standard, label
from bnexport.graph.refusal import Refused

# A path from a map to its place is at most this long. Upwards each value has one reader, so that every
# operator is met once by a map; downwards paths may meet again, and their number needs a bound of its own.
_DEPTH = 64
_STEPS_DOWN = 256

# backward(node, axis, affine, search): make the node's output carry the map along `axis`.
Backward = Callable[[ir.Node, int, ChannelAffine, "Search"], None]
# forward(node, index, axis, affine, search): make the node read its input `index` as if mapped.
Forward = Callable[[ir.Node, int, int, ChannelAffine, "Search"], None]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one family of operators takes a map in. None: not in this direction.

    all_outputs: whether `backward` may be asked for other outputs than the first.
    """

    name: str
    op_types: tuple[str, ...]
    backward: Backward | None = None
    forward: Forward | None = None
    all_outputs: bool = False


class Search:
    """One attempt to place one map."""

    def __init__(self, context: Context, rules: dict[str, Rule]) -> None:
        self.context = context
        self.plan = Plan(context)
        self.used_rules: list[str] = []
        self._asked: ir.Value | None = None
        self._rules = rules
        self._steps_down = 0
        self._depth = 0

    @property
    def asked(self) -> ir.Value:
        """Which output of its node the current `backward` rule is asked for."""
        assert self._asked is not None
        return self._asked

    def backward(self, value: ir.Value, axis: int, affine: ChannelAffine) -> None:
        node = value.producer()
        if node is None:
            raise Refused("no-producer", f"its input {value.name!r} is an input of the graph or a parameter")
        if value.is_graph_output():
            raise Refused("graph-output", f"{value.name!r} is an output of the graph as well")
        uses = value.uses()
        if len(uses) != 1:
            raise Refused("shared", f"{value.name!r} is read by {len(uses)} nodes")
        if next(iter(uses)).node.graph is not node.graph:
            raise Refused("captured", f"{value.name!r} is computed outside the body that normalises it")
        rule = self._rule(node)
        if rule.backward is None or (value is not node.outputs[0] and not rule.all_outputs):
            raise Refused("no-rule", f"{node.op_type} ({label(node)}) cannot take a per-channel map in")
        self._enter(rule)
        self._asked = value
        rule.backward(node, axis, affine, self)
        self._depth -= 1

    def forward(self, value: ir.Value, axis: int, affine: ChannelAffine) -> None:
        if value.is_graph_output():
            raise Refused("graph-output", f"{value.name!r} is an output of the graph")
        if not value.uses():
            raise Refused("unused", f"nothing reads {value.name!r}")
        graph = value.graph
        for use in value.uses():
            if use.node.graph is not graph:
                raise Refused("captured", f"{value.name!r} is read inside a body of {label(use.node)}")
            rule = self._rule(use.node)
            if rule.forward is None:
                raise Refused("no-rule", f"{use.node.op_type} ({label(use.node)}) cannot take a per-channel map in")
            self._enter(rule)
            self._steps_down += 1
            if self._steps_down > _STEPS_DOWN:
                raise Refused("too-far", f"more than {_STEPS_DOWN} operators would change")
            rule.forward(use.node, use.idx, axis, affine, self)
            self._depth -= 1

    def _rule(self, node: ir.Node) -> Rule:
        rule = self._rules.get(node.op_type)
        if rule is None or not is_standard(node, *rule.op_types):
            raise Refused("no-rule", f"{node.op_type} ({label(node)}) is not linear in each channel")
        return rule

    def _enter(self, rule: Rule) -> None:
        self._depth += 1
        if self._depth > _DEPTH:
            raise Refused("too-far", f"its place is more than {_DEPTH} operators away")
        if rule.name not in self.used_rules:
            self.used_rules.append(rule.name)
