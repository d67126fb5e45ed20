"""Models of timm."""

from __future__ import annotations

from typing import Any

from bnexport.choices import suggestion
from bnexport.errors import UsageError
from bnexport.exporting.builders.built import BuiltModel


def build(target: str, options: dict[str, Any]) -> BuiltModel:
    """Build timm.create_model(target, **options) without pretrained weights.

    Names of remote or local model folders (hf-hub:, local-dir:) and pretrained=True are refused with UsageError.
    """
    import timm

    name = target.partition(".")[0]
    if not timm.is_model(name):
        raise UsageError(f"timm has no model {target!r}{suggestion(name, timm.list_models())}")
    if options.get("pretrained"):
        raise UsageError("pretrained: got a true value, expected --checkpoint with a file; nothing is downloaded")
    model = timm.create_model(target, **{**options, "pretrained": False})
    size = model.default_cfg.get("input_size")
    return BuiltModel(model, None if size is None else (1, *size))
