"""Placement of one map y = k (x - c) + t = k x + h: the ways to split and move it, in the order in which they are
tried.

    backward    the whole map into what makes x
    forward     the whole map into everything that reads y
    apart       y = (k x) + h:      k backward, h forward
                y = k (x + h / k):  h / k backward, k forward - through a Relu and through padding, for k > 0
    scale       k backward, and an Add of h stays: for producers that have no bias, as MatMul
    shift       k forward, and an Add of h / k stays, where arithmetic is wanted: in front of padded convolutions

The first three remove the site; the others leave an Add in its place, which costs about as much as a batch
norm (docs/folding.md), and are tried only where a missing bias or padding was the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.editing.edits import Addend
from bnexport.folding.editing.parameters import insert_add
from bnexport.folding.editing.plan import Plan
from bnexport.folding.editing.rewrite import bypass, parameter_type, restate
from bnexport.folding.placing.search import Rule, Search
from bnexport.folding.reading.site import Site
from bnexport.graph.refusal import Refused

Attempt = Callable[[Site, Context, dict[str, Rule]], Plan]


def place(site: Site, context: Context, rules: dict[str, Rule]) -> Plan | list[tuple[str, Refused]]:
    """Commit the first way that succeeds and return its plan; otherwise return why the whole map moves neither up nor
    down.
    """
    refusals: list[tuple[str, Refused]] = []
    for name, attempt in _ATTEMPTS:
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
    search = Search(Plan(context), rules)
    search.forward(site.output, site.axis, site.affine)
    return _commit(search.plan, site)


def _scale_up(site: Site, context: Context, rules: dict[str, Rule]) -> Plan:
    search = Search(Plan(context), rules)
    _refuse_half(site.affine)
    search.forward(site.output, site.axis, ChannelAffine.shifting(site.affine.offset))
    search.backward(site.input, site.axis, site.affine.only_scale())
    return _commit(search.plan, site)


def _scale_down(site: Site, context: Context, rules: dict[str, Rule]) -> Plan:
    search = Search(Plan(context), rules)
    affine = site.affine
    _refuse_half(affine)
    shift = affine.shift * affine.inverse_scale(context.options.max_scale)
    search.forward(site.output, site.axis, affine.only_scale())
    search.backward(site.input, site.axis, ChannelAffine(affine.scale * 0 + 1, affine.center, shift))
    return _commit(search.plan, site)


def _scale_and_add(site: Site, context: Context, rules: dict[str, Rule]) -> Plan:
    rank = context.rank(site.input)
    if rank is None:
        raise Refused("rank", "the rank of its input is not known, so no Add can take the shift")
    search = Search(Plan(context), rules)
    search.backward(site.input, site.axis, site.affine.only_scale())
    addend = Addend(site.affine.offset, site.axis, rank, parameter_type(site, search.plan))
    search.plan.check_add(addend)
    search.plan.commit()
    insert_add(context, bypass(site, context), addend)
    return search.plan


def _scale_down_and_add(site: Site, context: Context, rules: dict[str, Rule]) -> Plan:
    if context.options.leftover != "arithmetic":
        raise Refused("shift", "arithmetic was not asked for")
    affine = site.affine
    _refuse_half(affine)
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


def _refuse_half(affine: ChannelAffine) -> None:
    """Refuse a map that only scales or only shifts: there is nothing to split."""
    if affine.is_scaling or affine.is_shift:
        raise Refused("shift", "it only scales or only shifts")


_ATTEMPTS: tuple[tuple[str, Attempt], ...] = (
    ("backward", _backward),
    ("forward", _forward),
    ("apart", _scale_up),
    ("apart", _scale_down),
    ("scale", _scale_and_add),
    ("shift", _scale_down_and_add),
)
