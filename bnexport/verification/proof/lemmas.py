"""Linear operators on affine forms. Each takes the node, its inputs (forms, or arrays that are known) and gives forms.

`RULES` at the end is the table of lemmas: which operator is mapped how, and which attributes that reads.

A known array carries its own error bounds (`Parameter`). Operators that only move elements are evaluated once, on the
numbers of the elements; operators without weights, as means and interpolation, on each direction.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.graph.evaluate import Misfit, NodeEvaluator, evaluate
from bnexport.tolerances import UNIT_ROUNDOFF
from bnexport.verification.proof import forms
from bnexport.verification.proof.attributes import check_node
from bnexport.verification.proof.chains import NotAChain, normalising, reciprocal
from bnexport.verification.proof.forms import Form
from bnexport.verification.proof.regions import Parameter, is_training

Operand = Form | Parameter | None
Rule = Callable[[ir.Node, list[Operand], int], list[Operand]]

# They move elements, repeat them, leave some out, or put zeros between them.
MOVING = (
    *("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Concat", "Split", "Slice", "Pad"),
    *("DepthToSpace", "SpaceToDepth", "Gather", "Expand", "Tile"),
)
# Linear without weights: weighted means whose weights depend on sizes alone.
MEANS = ("AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum", "Resize", "Upsample")
# Rounding errors of weights that were computed in float32, from coordinates that were.
_ROUNDED = 16 * UNIT_ROUNDOFF["float32"]


def as_form(operand: Operand) -> Form:
    if isinstance(operand, Form):
        return operand
    if operand is None or operand.values.dtype != np.float64:
        raise UnsupportedModelError("an operand is missing or holds no floats")
    return forms.constant(operand.values, None if operand.error is None else np.asarray(operand.error))


def _linear(
    operands: Sequence[Form],
    shape: tuple[int, ...],
    apply: Callable[[list[np.ndarray]], np.ndarray],
    magnitude: Callable[[list[np.ndarray]], np.ndarray] | None = None,
) -> Form:
    """Make a form from a sum or a movement of several. magnitude: the same with all weights positive."""
    blocks, errors = {}, {}
    for group in forms.groups_of(operands):
        rows = forms.rows_of(operands, group)
        forms.check_size(rows, int(np.prod(shape)))
        blocks[group] = apply([forms.part(form, group, rows) for form in operands])
        if any(group in form.errors for form in operands):
            errors[group] = (magnitude or apply)([forms.error_part(form, group, rows) for form in operands])
    size = max(
        max((float(np.abs(block).max(initial=0.0)) for block in blocks.values()), default=0.0),
        *(form.size for form in operands),
    )
    return Form(shape, blocks, errors, size)


def _aligned(block: np.ndarray, rank: int) -> np.ndarray:
    """Room for broadcasting behind the axis of variables."""
    return block.reshape(len(block), *[1] * (rank - block.ndim + 1), *block.shape[1:])


def add(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    """Add, Sub, and a Sum of any number of operands."""
    terms = [as_form(operand) for operand in operands]
    sign = -1.0 if node.op_type == "Sub" else 1.0
    shape = _broadcast(*(term.shape for term in terms))
    rank = len(shape)

    def total(parts: list[np.ndarray], sign: float = sign) -> np.ndarray:
        first, *others = (_aligned(each, rank) for each in parts)
        result = first + 0.0
        for other in others:
            result = result + sign * other
        return np.asarray(np.broadcast_to(result, (len(first), *shape)))

    return [_linear(terms, shape, total, lambda parts: total(parts, 1.0))]


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the common shape. Raises UnsupportedModelError where there is none."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise Misfit(f"the shapes {shapes} do not broadcast") from None


def scaled(form: Form, factor: Parameter) -> Form:
    """form * factor, which broadcasts."""
    if factor.values.dtype != np.float64:
        raise UnsupportedModelError("a factor holds no floats")
    values, slack = factor.values, np.asarray(factor.slack)
    shape = _broadcast(form.shape, values.shape)
    rank = len(shape)
    blocks, errors = {}, {}
    for group, block in form.blocks.items():
        wide = _aligned(block, rank)
        forms.check_size(len(block), int(np.prod(shape)))
        blocks[group] = np.asarray(wide * values)
        error = np.abs(values) * _aligned(forms.error_part(form, group, len(block)), rank)
        error = error + slack * np.abs(wide)
        if error.any():
            errors[group] = np.asarray(np.broadcast_to(error, blocks[group].shape))
    gain = max(1.0, float(np.abs(values).max(initial=0.0)))
    return Form(shape, blocks, errors, form.size * gain)


def multiply(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    first, second = operands
    if isinstance(first, Form) and isinstance(second, Parameter):
        if node.op_type == "Div":
            if not second.values.all():
                raise UnsupportedModelError("a constant divisor is 0")
            second = reciprocal(second)
        return [scaled(first, second)]
    if isinstance(second, Form) and isinstance(first, Parameter) and node.op_type == "Mul":
        return [scaled(second, first)]
    raise UnsupportedModelError(f"{node.op_type} of two values")


def negative(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    return [scaled(as_form(operands[0]), Parameter(np.asarray(-1.0)))]


def batch_normalization(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    data = as_form(operands[0])
    parameters = operands[1:5]
    if is_training(node, version):
        raise UnsupportedModelError("BatchNormalization in training")
    if len(parameters) != 4 or not all(isinstance(each, Parameter) for each in parameters):
        raise UnsupportedModelError("BatchNormalization with parameters that are not constant")
    if data.rank < 2 or any(
        np.size(each.values) != data.shape[1] for each in parameters if isinstance(each, Parameter)
    ):
        raise Misfit(f"BatchNormalization over {data.shape} with other channels")
    channels = [1] * data.rank
    channels[1] = -1
    scale, bias, mean, var = (_shaped(each, channels) for each in parameters if isinstance(each, Parameter))
    try:
        factor = normalising(node, scale, var)
    except NotAChain:
        raise UnsupportedModelError("BatchNormalization with a variance below 0") from None
    center = Parameter(-mean.values, mean.error)
    moved = add(node, [data, center], version)[0]
    return add(node, [scaled(as_form(moved), factor), bias], version)


def _shaped(parameter: Parameter, shape: Sequence[int]) -> Parameter:
    return Parameter(
        parameter.values.reshape(shape), None if parameter.error is None else parameter.error.reshape(shape)
    )


def _weighted(data: Form, weight: Parameter, apply: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Form:
    """apply(data, weight), which is linear in both and works on (variables, *shape)."""
    blocks, errors = {}, {}
    magnitude = np.abs(weight.values)
    shape: tuple[int, ...] = ()
    size = data.size
    for group, block in data.blocks.items():
        result = apply(block, weight.values)
        shape = result.shape[1:]
        error = np.zeros((1, *shape))
        if group in data.errors:
            error = error + apply(data.errors[group], magnitude)
        if weight.error is not None:
            error = error + apply(np.abs(block), weight.error)
        blocks[group] = result
        size = max(
            size, float(apply(np.abs(block[:1]), magnitude).max(initial=0.0)), float(np.abs(result).max(initial=0))
        )
        if error.any():
            errors[group] = np.asarray(np.broadcast_to(error, result.shape))
    return Form(shape, blocks, errors, size)


def convolution(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    """Conv and ConvTranspose; the variables of a form are further samples."""
    data, weight = as_form(operands[0]), operands[1]
    bias = operands[2] if len(operands) > 2 else None
    if not isinstance(weight, Parameter) or not (bias is None or isinstance(bias, Parameter)):
        raise UnsupportedModelError(f"{node.op_type} with a weight that is not constant")
    if weight.values.dtype != np.float64:
        raise UnsupportedModelError(f"{node.op_type} with a weight that holds no floats")
    evaluator = NodeEvaluator(node, [True, True, *(False for _ in operands[2:])], version)

    def apply(block: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        samples = block.reshape(-1, *block.shape[2:])
        result = evaluator([samples, kernel, *(None for _ in operands[2:])])[0]
        forms.check_size(len(block), int(np.prod(result.shape[1:])) * block.shape[1])
        return np.asarray(result.reshape(*block.shape[:2], *result.shape[1:]))

    result = _weighted(data, weight, apply)
    if bias is None:
        return [result]
    if bias.values.shape != result.shape[1:2]:
        raise Misfit(f"{node.op_type} with a bias of shape {bias.values.shape}")
    return add(node, [result, _shaped(bias, [-1, *[1] * (result.rank - 2)])], version)


def gemm(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    """alpha A' B' + beta C."""

    def number(name: str, default: float) -> Parameter:
        return Parameter(np.asarray(float(node.attributes[name].value) if name in node.attributes else default))

    ranks = [len(each.shape) if isinstance(each, Form) else np.ndim(each.values) for each in operands[:2] if each]
    if ranks != [2, 2]:
        raise UnsupportedModelError("Gemm of what is no matrix")
    factors = [
        _turned(operand) if number(name, 0.0).values else operand
        for operand, name in zip(operands, ("transA", "transB"), strict=False)
    ]
    result = scaled(as_form(matmul(node, factors, version)[0]), number("alpha", 1.0))
    if len(operands) < 3 or operands[2] is None:
        return [result]
    addend = as_form(operands[2])
    if result.rank != 2 or _broadcast(result.shape, addend.shape) != result.shape:
        raise Misfit(f"Gemm of {result.shape} with a bias of {addend.shape}")
    return add(node, [result, scaled(addend, number("beta", 1.0))], version)


def _turned(operand: Operand) -> Operand:
    """Transpose a matrix."""
    if isinstance(operand, Form):
        return _linear([operand], operand.shape[::-1], lambda parts: np.swapaxes(parts[0], -1, -2))
    return operand and Parameter(operand.values.T, None if operand.error is None else operand.error.T)


def matmul(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    first, second = operands[:2]
    if isinstance(first, Form) and isinstance(second, Parameter):
        _check_matrix(first, second)
        return [_weighted(first, second, lambda block, values: _product(_batched(block, values), values))]
    if isinstance(second, Form) and isinstance(first, Parameter):
        _check_matrix(second, first)
        return [_weighted(second, first, lambda block, values: _product(values, _batched(block, values)))]
    raise UnsupportedModelError(f"{node.op_type} of two values")


def einsum(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    """Apply the equation to all rows of a form at once: they are one more axis of the data and of the result."""
    equation = node.attributes["equation"].as_string().replace(" ", "")
    terms, arrow, result = equation.partition("->")
    parts = terms.split(",")
    spare = next(letter for letter in string.ascii_letters if letter not in equation)
    forms = [place for place, operand in enumerate(operands) if isinstance(operand, Form)]
    if len(parts) != 2 or len(operands) != 2 or not arrow or len(forms) != 1:
        raise UnsupportedModelError(f"{node.op_type} of other than one value and one constant, or without a result")
    place = forms[0]
    form, weight = operands[place], operands[1 - place]
    if not isinstance(form, Form) or not isinstance(weight, Parameter) or weight.values.dtype != np.float64:
        raise UnsupportedModelError(f"{node.op_type} of other numbers than floats")
    rows = f"{spare}{parts[place]},{parts[1 - place]}->{spare}{result}"

    def apply(block: np.ndarray, values: np.ndarray) -> np.ndarray:
        try:
            return np.asarray(np.einsum(rows, block, values))
        except ValueError:
            raise Misfit(f"{equation} of {block.shape[1:]} and {values.shape}") from None

    return [_weighted(form, weight, apply)]


def _check_matrix(form: Form, other: Parameter) -> None:
    if form.rank < 2 or other.values.ndim < 1 or other.values.dtype != np.float64:
        raise UnsupportedModelError("MatMul of a vector, or of other numbers than floats")


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left @ right. Raises UnsupportedModelError where their sizes do not fit."""
    try:
        return np.asarray(left @ right)
    except ValueError:
        raise Misfit(f"a product of {left.shape[1:]} and {right.shape}") from None


