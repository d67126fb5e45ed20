"""Operators of constant expressions, which no rule and no lemma names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import onnx

from tests.forms.case import DATA, Case, Setting
from tests.forms.recipes import arithmetic, moving


def modulo(setting: Setting) -> Iterator[Case]:
    for case in arithmetic.binary(setting):
        for attributes in setting.each({"fmod": [0, 1]}, mixed=0):
            yield Case(attributes, case.operands, words=case.words)


def logic(setting: Setting) -> Iterator[Case]:
    for shape in sorted({*arithmetic.operand_shapes(setting)}):
        first, second = (setting.generator.random(each) < 0.5 for each in (setting.shape, shape))
        yield Case({}, (np.asarray(first), np.asarray(second)), words=(f"{list(shape)}",))


def negation(setting: Setting) -> Iterator[Case]:
    yield Case({}, (np.asarray(setting.generator.random(setting.shape) < 0.5),))


def where(setting: Setting) -> Iterator[Case]:
    for shape in sorted({*arithmetic.operand_shapes(setting)}):
        condition = np.asarray(setting.generator.random(shape) < 0.5)
        for other in ((), setting.shape):
            yield Case({}, (condition, DATA, setting.floats(*other)), words=(f"{list(shape)} {list(other)}",))
            yield Case({}, (condition, setting.floats(*other), DATA), words=(f"{list(shape)} {list(other)} last",))


def spans(setting: Setting) -> Iterator[Case]:
    for dtype, ends in itertools.product(
        (np.int64, np.int32, np.float32), ((0, 5, 1), (5, 0, -2), (3, 3, 1), (-4, 4, 3), (0, 5, -1))
    ):
        yield Case({}, tuple(np.asarray(each, dtype) for each in ends), words=(f"{np.dtype(dtype)} {ends}",))


def filled(setting: Setting) -> Iterator[Case]:
    shape = moving.integers(*setting.shape)
    yield Case({}, (shape,))
    for dtype in (np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.bool_):
        value = onnx.numpy_helper.from_array(np.ones(1, dtype))
        yield Case({"value": value}, (shape,), words=(f"{np.dtype(dtype)}",))


def quantized(setting: Setting) -> Iterator[Case]:
    for dtype, point in ((np.int8, 0), (np.int8, -7), (np.uint8, 100)):
        data = (setting.generator.standard_normal(setting.shape) * 20).astype(np.float32)
        scale = np.asarray(setting.generator.random() + 0.1, np.float32)
        yield Case({}, (data, scale), words=("no zero",))
        yield Case({}, (data, scale, np.asarray(point, dtype)), words=(f"{np.dtype(dtype)}",))
        # Halves, which are rounded to even.
        halves = np.asarray(setting.generator.integers(-9, 9, setting.shape) / 2, np.float32)
        yield Case({}, (halves, np.float32(1.0), np.asarray(point, dtype)), words=(f"halves, {np.dtype(dtype)}",))
        if setting.version < 13:
            continue
        for axis in range(-setting.rank, setting.rank):
            count = setting.shape[axis]
            scales = np.asarray(setting.generator.random(count) + 0.1, np.float32)
            zeros = np.asarray(np.full(count, point), dtype)
            yield Case({"axis": axis}, (data, scales, zeros), words=(f"{np.dtype(dtype)} {axis}",))


def dequantized(setting: Setting) -> Iterator[Case]:
    for dtype, (low, high) in {np.int8: (-128, 128), np.uint8: (0, 256), np.int32: (-(2**28), 2**28)}.items():
        data = np.asarray(setting.generator.integers(low, high, setting.shape), dtype)
        zero = np.asarray(0 if dtype is np.int32 else setting.generator.integers(0, 100), dtype)
        scale = np.asarray(setting.generator.random() + 0.1, np.float32)
        yield Case({}, (data, scale), words=(f"{np.dtype(dtype)}", "no zero"))
        yield Case({}, (data, scale, zero), words=(f"{np.dtype(dtype)}",))
        if setting.version < 13:
            continue
        for axis in range(-setting.rank, setting.rank):
            count = setting.shape[axis]
            scales = np.asarray(setting.generator.random(count) + 0.1, np.float32)
            zeros = np.asarray(np.full(count, zero), dtype)
            for block in (0, 1) if setting.knows("block_size") else (0,):
                more = {"block_size": block} if block else {}
                yield Case({"axis": axis, **more}, (data, scales, zeros), words=(f"{np.dtype(dtype)} {axis}",))
