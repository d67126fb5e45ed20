"""Comparisons against the float64 oracle with the bounds of bnexport.tolerances; marks for what an older torch lacks."""

from typing import Any

import numpy as np
import pytest
import torch

from bnexport.tolerances import Tolerance


def assert_within(got: Any, expected: Any, tolerance: Tolerance, what: str = "", *, finite: bool = True) -> None:
    """Compare element by element. finite: otherwise NaN and infinities are right where they are expected."""
    largest = 65504.0 * (1 - 2.0**-10) if getattr(got, "dtype", None) == np.float16 else np.inf
    got, expected = (
        np.asarray(it.double() if hasattr(it, "double") else it).astype(np.float64) for it in (got, expected)
    )
    assert got.shape == expected.shape, f"{what}: got shape {got.shape}, expected {expected.shape}"
    assert not finite or np.isfinite(got).all(), f"{what}: not finite"
    with np.errstate(invalid="ignore"):
        excess = np.abs(got - expected) - tolerance.rtol * np.abs(expected) - tolerance.atol
    right = (got == expected) | (np.isnan(got) & np.isnan(expected)) | (excess <= 0)
    right |= np.isinf(got) & (np.sign(got) == np.sign(expected)) & (np.abs(expected) > largest)
    at = np.unravel_index(np.argmin(right), right.shape) if right.size else ()
    assert right.all(), (
        f"{what} at {at}: got {got[at]!r}, expected {expected[at]!r}, bound {tolerance}, {(~right).sum()} of {right.size} off"
    )


def _needs(way: str, *version: int) -> pytest.MarkDecorator:
    """Skip by torch's version alone: no error of the package turns a test into a skip."""
    wanted, found = ".".join(map(str, version)), torch.__version__
    older = tuple(int(number) for number in found.split("+")[0].split(".")[:2]) < version
    return pytest.mark.skipif(older, reason=f"{way} needs torch {wanted} or newer, got {found}")


needs_dynamo = _needs("the dynamo exporter", 2, 9)
needs_training_step = _needs("a training step", 2, 9)