def _batched(block: np.ndarray, other: np.ndarray) -> np.ndarray:
    return _aligned(block, max(block.ndim - 1, other.ndim))


def moving(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    """Evaluated once on the numbers of all elements; number 0 stands for a zero that is put in."""
    data = [as_form(operand) if _is_data(node, place, operand) else None for place, operand in enumerate(operands)]
    _known(node, [operand for operand, form in zip(operands, data, strict=True) if form is None])
    numbered: list[Any] = []
    start = 1
    for operand, form in zip(operands, data, strict=True):
        if form is None:
            numbered.append(None if operand is None else operand.values)  # type: ignore[union-attr]
            continue
        size = int(np.prod(form.shape))
        numbered.append(np.arange(start, start + size, dtype=np.float64).reshape(form.shape))
        start += size
    if node.op_type == "Pad":
        _check_padding(node, numbered)
    present = [form for form in data if form is not None]
    results = NodeEvaluator(node, [value is not None for value in numbered], version)(numbered)
    return [_moved(present, np.asarray(result).astype(np.int64)) for result in results]


def _known(node: ir.Node, operands: Sequence[Operand]) -> list[np.ndarray | None]:
    """Return the numbers of operands that have to be constant. Raises UnsupportedModelError."""
    if any(isinstance(operand, Form) for operand in operands):
        raise UnsupportedModelError(f"{node.op_type} with sizes or indices that vary")
    return [operand.values if isinstance(operand, Parameter) else None for operand in operands]


def _is_data(node: ir.Node, place: int, operand: Operand) -> bool:
    return operand is not None and (place == 0 or (node.op_type == "Concat"))


def _check_padding(node: ir.Node, operands: list[Any]) -> None:
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "constant"
    value = node.attributes.get("value")
    filled = len(operands) > 2 and operands[2] is not None and np.any(operands[2])
    pads = node.attributes["pads"].as_ints() if "pads" in node.attributes else operands[1] if len(operands) > 1 else ()
    if not np.any(np.asarray(pads) > 0):
        return  # elements leave, and none are put in
    if mode == "constant" and (filled or (value is not None and value.as_float())):
        raise UnsupportedModelError("Pad with another value than 0")


def _moved(operands: list[Form], order: np.ndarray) -> Form:
    def apply(parts: list[np.ndarray]) -> np.ndarray:
        rows = len(parts[0])
        flat = np.concatenate([np.zeros((rows, 1)), *(each.reshape(rows, -1) for each in parts)], axis=1)
        return flat[:, order.reshape(-1)].reshape(rows, *order.shape)

    return _linear(operands, order.shape, apply)


def means(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    """Measure the matrix of the operator, from each element alone; then check it on random data."""
    data = as_form(operands[0])
    others = _known(node, operands[1:])
    if node.op_type == "Resize" and len(others) > 1 and not crops(node):
        others[0] = None  # a region of interest that nothing reads
    evaluator = NodeEvaluator(node, [True, *(value is not None for value in others)], version)
    size = int(np.prod(data.shape))

    def run(values: np.ndarray) -> np.ndarray:
        return np.asarray(evaluator([values, *others])[0], np.float64)

    shape = run(np.zeros(data.shape)).shape
    if 0 in shape:
        raise UnsupportedModelError(f"{node.op_type} gives a value of shape {shape}, which has no element to compare")
    forms.check_size(size, int(np.prod(shape)))
    sample = np.random.default_rng(0).standard_normal(data.shape)
    expected = run(sample)

    def through(values: np.ndarray, copies: int, weights: np.ndarray) -> np.ndarray:
        return (values.reshape(len(values), copies, -1) @ weights).reshape(-1, *shape)

    # Most are the same for each sample and channel: a run measures an element in each of them.
    for alike in (data.shape[:2], ()):
        if shape[: len(alike)] != alike:
            continue
        copies, matrix = math.prod(alike), _measured(run, data.shape, alike)
        if np.allclose(through(sample[None], copies, matrix)[0], expected, rtol=1e-9, atol=1e-9):
            break
    else:
        raise UnsupportedModelError(f"{node.op_type} is not linear here")
    if node.op_type in ("Resize", "Upsample"):
        matrix = _normalised(matrix)
    magnitude = np.abs(matrix)
    form = _linear(
        [data],
        shape,
        lambda parts: through(parts[0], copies, matrix),
        lambda parts: through(parts[0], copies, magnitude),
    )
    return [form]


def crops(resize: ir.Node) -> bool:
    """Whether a Resize reads a part of its data, and puts in a number beyond it."""
    mode = resize.attributes.get("coordinate_transformation_mode")
    return mode is not None and mode.as_string() == "tf_crop_and_resize"


def _measured(run: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], alike: tuple[int, ...]) -> np.ndarray:
    """Return the results for each element alone, one in a row. alike: the first dimensions, along which all results are the
    same.
    """
    copies, size = math.prod(alike), math.prod(shape[len(alike) :])
    singles = np.eye(-(-size // copies) * copies, size).reshape(-1, *shape)
    return np.concatenate([run(each).reshape(copies, -1) for each in singles])[:size]


def _normalised(matrix: np.ndarray) -> np.ndarray:
    """Make the weights of each interpolated element sum to 1 that do so but for rounding: onnx.reference rounds to float32."""
    sums = matrix.sum(axis=0)
    is_rounded = np.abs(sums - 1.0) <= _ROUNDED * np.abs(matrix).sum(axis=0)
    return np.asarray(matrix / np.where(is_rounded, sums, 1.0))


def same(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    """Identity, Dropout in inference, a Cast from float to float."""
    if len([value for value in node.outputs if value.uses() or value.is_graph_output()]) > 1:
        raise UnsupportedModelError(f"{node.op_type} with a mask")
    return [as_form(operands[0]), *[None] * (len(node.outputs) - 1)]


def shape_of(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    return [Parameter(each) for each in evaluate(node, [np.broadcast_to(0.0, as_form(operands[0]).shape)], version)]


@dataclasses.dataclass(frozen=True)
class Lemma:
    """A linear operator. attributes: those that its rule reads; None where onnx.reference runs it and reads all."""

    rule: Rule
    attributes: frozenset[str] | None = frozenset()

    def check(self, node: ir.Node, version: int) -> None:
        """Raise UnsupportedModelError where the node is not valid, or has an attribute that the rule does not read."""
        check_node(node, version)
        unread = {*node.attributes} - self.attributes if self.attributes is not None else set()
        if unread:
            raise UnsupportedModelError(f"{node.op_type} with {', '.join(sorted(unread))}, which no lemma names")


_WINDOW = frozenset(("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"))
RULES: dict[str, Lemma] = {
    **dict.fromkeys(("Add", "Sub", "Sum"), Lemma(add)),
    **dict.fromkeys(("Mul", "Div"), Lemma(multiply)),
    "Neg": Lemma(negative),
    "BatchNormalization": Lemma(
        batch_normalization, frozenset(("epsilon", "momentum", "training_mode", "is_test", "consumed_inputs"))
    ),
    "Conv": Lemma(convolution, _WINDOW),
    "ConvTranspose": Lemma(convolution, _WINDOW | {"output_padding", "output_shape"}),
    "Gemm": Lemma(gemm, frozenset(("alpha", "beta", "transA", "transB"))),
    "MatMul": Lemma(matmul),
    "Einsum": Lemma(einsum, frozenset(("equation",))),
    "Dropout": Lemma(same, frozenset(("ratio", "seed", "is_test"))),
    "Cast": Lemma(same, frozenset(("to", "saturate", "round_mode"))),
    "Identity": Lemma(same),
    "Shape": Lemma(shape_of, frozenset(("start", "end"))),
    **dict.fromkeys(MOVING, Lemma(moving, None)),
    **dict.fromkeys(MEANS, Lemma(means, None)),
}
