"""Arithmetic, activations and matrix products."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import onnx

from tests.forms.case import DATA, Case, Operand, Other, Setting


def operand_shapes(setting: Setting) -> Iterator[tuple[int, ...]]:
    """Yield shapes that broadcast with the data's, to its rank and to a higher one."""
    shape, rank = setting.shape, setting.rank
    yield ()
    yield (1,)
    yield shape
    yield (1,) * rank
    yield (1,) * (rank + 1)
    yield (2, *shape)
    yield shape[1:]
    if rank >= 2:
        yield (1, *shape[1:])
        yield (shape[0], *[1] * (rank - 1))
    for axis in range(rank):
        yield tuple(shape[axis] if place == axis else 1 for place in range(rank))
        yield (shape[axis], *[1] * (rank - 1 - axis))
        # Where the data has one element, the other operand may have several.
        if shape[axis] == 1:
            yield (3, *[1] * (rank - 1 - axis))


def binary(setting: Setting) -> Iterator[Case]:
    yield Case({}, (DATA, DATA), words=("x x",))
    for shape in sorted({*operand_shapes(setting)}):
        for first in (False, True):
            operands: list[list[Operand]] = [[DATA, setting.floats(*shape)], [DATA, Other(shape)]]
            for each in operands:
                kind = "constant" if isinstance(each[1], np.ndarray) else "other"
                yield Case(
                    {}, each[::-1] if first else each, words=(f"{kind} {list(shape)} {'first' if first else 'second'}",)
                )


def variadic(setting: Setting) -> Iterator[Case]:
    yield Case()
    yield Case({}, (DATA, DATA), words=("x x",))
    yield Case({}, (DATA, DATA, DATA), words=("x x x",))
    for shape in sorted({*operand_shapes(setting)}):
        constant, other = setting.floats(*shape), Other(shape)
        for each in ((DATA, constant), (constant, DATA), (DATA, other), (other, DATA, constant), (DATA, other, DATA)):
            words = "".join("xoc"[isinstance(one, Other) + 2 * isinstance(one, np.ndarray)] for one in each)
            yield Case({}, each, words=(f"{words} {list(shape)}",))


def _fits(slope: tuple[int, ...], data: tuple[int, ...]) -> bool:
    """Whether a slope broadcasts to the data's shape; ONNX allows no other, and ONNX Runtime enlarges the data."""
    pairs = zip(slope[::-1], data[::-1], strict=False)
    return len(slope) <= len(data) and all(one in (1, two) for one, two in pairs)


def sloped(setting: Setting) -> Iterator[Case]:
    for shape in sorted({*operand_shapes(setting)}):
        if not _fits(shape, setting.shape):
            continue
        for sign in (1.0, -1.0):
            slope = np.asarray(sign * np.abs(setting.floats(*shape)), np.float32)
            yield Case({}, (DATA, slope), words=(f"slope {list(shape)} {sign}",))
        yield Case({}, (DATA, Other(shape)), words=(f"slope computed {list(shape)}",))


def alpha(setting: Setting) -> Iterator[Case]:
    choices = {"alpha": [0.0, 0.01, 0.5, 1.0, 2.0, -0.5], "beta": [0.5, 0.0, -0.5]}
    yield from (Case(attributes) for attributes in setting.each(choices))


def clip(setting: Setting) -> Iterator[Case]:
    if setting.knows("min"):
        yield from (Case(attributes) for attributes in setting.each({"min": [-0.5, 0.0], "max": [0.5, 6.0]}))
        return
    for low, high in itertools.product((None, -0.5, 0.0), (None, 0.5, 6.0)):
        bounds = [None if each is None else np.float32(each) for each in (low, high)]
        words = tuple(name for name, each in (("min", low), ("max", high)) if each is None)
        yield Case(
            {},
            (DATA, *(None if each is None else np.asarray(each) for each in bounds)),
            words=(*words, f"{low} {high}"),
        )


def cast(setting: Setting) -> Iterator[Case]:
    kinds = onnx.TensorProto
    targets = [
        kinds.FLOAT,
        kinds.DOUBLE,
        kinds.FLOAT16,
        kinds.BFLOAT16,
        kinds.INT8,
        kinds.UINT8,
        kinds.INT32,
        kinds.INT64,
    ]
    targets += [
        kinds.BOOL,
        kinds.FLOAT8E4M3FN,
        kinds.FLOAT8E5M2,
        kinds.INT4,
        kinds.UINT4,
        kinds.INT2,
        kinds.FLOAT4E2M1,
        kinds.FLOAT8E8M0,
    ]
    for target in targets:
        for attributes in setting.each(
            {"saturate": [0, 1], "round_mode": ["up", "down", "nearest"]}, {"to": target}, mixed=0
        ):
            yield Case(attributes)


def cast_like(setting: Setting) -> Iterator[Case]:
    for dtype in (np.float32, np.float64, np.float16, np.int32):
        for attributes in setting.each({"saturate": [0, 1], "round_mode": ["up", "down", "nearest"]}):
            yield Case(attributes, (DATA, np.ones(1, dtype)), words=(f"like {np.dtype(dtype)}",))


