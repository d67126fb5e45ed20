"""Linear operators on affine forms. Each takes the node, its inputs (forms, or arrays that are known) and gives forms.

A known array carries its own error bounds (`Parameter`). Operators that only move elements are evaluated once, on the
numbers of the elements; operators without weights, as means and interpolation, on each direction.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.tolerances import UNIT_ROUNDOFF
from bnexport.verification.local import forms
from bnexport.verification.local.attributes import check_node
from bnexport.verification.local.chains import NotAChain, normalising, reciprocal
from bnexport.verification.local.forms import CONSTANT, Form
from bnexport.verification.local.parameters import Parameter
from bnexport.verification.local.reference import Misfit, NodeEvaluator
from bnexport.verification.local.regions import is_training

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


def _weighted(
    data: Form, weight: Parameter, bias: Parameter | None, apply: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> Form:
    """apply(data, weight) + bias; apply is linear in both and works on (variables, *shape)."""
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
        if group == CONSTANT and bias is not None:
            result = result + bias.values
            error = error + np.asarray(bias.slack)
        blocks[group] = result
        size = max(
            size, float(apply(np.abs(block[:1]), magnitude).max(initial=0.0)), float(np.abs(result).max(initial=0))
        )
        if error.any():
            errors[group] = np.asarray(np.broadcast_to(error, result.shape))
    return Form(shape, blocks, errors, size)


def _with_constant(data: Form) -> Form:
    if CONSTANT in data.blocks:
        return data
    return Form(data.shape, {CONSTANT: np.zeros((1, *data.shape)), **data.blocks}, data.errors, data.size)


def convolution(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    data, weight = as_form(operands[0]), operands[1]
    bias = operands[2] if len(operands) > 2 else None
    if not isinstance(weight, Parameter) or not (bias is None or isinstance(bias, Parameter)):
        raise UnsupportedModelError(f"{node.op_type} with a weight that is not constant")
    _check_weight(node, weight)
    dims = data.rank - 2
    settings = _Settings(node, dims, weight.values.shape[2:])
    channels = weight.values.shape[:1] if node.op_type == "Conv" else (weight.values.shape[1] * settings.group,)
    if bias is not None:
        if bias.values.shape != channels or bias.values.dtype != np.float64:
            raise Misfit(f"{node.op_type} with a bias of shape {bias.values.shape}")
        bias = _shaped(bias, [-1, *[1] * dims])
    one = _convolve if node.op_type == "Conv" else _convolve_transposed

    def apply(block: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        flat = block.reshape(-1, *block.shape[2:])
        result = one(flat, kernel, settings)
        forms.check_size(len(block), int(np.prod(result.shape[1:])) * block.shape[1])
        return result.reshape(*block.shape[:2], *result.shape[1:])

    return [_weighted(_with_constant(data), weight, bias, apply)]


def _check_weight(node: ir.Node, weight: Parameter) -> None:
    if weight.values.dtype != np.float64:
        raise UnsupportedModelError(f"{node.op_type} with a weight that holds no floats")


class _Settings:
    """Attributes of a Conv or ConvTranspose."""

    def __init__(self, node: ir.Node, dims: int, kernel: tuple[int, ...]) -> None:
        values = {name: attribute.value for name, attribute in node.attributes.items()}
        if values.get("kernel_shape") is not None and tuple(values["kernel_shape"]) != tuple(kernel):
            raise UnsupportedModelError(f"{node.op_type}: its kernel_shape is not that of its weight, {kernel}")
        self.group = int(values.get("group", 1))
        self.strides = list(values.get("strides") or [1] * dims)
        self.dilations = list(values.get("dilations") or [1] * dims)
        self.pads = list(values.get("pads") or [0] * (2 * dims))
        self.auto = str(values.get("auto_pad", "NOTSET") or "NOTSET")
        self.output_padding = list(values.get("output_padding") or [0] * dims)
        self.output_shape = list(values.get("output_shape") or ())
        lists = (kernel, self.strides, self.dilations, self.pads[:dims], self.pads[dims:], self.output_padding)
        if dims < 1 or any(len(each) != dims for each in lists) or len(self.output_shape) not in (0, dims):
            raise UnsupportedModelError(f"{node.op_type} with attributes that do not fit {dims} spatial axes")
        self.extent = [(size - 1) * step + 1 for size, step in zip(kernel, self.dilations, strict=True)]
        self.dims = dims

    def around(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Padding before and after each axis of a Conv's data."""
        if self.auto == "VALID":
            return [(0, 0)] * self.dims
        if self.auto == "NOTSET":
            return [(self.pads[axis], self.pads[axis + self.dims]) for axis in range(self.dims)]
        pairs = []
        for size, stride, extent in zip(sizes, self.strides, self.extent, strict=True):
            total = max(0, (-(-size // stride) - 1) * stride + extent - size)
            low = total // 2 if self.auto == "SAME_UPPER" else total - total // 2
            pairs.append((low, total - low))
        return pairs


def _convolve(data: np.ndarray, weight: np.ndarray, settings: _Settings) -> np.ndarray:
    """(N, C, *S) and (O, C / groups, *K) -> (N, O, *S')."""
    groups, kernel = settings.group, weight.shape[2:]
    padded = np.pad(data, [(0, 0), (0, 0), *settings.around(data.shape[2:])])
    sizes = [
        (size - extent) // stride + 1
        for size, extent, stride in zip(padded.shape[2:], settings.extent, settings.strides, strict=True)
    ]
    if min(sizes) < 1 or groups < 1 or weight.shape[0] % groups or data.shape[1] != groups * weight.shape[1]:
        raise Misfit(f"a Conv of {weight.shape} over {data.shape}")
    count = len(data)
    result = np.zeros((count, groups, weight.shape[0] // groups, int(np.prod(sizes))))
    grouped = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], *kernel)
    for place in itertools.product(*map(range, kernel)):
        window = padded[(slice(None), slice(None), *_window(place, sizes, settings))]
        columns = window.reshape(count, groups, weight.shape[1], -1)
        at: tuple[Any, ...] = (slice(None), slice(None), slice(None), *place)
        result += grouped[at] @ columns
    return result.reshape(count, weight.shape[0], *sizes)


def _window(place: Sequence[int], sizes: Sequence[int], settings: _Settings) -> list[slice]:
    """Return the elements that one position of the kernel meets."""
    return [
        slice(position * dilation, position * dilation + (size - 1) * stride + 1, stride)
        for position, size, dilation, stride in zip(place, sizes, settings.dilations, settings.strides, strict=True)
    ]


def _convolve_transposed(data: np.ndarray, weight: np.ndarray, settings: _Settings) -> np.ndarray:
    """(N, C, *S) and (C, O / groups, *K) -> (N, O, *S')."""
    groups, kernel, count = settings.group, weight.shape[2:], len(data)
    sizes = list(data.shape[2:])
    if groups < 1 or data.shape[1] != weight.shape[0] or weight.shape[0] % groups:
        raise Misfit(f"a ConvTranspose of {weight.shape} over {data.shape}")
    full = [
        (size - 1) * stride + extent
        for size, stride, extent in zip(sizes, settings.strides, settings.extent, strict=True)
    ]
    total = [size + extra for size, extra in zip(full, settings.output_padding, strict=True)]
    outputs = groups * weight.shape[1]
    canvas = np.zeros((count, outputs, *total))
    columns = data.reshape(count, groups, data.shape[1] // groups, -1)
    grouped = weight.reshape(groups, data.shape[1] // groups, weight.shape[1], *kernel)
    for place in itertools.product(*map(range, kernel)):
        at: tuple[Any, ...] = (slice(None), slice(None), slice(None), *place)
        kernel_at = grouped[at].transpose(0, 2, 1)
        product = (kernel_at @ columns).reshape(count, outputs, *sizes)
        canvas[(slice(None), slice(None), *_window(place, sizes, settings))] += product
    begin, end = [], []
    for axis in range(settings.dims):
        low, high = settings.pads[axis], settings.pads[axis + settings.dims]
        if settings.output_shape or settings.auto in ("SAME_UPPER", "SAME_LOWER"):
            wanted = settings.output_shape[axis] if settings.output_shape else sizes[axis] * settings.strides[axis]
            cut = total[axis] - wanted
            low = cut // 2 if settings.auto != "SAME_LOWER" else cut - cut // 2
            if settings.auto == "NOTSET":
                low = cut - cut // 2
            high = cut - low
        begin.append(low)
        end.append(total[axis] - high)
    if min(begin, default=0) < 0 or any(stop > size for stop, size in zip(end, total, strict=True)):
        raise UnsupportedModelError("a ConvTranspose with negative padding")
    return np.asarray(
        canvas[(slice(None), slice(None), *(slice(low, high) for low, high in zip(begin, end, strict=True)))]
    )


def gemm(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    def number(name: str, default: float) -> float:
        return float(node.attributes[name].value) if name in node.attributes else default

    data, weight = operands[0], operands[1]
    bias = operands[2] if len(operands) > 2 else None
    alpha, beta = number("alpha", 1.0), number("beta", 1.0)

    def product(one: Form, two: Parameter, flipped: bool) -> Form:
        _check_weight(node, two)
        if one.rank != 2 or two.values.ndim != 2:
            raise UnsupportedModelError("Gemm of what is no matrix")
        matrix = _turned(two, alpha)

        def apply(block: np.ndarray, values: np.ndarray) -> np.ndarray:
            left = np.swapaxes(block, -1, -2) if number("transA" if not flipped else "transB", 0) else block
            right = values.T if number("transB" if not flipped else "transA", 0) else values
            return _product(right, left) if flipped else _product(left, right)

        return _weighted(one, matrix, None, apply)

    if isinstance(data, Form) and isinstance(weight, Parameter):
        result = product(data, weight, False)
    elif isinstance(weight, Form) and isinstance(data, Parameter):
        result = product(weight, data, True)
    else:
        raise UnsupportedModelError("Gemm of two values")
    if bias is None:
        return [result]
    addend = as_form(bias)
    if addend.rank > 2 or _broadcast(result.shape, addend.shape) != result.shape:
        raise Misfit(f"Gemm of {result.shape} with a bias of {addend.shape}")
    return add(node, [result, scaled(addend, Parameter(np.asarray(beta)))], version)


def _turned(parameter: Parameter, factor: float) -> Parameter:
    return Parameter(
        factor * parameter.values, None if parameter.error is None else abs(factor) * np.asarray(parameter.error)
    )


def matmul(node: ir.Node, operands: list[Operand], version: int) -> list[Operand]:
    first, second = operands
    if isinstance(first, Form) and isinstance(second, Parameter):
        _check_matrix(first, second)
        return [_weighted(first, second, None, lambda block, values: _product(_batched(block, values), values))]
    if isinstance(second, Form) and isinstance(first, Parameter):
        _check_matrix(second, first)
        return [_weighted(second, first, None, lambda block, values: _product(values, _batched(block, values)))]
    raise UnsupportedModelError("MatMul of two values")


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
    if node.op_type == "Resize" and len(others) > 1 and not _crops(node):
        others[0] = None  # a region of interest that nothing reads
    evaluator = NodeEvaluator(node, [True, *(value is not None for value in others)], version)
    size = int(np.prod(data.shape))

    def run(values: np.ndarray) -> np.ndarray:
        return np.asarray(evaluator([values, *others])[0], np.float64)

    shape = run(np.zeros(data.shape)).shape
    if 0 in shape:
        raise UnsupportedModelError(f"{node.op_type} gives a value of shape {shape}, which has no element to compare")
    forms.check_size(size, int(np.prod(shape)))
    if node.op_type in ("AveragePool", "GlobalAveragePool"):  # the same for each sample and channel
        matrix = np.kron(np.eye(math.prod(data.shape[:2])), _measured(run, (1, 1, *data.shape[2:])))
    else:
        matrix = _measured(run, data.shape)
    sample = np.random.default_rng(0).standard_normal(data.shape)
    expected = run(sample).reshape(-1)
    if not np.allclose(sample.reshape(-1) @ matrix, expected, rtol=1e-9, atol=1e-9):
        raise UnsupportedModelError(f"{node.op_type} is not linear here")
    if node.op_type in ("Resize", "Upsample"):
        matrix = _normalised(matrix)
    magnitude = np.abs(matrix)

    def through(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return (values.reshape(len(values), -1) @ weights).reshape(-1, *shape)

    return [_linear([data], shape, lambda parts: through(parts[0], matrix), lambda parts: through(parts[0], magnitude))]


def _crops(resize: ir.Node) -> bool:
    mode = resize.attributes.get("coordinate_transformation_mode")
    return mode is not None and mode.as_string() == "tf_crop_and_resize"


def _measured(run: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Return the results for each element alone, one in a row."""
    singles = np.eye(int(np.prod(shape)))
    return np.stack([run(single.reshape(shape)).reshape(-1) for single in singles])


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
    start = node.attributes["start"].as_int() if "start" in node.attributes else 0
    end = node.attributes["end"].as_int() if "end" in node.attributes else None
    return [Parameter(np.asarray(as_form(operands[0]).shape[start:end], np.int64))]


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
    "Dropout": Lemma(same, frozenset(("ratio", "seed", "is_test"))),
    "Cast": Lemma(same, frozenset(("to", "saturate", "round_mode"))),
    "Identity": Lemma(same),
    "Shape": Lemma(shape_of, frozenset(("start", "end"))),
    **dict.fromkeys(MOVING, Lemma(moving, None)),
    **dict.fromkeys(MEANS, Lemma(means, None)),
}
