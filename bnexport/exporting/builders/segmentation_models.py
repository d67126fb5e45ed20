"""Models of segmentation_models_pytorch."""

from __future__ import annotations

from typing import Any

from bnexport.choices import suggestion
from bnexport.errors import UsageError
from bnexport.exporting.builders.built import BuiltModel

_SIDE = 256


def build(target: str, options: dict[str, Any]) -> BuiltModel:
    """Build segmentation_models_pytorch's class `target` without encoder weights.

    An option encoder_weights other than None is refused with UsageError.
    """
    import segmentation_models_pytorch as smp

    known = {name: cls for name, cls in vars(smp).items() if hasattr(cls, "from_pretrained") and isinstance(cls, type)}
    if target not in known:
        raise UsageError(f"segmentation_models_pytorch has no model {target!r}{suggestion(target, known)}")
    if options.get("encoder_weights") is not None:
        raise UsageError(f"encoder_weights: got {options['encoder_weights']!r}, expected --checkpoint with a file")
    model = known[target](**{**options, "encoder_weights": None})
    return BuiltModel(model, (1, options.get("in_channels", 3), _SIDE, _SIDE))
