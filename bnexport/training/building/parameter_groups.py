"""Parameter groups: learning rates and weight decay by parameter, as the groups of torch.optim.

r_p = r lr_group / lr      the session's learning rate r moves all groups together, as torch's schedulers do
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bnexport.choices import suggestion
from bnexport.errors import UsageError
from bnexport.training.building.optimizers import Optimizer, make_optimizer

GROUPS, DECAY = "groups", "decay_norms_and_biases"
_OPTIONS = ("lr", "weight_decay")


def make_groups(
    name: str, options: Mapping[str, Any] | None, parameters: Mapping[str, torch.Tensor]
) -> tuple[Optimizer, dict[str, Optimizer]]:
    """Create the optimizer `name`, and the hyperparameters of each parameter that has others than it.

    options: torch.optim's; "groups": a list of {"params": names or patterns such as "head.*", "lr": ..., "weight_decay":
    ...}, where what is absent is the optimizer's; "decay_norms_and_biases": False for no weight decay of parameters with
    at most one dimension, which are those of norms, and biases. parameters: those that are trained.

    Raises UsageError: an option is wrong, a pattern matches nothing, or a parameter is in two groups.
    """
    given = dict(options or {})
    groups, decays = given.pop(GROUPS, ()), given.pop(DECAY, True)
    if not isinstance(decays, bool):
        raise UsageError(f"optimizer_options: {DECAY}: got {decays!r}, expected True or False")
    rule = make_optimizer(name, given)
    if isinstance(groups, (str, Mapping)) or not isinstance(groups, Sequence):
        raise UsageError(f"optimizer_options: {GROUPS}: got {type(groups).__name__}, expected a list of dicts")
    own: dict[str, Optimizer] = {}
    for index, group in enumerate(groups):
        place = f"{GROUPS}[{index}]"
        made = _with(rule, group, place)
        for parameter in _matching(group["params"], parameters, place):
            if parameter in own:
                raise UsageError(f"optimizer_options: {place}: {parameter} is in an earlier group; put it into one")
            own[parameter] = made
    if not decays:
        for parameter, tensor in parameters.items():
            if tensor.dim() <= 1:
                own[parameter] = dataclasses.replace(own.get(parameter, rule), weight_decay=0.0)
    return rule, {parameter: made for parameter, made in own.items() if made != rule}


def describe(own: Mapping[str, Optimizer]) -> list[dict[str, Any]]:
    """Return the groups as torch.optim lists them: names of parameters, lr and weight_decay."""
    members: dict[Optimizer, list[str]] = {}
    for parameter, rule in own.items():
        members.setdefault(rule, []).append(parameter)
    return [
        {"params": names, **{option: getattr(rule, option) for option in _OPTIONS}} for rule, names in members.items()
    ]


def _with(rule: Optimizer, group: Any, place: str) -> Optimizer:
    if not isinstance(group, Mapping) or "params" not in group:
        raise UsageError(f"optimizer_options: {place}: got {group!r}, expected a dict with 'params'")
    values = {option: value for option, value in group.items() if option != "params"}
    for option in values:
        if option not in _OPTIONS:
            raise UsageError(
                f"optimizer_options: {place}: got {option!r}, expected 'params', 'lr' or 'weight_decay'; all else is one"
                " for all parameters"
            )
    try:
        made = dataclasses.replace(rule, **values)
        made.check()
    except (TypeError, UsageError) as error:
        raise UsageError(f"{place}: {error}") from error
    if made.lr != rule.lr and rule.lr == 0:
        raise UsageError(
            f"optimizer_options: {place}: lr: got {made.lr} where the optimizer's own is 0, expected that to be > 0:"
            " it moves all groups together"
        )
    return made


def _matching(patterns: Any, parameters: Mapping[str, torch.Tensor], place: str) -> list[str]:
    found: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        names = fnmatch.filter(parameters, pattern) if isinstance(pattern, str) else []
        if not names:
            near = suggestion(str(pattern), parameters)
            raise UsageError(
                f"optimizer_options: {place}: params: {pattern!r} matches no trained parameter; expected names of the"
                f" state_dict, or patterns such as 'head.*'{near}"
            )
        found |= dict.fromkeys(names)
    return list(found)
