"""Pieces of random graphs whose branches, repetitions, sizes or constants are computed in the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from tests.folding.test_random_graphs import Builder, norm

FLOAT, INT64, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL
# Rows of a table of positions: more than any size that is tried.
ROWS = 260


def _choose(builder: Builder, *choices: Callable[[], str]) -> str:
    return choices[builder.generator.integers(len(choices))]()


def constant(builder: Builder, array: np.ndarray) -> str:
    name = f"c{len(builder.initializers)}"
    builder.initializers.append(onnx.numpy_helper.from_array(array, name))
    return name


def _number(builder: Builder, value: float, dtype: type = np.int64) -> str:
    return constant(builder, np.array(value, dtype))


def _small(builder: Builder, *shape: int) -> str:
    """Return numbers that do not multiply the rounding of what they are applied to several times."""
    return constant(builder, (builder.generator.standard_normal(shape) / 8).astype(np.float32))


def _widened(builder: Builder, array: np.ndarray) -> str:
    return _aside(builder, "Cast", constant(builder, array.astype(np.float16)), to=FLOAT)


def _aside(builder: Builder, op_type: str, *inputs: str, **attributes: object) -> str:
    """Add a node beside the last tensor, which stays the last one."""
    value = builder.value
    name = builder.apply(op_type, *inputs, **attributes)
    builder.value = value
    return name


def _size(builder: Builder, axis: int) -> str:
    """Return a list of one number, the size of an axis of the last tensor."""
    shape = _aside(builder, "Shape", builder.value)
    if builder.generator.integers(2):
        return _aside(builder, "Gather", shape, builder.integers(axis))
    return _aside(builder, "Slice", shape, builder.integers(axis), builder.integers(axis + 1))


def _scalar(builder: Builder, value: str) -> str:
    return _aside(builder, "Squeeze", value, builder.integers(0))


def _axis(builder: Builder) -> int:
    return int(builder.generator.choice([0, 2, 3]))


def _count(builder: Builder, size: Callable[[], str]) -> str:
    zero, one = _number(builder, 0), _number(builder, 1)
    return _aside(builder, "Range", zero, _scalar(builder, size()), one)


def _along(builder: Builder, value: str, axis: int) -> str:
    """Return a list of numbers as a tensor that varies along one axis."""
    return _aside(builder, "Reshape", value, builder.integers(*(-1 if each == axis else 1 for each in range(4))))


def _joined(builder: Builder, other: str) -> None:
    builder.apply(["Add", "Mul"][builder.generator.integers(2)], builder.value, other)


# Sizes


def _reshaped(builder: Builder) -> None:
    """Rows and columns become one axis and two again, by sizes that are computed."""
    shape = _aside(builder, "Shape", builder.value)
    area = _aside(builder, "Mul", _size(builder, 2), _size(builder, 3))
    last = _choose(builder, lambda: area, lambda: builder.integers(-1))
    channels = _choose(builder, lambda: _size(builder, 1), lambda: builder.integers(builder.shape[1]))
    before = builder.shape
    wanted = _aside(builder, "Concat", _size(builder, 0), channels, last, axis=0)
    builder.apply("Reshape", builder.value, wanted, shape=(*before[:2], before[2] * before[3]))
    if builder.generator.integers(2):
        norm(builder)
    builder.apply("Reshape", builder.value, shape, shape=before)


def _cut(builder: Builder) -> None:
    """All but the last of an axis, or at most 5, or at most 100."""
    axis = _axis(builder)
    shape = list(builder.shape)
    if axis and shape[axis] < 3:
        return
    op_type, number = [("Sub", 1), ("Min", 5), ("Min", 100)][builder.generator.integers(3)]
    end = _aside(builder, op_type, _size(builder, axis), builder.integers(number))
    if axis:
        shape[axis] = shape[axis] - 1 if op_type == "Sub" else min(shape[axis], number)
    builder.apply("Slice", builder.value, builder.integers(0), end, builder.integers(axis), shape=tuple(shape))


def _positions(builder: Builder) -> None:
    """Rows of a table, as many as there are images, rows or columns: the first ones, or those that Range counts."""
    axis = _axis(builder)
    size, table = _size(builder, axis), builder.parameter(ROWS)
    count = _count(builder, lambda: size)
    picked = _choose(
        builder,
        lambda: _aside(builder, "Slice", table, builder.integers(0), size),
        lambda: _aside(builder, "Gather", table, count),
        lambda: _aside(builder, "Cos", _aside(builder, "Cast", count, to=FLOAT)),
    )
    _joined(builder, _along(builder, picked, axis))


def _expanded(builder: Builder) -> None:
    """Constants that are expanded to the shape of the last tensor."""
    shape, number = _aside(builder, "Shape", builder.value), builder.generator.standard_normal
    filled = _choose(
        builder,
        lambda: _aside(builder, "Expand", builder.parameter(builder.shape[1], 1, 1), shape),
        lambda: _aside(
            builder, "ConstantOfShape", shape, value=onnx.numpy_helper.from_array(number(1).astype(np.float32))
        ),
    )
    _joined(builder, filled)


def _masked(builder: Builder) -> None:
    """Another factor for all but the first images, rows or columns."""
    axis = _axis(builder)
    count = _count(builder, lambda: _size(builder, axis))
    first = builder.integers(int(builder.generator.choice([2, 100])))
    mask = _along(builder, _aside(builder, "Less", count, first), axis)
    scaled = _aside(builder, "Mul", builder.value, builder.parameter(builder.shape[1], 1, 1))
    builder.apply("Where", mask, builder.value, scaled)


# Constants


def _standardised(builder: Builder, _: str) -> str:
    array = builder.generator.standard_normal((6, builder.shape[1], 3, 3)).astype(np.float32)
    if builder.generator.integers(2):
        array[0] = 2 + array[0] / 1024
    whole = constant(builder, array)
    centred = _aside(builder, "Sub", whole, _aside(builder, "ReduceMean", whole, axes=[1, 2, 3], keepdims=1))
    squares = _aside(builder, "Mul", centred, centred)
    variance = _aside(builder, "ReduceMean", squares, axes=[1, 2, 3], keepdims=1)
    wide = _aside(builder, "Add", variance, _number(builder, 1e-5, np.float32))
    return _aside(builder, "Div", centred, _aside(builder, "Sqrt", wide))


def _normalised(builder: Builder, weight: str) -> str:
    length = _aside(builder, "ReduceL2", weight, axes=[1, 2, 3], keepdims=1)
    return _aside(builder, "Mul", _aside(builder, "Div", weight, length), builder.parameter(6, 1, 1, 1))


def _cancelled(builder: Builder, weight: str) -> str:
    size = float(builder.generator.choice([2.0, 1e3, 1e5]))
    large = constant(builder, np.full((6, builder.shape[1], 1, 1), size, np.float32))
    return _aside(builder, "Sub", _aside(builder, "Add", weight, large), large)


def _half(builder: Builder, _: str) -> str:
    return _widened(builder, builder.generator.standard_normal((6, builder.shape[1], 1, 1)))


def _computed_weights(builder: Builder) -> None:
    """A convolution to 6 channels whose weights nodes compute."""
    n, channels, h, w = builder.shape
    weight = builder.parameter(6, channels, 1, 1)
    way = (_standardised, _normalised, _cancelled, _half)[builder.generator.integers(4)]
    weights, narrow = way(builder, weight), builder.generator.standard_normal(6)
    bias = _choose(builder, lambda: "", lambda: builder.parameter(6), lambda: _widened(builder, narrow))
    pads = [int(way is _standardised)] * 4
    builder.apply("Conv", builder.value, weights, *filter(None, [bias]), shape=(n, 6, h, w), pads=pads)


def _computed_factor(builder: Builder) -> None:
    """A factor, or a summand, of each channel that is the rest of a large sum."""
    channels = builder.shape[1]
    large = builder.parameter(channels, 1, 1, positive=True)
    whole = _aside(builder, "Add", builder.parameter(channels, 1, 1), large)
    _joined(builder, _aside(builder, "Sub", whole, large))


# Branches and repetitions


def _inside(builder: Builder, prefix: str, value: str) -> Builder:
    """Return a builder of a body: it shares the constants, which the body captures."""
    return dataclasses.replace(builder, nodes=[], prefix=prefix, value=value)


def _same_channels(body: Builder) -> None:
    """One or two nodes that keep the shape, or a copy of the captured value alone."""
    channels = body.shape[1]
    weight = _small(body, channels, channels, 3, 3)
    kind = int(body.generator.integers(5))
    if kind == 0:
        body.apply("Identity", body.value)
    elif kind == 1:
        body.apply("Relu", body.value)
    elif kind == 2:
        norm(body)
    else:
        body.apply("Conv", body.value, weight, pads=[1] * 4)
        if kind == 4:
            norm(body)


def _condition(builder: Builder) -> str:
    limit = builder.integers(int(builder.generator.choice([1, 2, 100])))

    def truth() -> str:
        return constant(builder, np.array(bool(builder.generator.integers(2))))

    def mean() -> str:
        return _aside(builder, "Greater", _aside(builder, "ReduceMean", builder.value, keepdims=0), builder.parameter())

    def size() -> str:
        return _scalar(builder, _aside(builder, "Greater", _size(builder, _axis(builder)), limit))

    return _choose(builder, truth, lambda: _aside(builder, "Not", truth()), size, mean)


def _conditional(builder: Builder) -> None:
    condition = _condition(builder)
    place = len(builder.nodes)
    graphs = {}
    for name in ("then_branch", "else_branch"):
        body = _inside(builder, f"{builder.prefix}{name[0]}{place}_", builder.value)
        _same_channels(body)
        output = onnx.helper.make_tensor_value_info(body.value, FLOAT, None)
        graphs[name] = onnx.helper.make_graph(body.nodes, f"{name}{place}", [], [output])
    builder.apply("If", condition, **graphs)


def _repeated(builder: Builder) -> None:
    """A body that is applied two or three times, with a factor that starts as a constant and becomes smaller."""
    place = len(builder.nodes)
    prefix, three = f"{builder.prefix}l{place}_", builder.integers(3)
    count = _choose(
        builder,
        lambda: _number(builder, 2),
        lambda: _scalar(builder, _aside(builder, "Min", _size(builder, _axis(builder)), three)),
    )
    factor = _small(builder, 1, builder.shape[1], 1, 1)
    names = [f"{prefix}{name}" for name in ("i", "go", "x", "k")]
    body = _inside(builder, prefix, names[2])
    _same_channels(body)
    body.apply("Mul", body.value, names[3])
    carried = body.apply("Tanh", body.value)
    smaller = _aside(body, "Mul", names[3], _small(body, 1))
    going = _aside(body, "Identity", names[1])
    kinds, value = (INT64, BOOL, FLOAT, FLOAT), onnx.helper.make_tensor_value_info
    inputs = [value(name, kind, [] if kind != FLOAT else None) for name, kind in zip(names, kinds, strict=True)]
    outputs = [value(going, BOOL, []), value(carried, FLOAT, None), value(smaller, FLOAT, None)]
    graph = onnx.helper.make_graph(body.nodes, f"loop{place}", inputs, outputs)
    builder.apply("Loop", count, "", builder.value, factor, body=graph)
    builder.nodes[-1].output.append(f"{builder.value}_k")


COMPUTED: dict[str, Callable[[Builder], object]] = {
    "reshaped by sizes": _reshaped,
    "cut by sizes": _cut,
    "positions of a table": _positions,
    "expanded": _expanded,
    "masked by sizes": _masked,
    "computed weights": _computed_weights,
    "computed factor": _computed_factor,
    "conditional": _conditional,
    "repeated": _repeated,
}
