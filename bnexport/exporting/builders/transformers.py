"""Models of transformers, from a local config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bnexport.errors import MissingFileError, UsageError
from bnexport.exporting.builders.built import BuiltModel

_SIDE = 224


def build(target: str, options: dict[str, Any]) -> BuiltModel:
    """Build the first class that the configuration lists under "architectures", or the base class of its model_type.

    Args:
        target: path of a config.json or of the folder that holds it; code that it refers to (auto_map) is not loaded.
        options: entries that replace those of the file; "architecture" names another class of transformers.

    Raises:
        MissingFileError: no such file.
        UsageError: it is no configuration, or of a model that transformers does not have.
    """
    path = Path(target)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise MissingFileError(f"no such file {str(path)!r}; expected a config.json on this machine")
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read as JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UsageError("has no model_type, expected a config.json that transformers wrote")
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values |= options
    architecture = values.pop("architecture", None) or next(iter(values.get("architectures") or ()), None)
    if values["model_type"] not in CONFIG_MAPPING:
        raise UsageError(f"transformers has no model_type {values['model_type']!r}")
    values |= {"use_pretrained_backbone": False} if values.get("use_pretrained_backbone") else {}
    config = transformers.AutoConfig.for_model(**values)
    if architecture is None:
        model = transformers.AutoModel.from_config(config, trust_remote_code=False)
    else:
        cls = getattr(transformers, architecture, None)
        if not isinstance(cls, type):
            raise UsageError(f"transformers has no class {architecture!r}")
        model = cls(config)
    size = getattr(config, "image_size", None) or _SIDE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return BuiltModel(model, (1, getattr(config, "num_channels", 3), height, width))
