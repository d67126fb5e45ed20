"""torch.optim's SGD, Adam and AdamW as pure functions of tensors that can be traced into the graph.

With gradient g, weight decay w, learning rate r, step count t (1 for the first update):

    SGD     g' = g + w p;  b = mu b + (1 - tau) g' (b = g' when t = 1);  p = p - r (g' + mu b  if nesterov else b)
    Adam    g' = g + w p;  m = m + (1 - beta1) (g' - m);  v = beta2 v + (1 - beta2) g'^2
            p = p - r / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    AdamW   p = (1 - r w) p, then as Adam with w = 0
    AMSGrad sqrt(max of all v) in place of sqrt(v)

Scalars that depend on r and t are computed in float64, as torch computes them in Python: in float32
1 - 0.999^t loses five digits. Hyperparameters other than r are constants of the graph.

Sources: Sutskever et al. 2013; Kingma and Ba 2015; Loshchilov and Hutter 2019; Reddi et al. 2018; the
order of operations is that of torch.optim's documentation.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.library import Library, register_fake

from bnexport.errors import UsageError
from bnexport.interface import suggestion
from bnexport.training.contract import ADAM_UPDATE, SGD_UPDATE, node

Tensor = torch.Tensor
State = dict[str, Tensor]


# Parameter updates of the optimizers: pure functions, and the same as leaves of a traced graph.
#
# A graph of standard operators passes over memory once for each operation. `adam_operator` and
# `sgd_operator` are recorded whole and become one node each.


def adam(
    parameter: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    step_size: Tensor,
    bias_correction2_sqrt: Tensor,
    keep: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the new parameter, exp_avg, exp_avg_sq and max_exp_avg_sq; the last is empty without AMSGrad.

    step_size, bias_correction2_sqrt and keep are of shape (), in the parameter's dtype.
    """
    if weight_decay:
        grad = grad + parameter * weight_decay
    if keep is not None:
        parameter = parameter * keep
    exp_avg = exp_avg + (grad - exp_avg) * (1.0 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * (1.0 - beta2)
    largest = exp_avg_sq if max_exp_avg_sq is None else torch.maximum(max_exp_avg_sq, exp_avg_sq)
    denominator = torch.sqrt(largest) / bias_correction2_sqrt + eps
    unused = parameter.new_empty(0)
    return (
        parameter - exp_avg / denominator * step_size,
        exp_avg,
        exp_avg_sq,
        unused if max_exp_avg_sq is None else largest,
    )


def sgd(
    parameter: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    lr: Tensor,
    share: Tensor | None,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> tuple[Tensor, Tensor]:
    """Return the new parameter and momentum_buffer; the latter is empty without momentum. lr and share: shape ()."""
    if weight_decay:
        grad = grad + parameter * weight_decay
    if momentum_buffer is None:
        return parameter - grad * lr, parameter.new_empty(0)
    momentum_buffer = momentum_buffer * momentum + (grad if share is None else grad * share)
    grad = grad + momentum_buffer * momentum if nesterov else momentum_buffer
    return parameter - grad * lr, momentum_buffer


library = Library("bnexport", "FRAGMENT")
library.define(
    "adam_update(Tensor parameter, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, Tensor? max_exp_avg_sq, "
    "Tensor step_size, Tensor bias_correction2_sqrt, Tensor? keep, float beta1, float beta2, float eps, "
    "float weight_decay) -> (Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "sgd_update(Tensor parameter, Tensor grad, Tensor? momentum_buffer, Tensor lr, Tensor? share, float momentum, "
    "float weight_decay, bool nesterov) -> (Tensor, Tensor)"
)
for _name, _function in (("adam_update", adam), ("sgd_update", sgd)):
    library.impl(_name, _function, "CompositeExplicitAutograd")
    register_fake(f"bnexport::{_name}", _function, lib=library)
adam_operator = torch.ops.bnexport.adam_update.default
sgd_operator = torch.ops.bnexport.sgd_update.default

_ADAM, _SGD = node(ADAM_UPDATE), node(SGD_UPDATE)


def _translate_adam(
    parameter: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    max_exp_avg_sq: Any,
    step_size: Any,
    bias_correction2_sqrt: Any,
    keep: Any,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Any, ...]:
    return tuple(
        _ADAM(
            parameter,
            grad,
            exp_avg,
            exp_avg_sq,
            max_exp_avg_sq,
            step_size,
            bias_correction2_sqrt,
            keep,
            one_minus_beta1=1.0 - beta1,
            beta2=beta2,
            one_minus_beta2=1.0 - beta2,
            eps=eps,
            weight_decay=weight_decay,
        )
    )


def _translate_sgd(
    parameter: Any,
    grad: Any,
    momentum_buffer: Any,
    lr: Any,
    share: Any,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> tuple[Any, ...]:
    return tuple(
        _SGD(
            parameter,
            grad,
            momentum_buffer,
            lr,
            share,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=int(nesterov),
        )
    )


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    adam_operator: _translate_adam,
    sgd_operator: _translate_sgd,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """Hyperparameters, with torch.optim's names and defaults, and the update of one parameter."""

    lr: float = 1e-3
    weight_decay: float = 0.0

    @abstractmethod
    def state_kinds(self) -> tuple[str, ...]:
        """Return names of the tensors that are kept for each parameter, as in torch.optim's state_dict; zeros at
        first.
        """

    @abstractmethod
    def scalars(self, lr: Tensor, step: Tensor) -> State:
        """Return 0-dimensional float64 tensors that all parameters share; lr float64 (), step int64 () after this
        update.
        """

    @abstractmethod
    def update(
        self, parameter: Tensor, grad: Tensor, state: State, scalars: State, *, as_operator: bool = False
    ) -> tuple[Tensor, State]:
        """Return the new parameter and state; `scalars` in the parameter's dtype. as_operator: a leaf of a trace."""

    def check(self) -> None:
        """Raise UsageError for a hyperparameter outside its range."""
        for name, value in dataclasses.asdict(self).items():
            if name == "betas":
                _require(len(value) == 2 and all(0.0 <= beta < 1.0 for beta in value), name, value, "two within [0, 1)")
            elif not isinstance(value, bool):
                _require(0.0 <= value < float("inf"), name, value, "a finite number >= 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def check(self) -> None:
        super().check()
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise UsageError("optimizer_options: nesterov needs a momentum > 0 and dampening 0")

    def state_kinds(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def scalars(self, lr: Tensor, step: Tensor) -> State:
        scalars = {"lr": lr}
        if self.momentum and self.dampening:
            scalars["share"] = torch.where(step == 1, _float64(1.0, lr), _float64(1.0 - self.dampening, lr))
        return scalars

    def update(
        self, parameter: Tensor, grad: Tensor, state: State, scalars: State, *, as_operator: bool = False
    ) -> tuple[Tensor, State]:
        rule = sgd_operator if as_operator else sgd
        new_parameter, momentum_buffer = rule(
            parameter,
            grad,
            state.get("momentum_buffer"),
            scalars["lr"],
            scalars.get("share"),
            self.momentum,
            self.weight_decay,
            self.nesterov,
        )
        return new_parameter, {"momentum_buffer": momentum_buffer} if self.momentum else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    def state_kinds(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.amsgrad else []))

    def scalars(self, lr: Tensor, step: Tensor) -> State:
        beta1, beta2 = self.betas
        t = step.to(torch.float64)
        return {
            "step_size": lr / (1.0 - torch.pow(_float64(beta1, lr), t)),
            "bias_correction2_sqrt": torch.sqrt(1.0 - torch.pow(_float64(beta2, lr), t)),
        }

    def update(
        self, parameter: Tensor, grad: Tensor, state: State, scalars: State, *, as_operator: bool = False
    ) -> tuple[Tensor, State]:
        rule = adam_operator if as_operator else adam
        new_parameter, *moments = rule(
            parameter,
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            state.get("max_exp_avg_sq"),
            scalars["step_size"],
            scalars["bias_correction2_sqrt"],
            scalars.get("keep"),
            *self.betas,
            self.eps,
            self._decay_in_gradient(),
        )
        return new_parameter, dict(zip(self.state_kinds(), moments))

    def _decay_in_gradient(self) -> float:
        return self.weight_decay


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    weight_decay: float = 1e-2

    def scalars(self, lr: Tensor, step: Tensor) -> State:
        keep = {"keep": 1.0 - lr * self.weight_decay} if self.weight_decay else {}
        return {**super().scalars(lr, step), **keep}

    def _decay_in_gradient(self) -> float:
        return 0.0


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def make_optimizer(name: str, options: Mapping[str, Any] | None) -> Optimizer:
    """Create the optimizer `name` with `options`, which have torch.optim's names. Raises UsageError."""
    if not isinstance(name, str) or name not in OPTIMIZERS:
        got = repr(name) if isinstance(name, str) else f"{getattr(name, '__name__', type(name).__name__)}, no name"
        raise UsageError(
            f"optimizer: got {got}, expected one of {', '.join(OPTIMIZERS)}; "
            'for another one use mode="gradients" and update the parameters yourself'
        )
    kind = OPTIMIZERS[name]
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(options or ()) - known)
    if unknown:
        raise UsageError(
            f"optimizer_options: got {unknown[0]!r}, which {name} does not have; it has {', '.join(sorted(known))}"
        )
    values = dict(options or {})
    try:
        if "betas" in values:
            values["betas"] = tuple(float(beta) for beta in values["betas"])
        optimizer = kind(**values)
        optimizer.check()
    except TypeError as error:
        raise UsageError(f"optimizer_options: {error}") from error
    return optimizer


def _require(condition: bool, name: str, value: Any, expected: str) -> None:
    if not condition:
        raise UsageError(f"optimizer_options: {name}: got {value}, expected {expected}")


def _float64(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float64, device=like.device)


# Parameter groups: learning rates and weight decay by parameter, as the groups of torch.optim.
#
# r_p = r lr_group / lr      the session's learning rate r moves all groups together, as torch's schedulers do

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
