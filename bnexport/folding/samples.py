"""Random inputs that fit a model's declared types and shapes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError

# (size of a free first dimension, size of every other free dimension), tried until the model runs:
# small ones first, larger ones for networks that reduce the resolution many times.
FREE_SIZES = ((2, 32), (2, 64), (1, 224), (2, 8), (1, 1))
_ELEMENTS = 1 << 27


def model_inputs(model: ir.Model) -> list[ir.Value]:
    """Inputs that a caller has to give: those without an initializer."""
    return [value for value in model.graph.inputs if not value.is_initializer()]


def random_inputs(model: ir.Model, seed: int, free: tuple[int, int]) -> dict[str, np.ndarray]:
    """One set of inputs. The same name of a dimension gets the same size everywhere."""
    generator = np.random.default_rng(seed)
    named: dict[str, int] = {}
    return {str(value.name): _random(value, generator, named, free) for value in model_inputs(model)}


def samples(model: ir.Model, seed: int, count: int, free: tuple[int, int]) -> Iterator[dict[str, np.ndarray]]:
    for index in range(count):
        yield random_inputs(model, seed + index, free)


def _random(
    value: ir.Value, generator: np.random.Generator, named: dict[str, int], free: tuple[int, int]
) -> np.ndarray:
    if not isinstance(value.type, ir.TensorType) or value.shape is None:
        raise UnsupportedModelError(f"input {value.name!r} is no tensor of a known rank; give the inputs yourself")
    shape = []
    for axis, size in enumerate(value.shape):
        if isinstance(size, int) and size >= 0:
            shape.append(size)
        else:
            default = free[0] if axis == 0 else free[1]
            name = None if isinstance(size, int) else size.value
            shape.append(named.setdefault(name, default) if name else default)
    if np.prod([float(size) for size in shape]) > _ELEMENTS:
        raise UnsupportedModelError(
            f"input {value.name!r} of shape {shape} is too large to make up; give the inputs yourself"
        )
    dtype = value.type.dtype
    if dtype is ir.DataType.STRING:
        return np.full(shape, "a", dtype=object)
    if dtype is ir.DataType.BOOL:
        return generator.integers(0, 2, shape).astype(bool)
    if dtype.is_floating_point():
        return generator.standard_normal(shape).astype(dtype.numpy())
    if dtype.is_integer():
        # Indices into anything are valid when they are 0 or 1.
        return generator.integers(0, 2, shape).astype(dtype.numpy())
    raise UnsupportedModelError(f"input {value.name!r} has type {dtype.name}; give the inputs yourself")
