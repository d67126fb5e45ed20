"""Plans: one parameter edited more than once, and branches that are dropped."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from bnexport.folding.context import Addend, Plan, Raw
from bnexport.graph.nodes import Refused
from tests.support.contexts import context_of
from tests.support.onnx_text import model

X = "float[N,4,H,W] x"


@pytest.fixture
def plan() -> Plan:
    proto = model(f"g ({X}) => (float[N,2,H,W] y) {{ y = Conv (x, w) }}", {"w": (2, 4, 1, 1)})
    return Plan(context_of(proto, 17))


@pytest.fixture
def node(plan: Plan) -> ir.Node:
    return plan.context.model.graph[0]


def test_factors_multiply_in_one_view_only(plan: Plan, node: ir.Node) -> None:
    weight = plan.value(node, 1, "weight")
    plan.scale(node, 1, np.full((2, 1, 1), 3.0), "weight", (2, 2, 2))
    plan.scale(node, 1, np.full((2, 1, 1), 2.0), "weight", (2, 2, 2))
    np.testing.assert_array_equal(plan.value(node, 1, "weight"), 6 * weight)
    for ask in (
        lambda: plan.scale(node, 1, np.ones((2, 1, 1, 1)), "weight"),
        lambda: plan.sums(node, 1, np.ones((1, 4, 1, 1)), (2, 4, 1, 1), (0,), "weight"),
    ):
        with pytest.raises(Refused, match="scaled in two ways that do not go together"):
            ask()
    sums, sizes = plan.sums(node, 1, np.ones((1, 1, 2)), (2, 2, 2), (0, 1), "weight")
    np.testing.assert_allclose(sums, 6 * weight.reshape(2, 2, 2).sum(2), rtol=1e-12)
    np.testing.assert_allclose(sizes, 6 * np.abs(weight).reshape(2, 2, 2).sum(2), rtol=1e-12)


def test_integers_are_not_scaled(plan: Plan, node: ir.Node) -> None:
    integers, weight = np.ones((2, 4, 1, 1), np.int8), plan.context.model.graph.initializers["w"]
    for edits, stored in (({(node, 1): Raw(integers)}, weight.const_value), ({}, ir.tensor(integers))):
        plan.edits, weight.const_value = edits, stored
        with pytest.raises(Refused, match="expected a float type"):
            plan.scale(node, 1, np.ones((2, 1, 1, 1)), "weight")
        assert not edits or plan.value(node, 1, "weight").dtype == np.float64


def test_shifts_behind_a_node(plan: Plan, node: ir.Node) -> None:
    addend = Addend(np.ones(2), 1, 4, np.dtype(np.float32))
    plan.add(node, 2, np.ones(2), np.ones(2), np.dtype(np.float32), "bias")
    assert plan.vector(node, 2, 2, "bias").tolist() == [1, 1]
    plan.add_behind(node, addend)
    with pytest.raises(Refused, match="two shifts meet"):
        plan.add_behind(node, addend)
    with pytest.raises(Refused, match="shift"):
        plan.check_add(Addend(np.full(2, 1e300), 1, 4, np.dtype(np.float32)))
