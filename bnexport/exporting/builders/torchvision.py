"""Models of torchvision."""

from __future__ import annotations

import inspect
from typing import Any

from bnexport.choices import suggestion
from bnexport.errors import UsageError
from bnexport.exporting.builders.built import BuiltModel

_SIDE, _FRAMES = 224, 16


def build(target: str, options: dict[str, Any]) -> BuiltModel:
    """Build torchvision.models.get_model(target, **options) without weights, its backbone's included.

    Options that name weights are refused with UsageError.
    """
    from torchvision import models

    names = models.list_models()
    if target not in names:
        raise UsageError(f"torchvision has no model {target!r}{suggestion(target, names)}")
    for option in ("weights", "weights_backbone"):
        if options.get(option) is not None:
            raise UsageError(f"{option}: got {options[option]!r}, expected --checkpoint with a file")
    without = {"weights": None}
    if "weights_backbone" in inspect.signature(models.get_model_builder(target)).parameters:
        without["weights_backbone"] = None
    model = models.get_model(target, **{**options, **without})
    return BuiltModel(model, _input_shape(target))


def _input_shape(target: str) -> tuple[int, ...] | None:
    """Return the shape of one example, of the size that the published weights were trained for."""
    from torchvision import models

    kind = models.get_model_builder(target).__module__.split(".")[2]
    if kind in ("detection", "optical_flow"):
        return None  # A list of images, and pairs of them.
    try:
        size = models.get_model_weights(target).DEFAULT.transforms().crop_size[-1]
    except (AttributeError, ValueError):
        size = _SIDE
    return (1, 3, _FRAMES, size, size) if kind == "video" else (1, 3, size, size)
