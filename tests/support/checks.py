"""Comparisons against the float64 oracle with the bounds of bnexport.tolerances; marks for what an older torch lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bnexport import tolerances
from bnexport.tolerances import Tolerance


def assert_within(got: Any, expected: Any, tolerance: Tolerance, what: str = "") -> None:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, f"{what}: got shape {got.shape}, expected {expected.shape}"
    assert np.isfinite(got).all(), f"{what}: not finite"
    excess = np.abs(got - expected) - tolerance.rtol * np.abs(expected) - tolerance.atol
    worst = float(np.abs(got - expected).max(initial=0.0))
    assert excess.max(initial=-1.0) <= 0, (
        f"{what}: differs by {worst:.3g}, allowed {tolerance.atol:.3g} + {tolerance.rtol:.3g} |expected|"
    )


def condition_of(reference_forward: Any) -> float:
    return tolerances.condition(reference_forward.mean, np.sqrt(reference_forward.var))


def _needs(way: str, *version: int) -> pytest.MarkDecorator:
    """Skip by torch's version alone: no error of the package turns a test into a skip."""
    wanted, found = ".".join(map(str, version)), torch.__version__
    older = tuple(int(number) for number in found.split("+")[0].split(".")[:2]) < version
    return pytest.mark.skipif(older, reason=f"{way} needs torch {wanted} or newer, got {found}")


needs_dynamo = _needs("the dynamo exporter", 2, 9)
needs_training_step = _needs("a training step", 2, 9)
