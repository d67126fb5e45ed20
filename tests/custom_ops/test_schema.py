"""The library's own operator table against the contract in bnexport/schema.py."""

import dataclasses

import pytest

from bnexport import schema
from bnexport.native import capi
from bnexport.training import contract

OPERATORS = (*schema.OPERATORS, *contract.OPERATORS)


@pytest.fixture(scope="module")
def described():
    return {operator["name"]: operator for operator in capi.describe()["operators"]}


def test_operators(described):
    assert set(described) == {operator.name for operator in OPERATORS}


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_matches_contract(described, operator):
    ours = described[operator.name]
    domains = schema.ACCEPTED_DOMAINS if operator.domain == schema.DOMAIN else (operator.domain,)
    assert tuple(ours["domains"]) == domains
    assert sorted(variant["T"] for variant in ours["variants"]) == sorted(operator.types)
    for variant in ours["variants"]:
        assert variant["S"] == ("double" if variant["T"] == "double" else "float")
    for direction in ("inputs", "outputs"):
        values = getattr(operator, direction)
        assert ours[direction] == [{"name": it.name, "type": it.type, "optional": it.optional} for it in values]
    for attribute, expected in zip(ours["attributes"], operator.attributes, strict=True):
        described = dataclasses.asdict(expected) | {"kind": expected.kind.value}
        assert attribute | {"doc": expected.doc} == described | {"allowed": list(expected.allowed or ()) or None}


def test_enums_follow_the_contract():
    assert tuple(capi.STATS_MODES) == schema.STATS_MODES
    assert tuple(capi.GRAD_REDUCTIONS) == schema.GRAD_REDUCTIONS
