"""Pending changes of parameters, stored outside the model and applied at the end of the pass."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import Outputs

# Input `index` of a node: parameters are edited where they are read, since they may be shared.
Slot = tuple[ir.Node, int]


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A parameter, reshaped to `view`, times a factor that broadcasts to it. result: the product, if it is small.

    outputs: those of the slices, where each makes one on its own.
    """

    factor: np.ndarray
    view: tuple[int, ...]
    result: np.ndarray | None = None
    outputs: Outputs | None = None


@dataclasses.dataclass(frozen=True)
class Exact:
    """A parameter with a new value: in float64 (any shape), and rounded to the type of the parameter."""

    values: np.ndarray
    rounded: np.ndarray


@dataclasses.dataclass(frozen=True)
class Raw:
    """A parameter replaced by a given array as it is."""

    values: np.ndarray


Edit = Scaled | Exact | Raw


@dataclasses.dataclass(frozen=True)
class Addend:
    """A vector to be added along `axis` of a value of `rank` dimensions."""

    vector: np.ndarray
    axis: int
    rank: int
    dtype: np.dtype
