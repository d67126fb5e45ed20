"""All known mistakes, in the order of the documents."""

from __future__ import annotations

from tests.miscompilations import (
    activations,
    arithmetic,
    batch_norms,
    casts,
    convolutions,
    layouts,
    quantized,
    quark,
    resizing,
    sizes,
    softmaxes,
    training,
)
from tests.miscompilations.mistake import Mistake

GROUPS: dict[str, list[Mistake]] = {
    "Folds of batch norms": batch_norms.MISTAKES + quark.MISTAKES,
    "Convolutions, padding and pools": convolutions.MISTAKES,
    "Layouts and shapes": layouts.MISTAKES,
    "Resizing": resizing.MISTAKES,
    "Casts": casts.MISTAKES,
    "Activations and norms": activations.MISTAKES,
    "Softmax and indices": softmaxes.MISTAKES,
    "Arithmetic and constants": arithmetic.MISTAKES,
    "Sizes, tables and thresholds": sizes.MISTAKES,
    "Quantised values": quantized.MISTAKES,
    "Training": training.MISTAKES,
}
MISTAKES = [each for group in GROUPS.values() for each in group]
