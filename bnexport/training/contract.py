"""Contract of the operators for fast training steps on CPUs: domain `bnexport`, float32.

They replace groups of standard operators: a convolution's gradients, those of ReLU and max pooling, an
optimizer's update. Graphs of standard operators remain possible for other execution providers
(`export_training_step(cpu_kernels=False)`). The compiled library describes the same operators; a test
compares the two. All attributes are written by our exporters. Lists have a number for each spatial
dimension, one to three of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library, register_fake

from bnexport.schema import TRAINING_DOMAIN, Attribute, AttributeKind, Operator, Value, op_schema

if TYPE_CHECKING:
    from onnxscript.values import Op


DOMAIN = TRAINING_DOMAIN
VERSION = 1


def _input(name: str, shape: str, doc: str, optional: bool = False) -> Value:
    return Value(name, "T", shape, doc, optional)


def _ints(name: str, doc: str) -> Attribute:
    return Attribute(name, AttributeKind.INTS, None, doc, required=True)


def _number(name: str, doc: str) -> Attribute:
    return Attribute(name, AttributeKind.FLOAT, None, doc, required=True)


def _operator(
    name: str, doc: str, inputs: tuple[Value, ...], outputs: tuple[Value, ...], attributes: tuple[Attribute, ...]
) -> Operator:
    return Operator(name, doc, inputs, outputs, attributes, DOMAIN, VERSION, ("float",))


_STRIDES = _ints("strides", "Step between windows, >= 1.")
_PADS = _ints("pads", "Zeros on either side of each dimension, >= 0 (PyTorch's padding).")
_DILATIONS = _ints("dilations", "Step between a window's values, >= 1.")
_KERNEL_SHAPE = _ints("kernel_shape", "The kernel's spatial sizes, >= 1.")
_GROUP = Attribute("group", AttributeKind.INT, None, "Groups of channels that do not mix.", required=True)

_X = _input("input", "(N, C, *)", "The data, one to three spatial dimensions.")
_WEIGHT = _input("weight", "(O, C / group, *)", "The kernel.")
_GRAD_OUTPUT = _input("grad_output", "(N, O, *)", "Gradient of the loss by the forward's output.")

CONV = _operator(
    "Conv",
    "Convolution, with PyTorch's sizes of the output.",
    (_X, _WEIGHT, _input("bias", "(O,)", "Shift of each output.", optional=True)),
    (_input("output", "(N, O, *)", "The convolution."),),
    (_STRIDES, _PADS, _DILATIONS, _GROUP),
)

CONV_INPUT_GRAD = _operator(
    "ConvInputGrad",
    "Gradient of Conv by its input. In each dimension stride or dilation is 1.",
    (_GRAD_OUTPUT, _WEIGHT),
    (_input("grad_input", "(N, C, *)", "Gradient by the input."),),
    (_ints("input_shape", "The input's spatial sizes, >= 1."), _STRIDES, _PADS, _DILATIONS, _GROUP),
)

CONV_WEIGHT_GRAD = _operator(
    "ConvWeightGrad",
    "Gradient of Conv by its weight.",
    (_GRAD_OUTPUT, _X),
    (_input("grad_weight", "(O, C / group, *)", "Gradient by the weight."),),
    (_KERNEL_SHAPE, _STRIDES, _PADS, _DILATIONS, _GROUP),
)

RELU_GRAD = _operator(
    "ReluGrad",
    "grad_output where low < input < high, else 0; where input is NaN, grad_output.",
    (
        _input("grad_output", "(*)", "Gradient of the loss by the forward's output."),
        _input("input", "(*)", "Its input."),
    ),
    (_input("grad_input", "(*)", "Gradient by the input."),),
    (
        Attribute("low", AttributeKind.FLOAT, 0.0, "Lower end; values at it have no gradient."),
        Attribute("high", AttributeKind.FLOAT, None, "Upper end; absent means none."),
    ),
)

MAX_POOL_GRAD = _operator(
    "MaxPoolGrad",
    "Gradient of two-dimensional max pooling, to the first of equal maxima.",
    (
        _input(
            "grad_output", "(N, C, *)", "Gradient of the loss by the forward's output; sizes of either rounding mode."
        ),
        _input("input", "(N, C, H, W)", "The forward's input."),
    ),
    (_input("grad_input", "(N, C, H, W)", "Gradient by the input."),),
    (_KERNEL_SHAPE, _STRIDES, _PADS, _DILATIONS),
)

_PARAMETER = _input("parameter", "(*)", "What is trained.")
_GRAD = _input("grad", "(*)", "Gradient by the parameter.")
_WEIGHT_DECAY = _number("weight_decay", "The parameter's share in the gradient.")

ADAM_UPDATE = _operator(
    "AdamUpdate",
    "One update by Adam or AdamW, with the names of torch.optim's state (bnexport/training/optimizers.py).",
    (
        _PARAMETER,
        _GRAD,
        _input("exp_avg", "(*)", "Mean of the gradients."),
        _input("exp_avg_sq", "(*)", "Mean of their squares."),
        _input("max_exp_avg_sq", "(*)", "AMSGrad's largest of these.", optional=True),
        _input("step_size", "()", "lr / (1 - beta1^t)."),
        _input("bias_correction2_sqrt", "()", "sqrt(1 - beta2^t)."),
        _input("keep", "()", "AdamW's factor of the parameter; absent means 1.", optional=True),
    ),
    (
        _input("new_parameter", "(*)", "The updated parameter."),
        _input("new_exp_avg", "(*)", "The updated mean."),
        _input("new_exp_avg_sq", "(*)", "The updated mean of squares."),
        _input("new_max_exp_avg_sq", "(*)", "The largest so far. Needs max_exp_avg_sq.", optional=True),
    ),
    (
        _number("one_minus_beta1", "1 - beta1, which float32 would not find from beta1 in full precision."),
        _number("beta2", "Weight of the old mean of squares."),
        _number("one_minus_beta2", "1 - beta2."),
        _number("eps", "Added to the denominator."),
        _WEIGHT_DECAY,
    ),
)

SGD_UPDATE = _operator(
    "SgdUpdate",
    "One update by stochastic gradient descent, with the names of torch.optim's state.",
    (
        _PARAMETER,
        _GRAD,
        _input("momentum_buffer", "(*)", "Sum of the gradients; absent means no momentum.", optional=True),
        _input("lr", "()", "Learning rate."),
        _input("share", "()", "Weight of the gradient in the sum: 1 - dampening; absent means 1.", optional=True),
    ),
    (
        _input("new_parameter", "(*)", "The updated parameter."),
        _input("new_momentum_buffer", "(*)", "The updated sum. Needs momentum_buffer.", optional=True),
    ),
    (
        _number("momentum", "Weight of the old sum."),
        _WEIGHT_DECAY,
        Attribute("nesterov", AttributeKind.INT, None, "1: look ahead by one sum.", (0, 1), required=True),
    ),
)

OPERATORS = (CONV, CONV_INPUT_GRAD, CONV_WEIGHT_GRAD, RELU_GRAD, MAX_POOL_GRAD, ADAM_UPDATE, SGD_UPDATE)


def node(operator: Operator) -> Op:
    """Return `operator` as a function that a translation calls."""
    from onnxscript.values import Op, Opset

    return Op(Opset(DOMAIN, VERSION), operator.name, op_schema(operator))


# Parameter updates of the optimizers: pure functions, and the same as leaves of a traced graph.
#
# With parameter p, gradient g, moments m, v and b:
#
#     adam    g' = g + w p;  m = m + (1 - beta1) (g' - m);  v = beta2 v + (1 - beta2) g'^2
#             p = keep p - step_size m / (sqrt(v) / bias_correction2_sqrt + eps)
#             AMSGrad: the largest v so far in place of v in the second line
#     sgd     g' = g + w p;  b = momentum b + share g'
#             p = p - lr (g' + momentum b  with nesterov, b  with momentum, else g')
#
# A graph of standard operators passes over memory once for each operation. `adam_operator` and
# `sgd_operator` are recorded whole and become one node each (bnexport/training/contract.py).

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