def dropout(setting: Setting) -> Iterator[Case]:
    for outputs in (1, 2):
        if setting.version < 12:
            yield from (Case(attributes, outputs=outputs) for attributes in setting.each({"ratio": [0.0, 0.3]}))
            continue
        for attributes in setting.each({"seed": [0, 7]}):
            ratio, mode = np.asarray(np.float32(0.3)), np.asarray(False)
            yield Case(attributes, outputs=outputs, words=("ratio", "training_mode"))
            yield Case(attributes, (DATA, ratio), outputs, words=("training_mode",))
            yield Case(attributes, (DATA, ratio, mode), outputs, words=("not training",))
            yield Case(attributes, (DATA, None, mode), outputs, words=("ratio", "not training"))
            yield Case(
                attributes, (DATA, np.asarray(np.float32(0.0)), np.asarray(True)), outputs, words=("training, ratio 0",)
            )


def gemm(setting: Setting) -> Iterator[Case]:
    if setting.rank != 2:
        return
    choices = {"alpha": [0.5, -2.0, 1.0], "beta": [0.5, 0.0, -1.0], "transA": [0, 1], "transB": [0, 1]}
    for attributes in setting.each(choices, mixed=24):
        rows, inner = setting.shape[::-1] if attributes.get("transA") else setting.shape
        columns = 4
        weight = setting.floats(*((columns, inner) if attributes.get("transB") else (inner, columns)))
        thirds: list[tuple[int, ...]] = [(), (1,), (columns,), (1, columns), (rows, 1), (rows, columns), (1, 1)]
        for shape in thirds:
            yield Case(attributes, (DATA, weight, setting.floats(*shape)), words=(f"C {list(shape)}",))
        if setting.version >= 11:
            yield Case(attributes, (DATA, weight), words=("C",))
        yield Case(attributes, (DATA, weight, Other((columns,))), words=("C computed",))
        # The data as the second operand, and as the third.
        inner, columns = setting.shape[::-1] if attributes.get("transB") else setting.shape
        left = setting.floats(*((inner, 3) if attributes.get("transA") else (3, inner)))
        yield Case(attributes, (left, DATA, setting.floats(columns)), words=("data is B",))
        first = setting.floats(*((3, setting.shape[0]) if attributes.get("transA") else (setting.shape[0], 3)))
        second = setting.floats(*((setting.shape[1], 3) if attributes.get("transB") else (3, setting.shape[1])))
        yield Case(attributes, (first, second, DATA), words=("data is C",))


def matmul(setting: Setting) -> Iterator[Case]:
    if not setting.rank:
        return
    inner, shape = setting.shape[-1], setting.shape
    rights: list[tuple[int, ...]] = [
        (inner,),
        (inner, inner),
        (inner, 3),
        (1, inner, 4),
        (2, inner, 3),
        (1, 1, inner, 2),
    ]
    if setting.rank > 2:
        rights.append((*shape[:-2], inner, 3))
    for each in rights:
        yield Case({}, (DATA, setting.floats(*each)), words=(f"{list(each)} right",))
    yield Case({}, (DATA, Other((inner, 3))), words=("right computed",))
    if setting.rank > 1:
        rows = shape[-2]
        for each in ((rows,), (rows, rows), (3, rows), (1, 3, rows), (2, 3, rows)):
            yield Case({}, (setting.floats(*each), DATA), words=(f"{list(each)} left",))


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
        yield Case({"equation": f"{data},{weight}->{made}"}, (DATA, values), words=(weight, made))
        yield Case({"equation": f"{weight},{data}->{made}"}, (values, DATA), words=(weight, made, "first"))
    matrix = setting.floats(shape[-1], 4)
    yield Case({"equation": f"...{last}, {last}z -> ...z"}, (DATA, matrix), words=("ellipsis",))
    yield Case({"equation": f"{data},{last}z"}, (DATA, matrix), words=("implicit",))
    yield Case({"equation": f"{data}->{data[::-1]}"}, (DATA,), words=("alone",))
    yield Case({"equation": f"{data},{data}->{data}"}, (DATA, Other(shape)), words=("right computed",))


def batch_normalization(setting: Setting) -> Iterator[Case]:
    if setting.rank < 2:
        return
    channels = setting.shape[1]

    def four(*shape: int) -> list[Operand]:
        return [DATA, *(setting.floats(*shape) for _ in range(3)), np.abs(setting.floats(*shape)) + np.float32(0.5)]

    choices = {"epsilon": [0.0, 1e-5, 1.0], "momentum": [0.0, 0.5, 1.0], "training_mode": [0, 1]}
    for attributes in setting.each(choices):
        yield Case(attributes, four(channels), 3 if attributes.get("training_mode") else 1)
        if attributes.get("training_mode"):
            yield Case(attributes, four(channels))
    if setting.version < 14:
        yield Case({}, four(channels), outputs=5)
    if setting.knows("spatial"):
        yield Case({"spatial": 1}, four(channels))
        yield Case({"spatial": 0}, four(*setting.shape[1:]))
