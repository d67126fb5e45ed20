"""Arithmetic, activations and matrix products."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import onnx

from tests.forms.case import DATA, Case, Operand, Other, Setting, Shape, form

_ROUNDING = {"saturate": [0, 1], "round_mode": ["up", "down", "nearest"]}
_CAST_TO = "FLOAT DOUBLE FLOAT16 BFLOAT16 INT8 UINT8 INT32 INT64 BOOL FLOAT8E4M3FN FLOAT8E5M2 INT4 UINT4 INT2 FLOAT4E2M1 FLOAT8E8M0"


def operand_shapes(setting: Setting) -> list[Shape]:
    """Return shapes that broadcast with the data's, to its rank and to a higher one."""
    shape, rank = setting.shape, setting.rank
    found = {(), (1,), shape, (1,) * rank, (1,) * (rank + 1), (2, *shape), shape[1:]}
    if rank >= 2:
        found |= {(1, *shape[1:]), (shape[0], *[1] * (rank - 1))}
    for axis in range(rank):
        ones = [1] * (rank - 1 - axis)
        found |= {tuple(shape[axis] if place == axis else 1 for place in range(rank)), (shape[axis], *ones)}
        # Where the data has one element, the other operand may have several.
        found |= {(3, *ones)} if shape[axis] == 1 else set()
    return sorted(found)


def binary(setting: Setting) -> Iterator[Case]:
    yield form(DATA, DATA)
    for shape in operand_shapes(setting):
        constant = setting.floats(*shape)
        yield from (
            form(*each) for each in ((DATA, constant), (DATA, Other(shape)), (constant, DATA), (Other(shape), DATA))
        )


def variadic(setting: Setting) -> Iterator[Case]:
    yield from (form(*[DATA] * count) for count in (1, 2, 3))
    for shape in operand_shapes(setting):
        constant, other = setting.floats(*shape), Other(shape)
        for each in ((DATA, constant), (constant, DATA), (DATA, other), (other, DATA, constant), (DATA, other, DATA)):
            yield form(*each)


def _fits(slope: Shape, data: Shape) -> bool:
    """Whether a slope broadcasts to the data's shape; ONNX allows no other, and ONNX Runtime enlarges the data."""
    pairs = zip(slope[::-1], data[::-1], strict=False)
    return len(slope) <= len(data) and all(one in (1, two) for one, two in pairs)


def sloped(setting: Setting) -> Iterator[Case]:
    for shape in operand_shapes(setting):
        if _fits(shape, setting.shape):
            for sign in (1.0, -1.0):
                yield form(DATA, np.asarray(sign * np.abs(setting.floats(*shape)), np.float32))
            yield form(DATA, Other(shape))


def alpha(setting: Setting) -> Iterator[Case]:
    choices = {"alpha": [0.0, 0.01, 0.5, 1.0, 2.0, -0.5], "beta": [0.5, 0.0, -0.5]}
    yield from map(Case, setting.each(choices))


def clip(setting: Setting) -> Iterator[Case]:
    if setting.knows("min"):
        yield from map(Case, setting.each({"min": [-0.5, 0.0], "max": [0.5, 6.0]}))
        return
    for bounds in itertools.product((None, -0.5, 0.0), (None, 0.5, 6.0)):
        yield form(DATA, *(None if each is None else np.asarray(each, np.float32) for each in bounds))


def cast(setting: Setting) -> Iterator[Case]:
    for target in _CAST_TO.split():
        yield from map(Case, setting.each(_ROUNDING, {"to": getattr(onnx.TensorProto, target)}, mixed=0))


def cast_like(setting: Setting) -> Iterator[Case]:
    for dtype in (np.float32, np.float64, np.float16, np.int32):
        yield from (form(DATA, np.ones(1, dtype), **attributes) for attributes in setting.each(_ROUNDING))


def dropout(setting: Setting) -> Iterator[Case]:
    for outputs in (1, 2):
        if setting.version < 12:
            yield from (Case(attributes, outputs=outputs) for attributes in setting.each({"ratio": [0.0, 0.3]}))
            continue
        ratio, zero, false, true = (np.asarray(each) for each in (np.float32(0.3), np.float32(0), False, True))
        for attributes in setting.each({"seed": [0, 7]}):
            for inputs in ((), (ratio,), (ratio, false), (None, false), (zero, true)):
                yield form(DATA, *inputs, outputs=outputs, **attributes)


