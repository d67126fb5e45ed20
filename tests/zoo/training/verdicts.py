"""What the errors of a step say: right or wrong."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bnexport import tolerances

SEEDS = 3
# The verdict: the error of the gradients against torch's own, and the least that counts as an error.
OWN_ERRORS, FLOOR = 5.0, 16 * tolerances.UNIT_ROUNDOFF["float32"]
# A tensor of gradients that is off by more of its norm is wrong, where torch's is not.
OF_A_TENSOR, OF_ALL = 2.0**-4, 1e-4

Errors = Sequence[Sequence[float]]


def settled(found: Errors) -> bool:
    """Whether the median error of the gradients is within OWN_ERRORS of torch's."""
    errors, own, *_ = zip(*found)
    return statistics.median(errors) <= max(OWN_ERRORS * statistics.median(own), FLOOR)


def judged(found: Errors, followed: Errors = ()) -> str:
    """right or wrong, by the errors of gradients, torch's own, and those of the loss, for each seed.

    followed: the first two, from a float64 that goes the way of each at a ReLU whose input is zero but for rounding; they decide
    where the others do not say "right". The loss is one number, which may be right by chance: the largest error of torch's counts.
    """
    _, _, of_loss, own_loss = zip(*found)
    right = settled(found) or bool(followed and settled(followed))
    return "right" if right and statistics.median(of_loss) <= max(OWN_ERRORS * max(own_loss), FLOOR) else "wrong"
