"""Search for a place of a map: upwards into the operators that make its input, or downwards into its readers.

`backward(value, axis, affine)` plans the edits after which `value` carries affine(value).
`forward(value, axis, affine)` plans the edits after which everything that reads `value` behaves as if
it read affine(value). Both hand over to the rule of the operator they meet; a rule may call them again
for the values behind it. Where one branch refuses, the whole plan is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.editing.plan import Plan
from bnexport.graph.nodes import is_standard, label
from bnexport.graph.refusal import Refused

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

    all_outputs: whether `backward` may be asked for other outputs than the first. domains: of the operators. into: what
    folds into them, as reports call the operators; empty where maps only pass. forms, behind, front: for the documentation,
    the operators and their forms, and what becomes of a map on the result and of one on the input.
    """

    name: str
    op_types: tuple[str, ...]
    backward: Backward | None = None
    forward: Forward | None = None
    all_outputs: bool = False
    domains: tuple[str, ...] = ("",)
    into: str = ""
    forms: str = ""
    behind: str = ""
    front: str = ""


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
            step = self._step(rule, None)
            self.plan.steps_down += 1
            if self.plan.steps_down > _STEPS_DOWN:
                raise Refused("too-far", f"more than {_STEPS_DOWN} operators would change")
            self.plan.passed[use.node] = None
            rule.forward(use.node, use.idx, axis, affine, step)

    def _rule(self, node: ir.Node) -> Rule:
        rule = self.rules.get(node.op_type)
        if rule is None or node.domain not in rule.domains:
            raise Refused("no-rule", f"{node.op_type} ({label(node)}) is not linear in each channel")
        return rule

    def _step(self, rule: Rule, asked: ir.Value | None) -> Search:
        if self.depth == _DEPTH:
            raise Refused("too-far", f"its place is more than {_DEPTH} operators away")
        self.plan.rules[rule.name] = None
        return Search(self.plan, self.rules, self.depth + 1, asked)
