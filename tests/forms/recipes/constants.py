"""Operators of constant expressions, which no rule and no lemma names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import onnx

from tests.forms.case import DATA, Case, Setting, form
from tests.forms.recipes import arithmetic, moving


def modulo(setting: Setting) -> Iterator[Case]:
    for case, attributes in itertools.product(arithmetic.binary(setting), ({}, {"fmod": 0}, {"fmod": 1})):
        yield Case(attributes, case.operands)


def logic(setting: Setting) -> Iterator[Case]:
    for shape in arithmetic.operand_shapes(setting):
        first, second = (setting.generator.random(each) < 0.5 for each in (setting.shape, shape))
        yield Case({}, (np.asarray(first), np.asarray(second)))


def negation(setting: Setting) -> Iterator[Case]:
    yield Case({}, (np.asarray(setting.generator.random(setting.shape) < 0.5),))


def where(setting: Setting) -> Iterator[Case]:
    for shape in arithmetic.operand_shapes(setting):
        condition = np.asarray(setting.generator.random(shape) < 0.5)
        for other in ((), setting.shape):
            yield Case({}, (condition, DATA, setting.floats(*other)))
            yield Case({}, (condition, setting.floats(*other), DATA))


def spans(setting: Setting) -> Iterator[Case]:
    ends = ((0, 5, 1), (5, 0, -2), (3, 3, 1), (-4, 4, 3), (0, 5, -1))
    for dtype, each in itertools.product((np.int64, np.int32, np.float32), ends):
        yield form(*(np.asarray(number, dtype) for number in each))


def filled(setting: Setting) -> Iterator[Case]:
    shape = moving.integers(*setting.shape)
    yield form(shape)
    for dtype in (np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.bool_):
        yield form(shape, value=onnx.numpy_helper.from_array(np.ones(1, dtype)))


def quantized(setting: Setting) -> Iterator[Case]:
    for dtype, point in ((np.int8, 0), (np.int8, -7), (np.uint8, 100)):
        data = (setting.generator.standard_normal(setting.shape) * 20).astype(np.float32)
        # Halves, which are rounded to even.
        halves = np.asarray(setting.generator.integers(-9, 9, setting.shape) / 2, np.float32)
        yield form(halves, np.float32(1.0), np.asarray(point, dtype))
        yield from _scaled(setting, data, np.asarray(point, dtype))


def dequantized(setting: Setting) -> Iterator[Case]:
    for dtype, (low, high) in {np.int8: (-128, 128), np.uint8: (0, 256), np.int32: (-(2**28), 2**28)}.items():
        data = np.asarray(setting.generator.integers(low, high, setting.shape), dtype)
        yield from _scaled(
            setting, data, np.asarray(0 if dtype is np.int32 else setting.generator.integers(0, 100), dtype)
        )


def _scaled(setting: Setting, data: np.ndarray, zero: np.ndarray) -> Iterator[Case]:
    """One scale, with a zero point and without; scales along each axis, and in blocks."""
    scale = np.asarray(setting.generator.random() + 0.1, np.float32)
    yield form(data, scale)
    yield form(data, scale, zero)
    blocks = setting.op_type == "DequantizeLinear" and setting.knows("block_size")
    for axis in range(-setting.rank, setting.rank) if setting.version >= 13 else ():
        scales = np.asarray(setting.generator.random(setting.shape[axis]) + 0.1, np.float32)
        for more in ({}, {"block_size": 1}) if blocks else ({},):
            yield form(data, scales, np.full(scales.shape, zero), axis=axis, **more)
