"""Parameter updates of the optimizers: pure functions, and the same as leaves of a traced graph.

With parameter p, gradient g, moments m, v and b:

    adam    g' = g + w p;  m = m + (1 - beta1) (g' - m);  v = beta2 v + (1 - beta2) g'^2
            p = keep p - step_size m / (sqrt(v) / bias_correction2_sqrt + eps)
            AMSGrad: the largest v so far in place of v in the second line
    sgd     g' = g + w p;  b = momentum b + share g'
            p = p - lr (g' + momentum b  with nesterov, b  with momentum, else g')

A graph of standard operators passes over memory once for each operation. `adam_operator` and
`sgd_operator` are recorded whole and become one node each (bnexport/training/building/contract.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, register_fake

from bnexport.training.building.contract import ADAM_UPDATE, SGD_UPDATE, node

Tensor = torch.Tensor


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