def gemm(setting: Setting) -> Iterator[Case]:
    if setting.rank != 2:
        return

    def matrix(rows: int, columns: int, turned: object) -> np.ndarray:
        return setting.floats(*((columns, rows) if turned else (rows, columns)))

    choices = {"alpha": [0.5, -2.0, 1.0], "beta": [0.5, 0.0, -1.0], "transA": [0, 1], "transB": [0, 1]}
    for attributes in setting.each(choices, mixed=24):
        left, right = attributes.get("transA"), attributes.get("transB")
        rows, inner = setting.shape[::-1] if left else setting.shape
        weight = matrix(inner, 4, right)
        for shape in ((), (1,), (4,), (1, 4), (rows, 1), (rows, 4), (1, 1)):
            yield form(DATA, weight, setting.floats(*shape), **attributes)
        if setting.version >= 11:
            yield form(DATA, weight, **attributes)
        yield form(DATA, weight, Other((4,)), **attributes)
        # The data as the second operand, and as the third.
        inner, columns = setting.shape[::-1] if right else setting.shape
        yield form(matrix(3, inner, left), DATA, setting.floats(columns), **attributes)
        rows, columns = setting.shape
        yield form(matrix(rows, 3, left), matrix(3, columns, right), DATA, **attributes)


def matmul(setting: Setting) -> Iterator[Case]:
    if not setting.rank:
        return
    inner, shape = setting.shape[-1], setting.shape
    rights: list[Shape] = [(inner,), (inner, inner), (inner, 3), (1, inner, 4), (2, inner, 3), (1, 1, inner, 2)]
    rights += [(*shape[:-2], inner, 3)] if setting.rank > 2 else []
    yield from (form(DATA, setting.floats(*each)) for each in rights)
    yield form(DATA, Other((inner, 3)))
    if setting.rank > 1:
        rows = shape[-2]
        lefts: list[Shape] = [(rows,), (rows, rows), (3, rows), (1, 3, rows), (2, 3, rows)]
        yield from (form(setting.floats(*each), DATA) for each in lefts)


def einsum(setting: Setting) -> Iterator[Case]:
    """One equation for each way of an axis: summed, kept, of both operands, made by the weight, under an ellipsis."""
    if not setting.rank:
        return
    data, shape = "abcdefg"[: setting.rank], setting.shape
    last, first = data[-1], data[0]
    for weight, own, made in (
        (f"{last}z", (shape[-1], 3), data[:-1] + "z"),
        (f"z{last}", (3, shape[-1]), "z" + data[:-1]),
        (f"{last}{last}", (shape[-1], shape[-1]), data),
        (last, (shape[-1],), data),
        (last, (shape[-1],), data[:-1]),
        (f"{first}{last}z", (shape[0], shape[-1], 2), f"z{first}"),
        ("z", (2,), "z" + data),
    ):
        values = setting.floats(*own)
        yield form(DATA, values, equation=f"{data},{weight}->{made}")
        yield form(values, DATA, equation=f"{weight},{data}->{made}")
    matrix = setting.floats(shape[-1], 4)
    yield form(DATA, matrix, equation=f"...{last}, {last}z -> ...z")
    yield form(DATA, matrix, equation=f"{data},{last}z")
    yield form(equation=f"{data}->{data[::-1]}")
    yield form(DATA, Other(shape), equation=f"{data},{data}->{data}")


def batch_normalization(setting: Setting) -> Iterator[Case]:
    if setting.rank < 2:
        return
    channels = setting.shape[1]

    def four(*shape: int) -> list[Operand]:
        return [DATA, *(setting.floats(*shape) for _ in range(3)), np.abs(setting.floats(*shape)) + np.float32(0.5)]

    choices = {"epsilon": [0.0, 1e-5, 1.0], "momentum": [0.0, 0.5, 1.0], "training_mode": [0, 1]}
    for attributes in setting.each(choices):
        for outputs in (3, 1) if attributes.get("training_mode") else (1,):
            yield Case(attributes, four(channels), outputs)
    if setting.version < 14:
        yield Case({}, four(channels), outputs=5)
    if setting.knows("spatial"):
        yield Case({"spatial": 1}, four(channels))
        yield Case({"spatial": 0}, four(*setting.shape[1:]))
