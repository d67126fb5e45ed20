"""What the errors of a step say: right, wrong, or that gradients jump."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bnexport import tolerances

SEEDS, MORE_SEEDS = 3, 8
# The verdict: the error of the gradients against torch's own, and the least that counts as an error.
OWN_ERRORS, FLOOR = 5.0, 16 * tolerances.UNIT_ROUNDOFF["float32"]
# What a jump may change.
JUMP = 2.0**-8
# A tensor of gradients that is off by more of its norm is wrong, where torch's is not; 2^-4 as in verification.
OF_A_TENSOR, OF_ALL = 2.0**-4, 1e-4

Errors = Sequence[Sequence[float]]


def settled(found: Errors) -> bool:
    """Whether the median of the first seeds is within OWN_ERRORS of torch's."""
    errors, own, *_ = zip(*found[:SEEDS])
    return statistics.median(errors) <= max(OWN_ERRORS * statistics.median(own), FLOOR)


def judged(found: Errors) -> str:
    """right, wrong or jumps, by the errors of gradients, torch's own, and those of the loss, for each seed.

    A ReLU whose input is zero but for rounding goes either way, in torch as here, and changes every gradient before it by
    1e-3 of its norm. Where this decides the median, the smallest errors are compared, and the median with the largest of torch's:
    it is "jumps" until a seed is without a jump, or MORE_SEEDS are drawn. The loss is one number, which may be right by
    chance: the largest error of torch's counts.
    """
    errors, own, of_loss, own_loss = zip(*found)
    if not statistics.median(of_loss) <= max(OWN_ERRORS * max(own_loss), FLOOR):
        return "wrong"
    if settled(found):
        return "right"
    if min(errors) <= max(OWN_ERRORS * min(own), FLOOR) and statistics.median(errors) <= OWN_ERRORS * max(*own, JUMP):
        return "right"
    return "jumps" if len(found) < MORE_SEEDS else "wrong"
