"""Contract of the operators for fast training steps on CPUs: domain `bnexport`, float32.

They replace groups of standard operators: a convolution's gradients, those of ReLU and max pooling, an
optimizer's update. Graphs of standard operators remain possible for other execution providers
(`export_training_step(cpu_kernels=False)`). The compiled library describes the same operators; a test
compares the two. All attributes are written by our exporters. Lists have a number for each spatial
dimension, one to three of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
