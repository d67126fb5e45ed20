"""Random inputs that fit a model's declared types and shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import ml_dtypes  # noqa: F401 - NumPy learns the names of its types
import numpy as np

from bnexport.errors import UnsupportedModelError

# (size of a free first dimension, size of every other free dimension), tried until the model runs:
# small ones first, larger ones for networks that reduce the resolution many times.
FREE_SIZES = ((2, 32), (2, 64), (1, 224), (2, 8), (1, 1))
_ELEMENTS = 1 << 27


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """An input that a caller has to give.

    kind: "float", "integer", "bool" or "string"; None for what is no tensor of a known rank. dtype: NumPy's
    name of the type. shape: free sizes are None, or a name.
    """

    name: str
    kind: str | None = None
    dtype: str = ""
    shape: tuple[int | str | None, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether a size is for the caller to choose."""
        return any(not isinstance(size, int) for size in self.shape)


def samples(
    inputs: Sequence[InputSpec], seed: int, count: int, free: tuple[int, int]
) -> Iterator[dict[str, np.ndarray]]:
    """Sets of inputs, one for each seed. The same name of a dimension gets the same size everywhere."""
    for index in range(count):
        generator = np.random.default_rng(seed + index)
        named: dict[str, int] = {}
        yield {spec.name: _random(spec, generator, named, free) for spec in inputs}


def _random(
    spec: InputSpec, generator: np.random.Generator, named: dict[str, int], free: tuple[int, int]
) -> np.ndarray:
    if spec.kind is None:
        raise UnsupportedModelError(f"input {spec.name!r} is no tensor of a known rank; give the inputs yourself")
    shape = []
    for axis, size in enumerate(spec.shape):
        if isinstance(size, int):
            shape.append(size)
        else:
            default = free[0] if axis == 0 else free[1]
            shape.append(named.setdefault(size, default) if size else default)
    if np.prod([float(size) for size in shape]) > _ELEMENTS:
        raise UnsupportedModelError(
            f"input {spec.name!r} of shape {shape} is too large to make up; give the inputs yourself"
        )
    if spec.kind == "string":
        return np.full(shape, "a", dtype=object)
    if spec.kind == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    dtype = np.dtype(spec.dtype)
    if spec.kind == "float":
        return generator.standard_normal(shape).astype(dtype)
    # Indices into anything are valid when they are 0 or 1.
    return generator.integers(0, 2, shape).astype(dtype)
