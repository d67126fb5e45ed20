"""Models of OpenMMLab's libraries (mmseg, mmdet, mmpretrain, ...), from a local configuration."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

from torch import nn

from bnexport.errors import MissingFileError, UsageError, first_line
from bnexport.exporting.builders.built import BuiltModel

_NOTE = (
    "the data preprocessor (mean, std, padding, channel order) is left out: the file takes images "
    "that are preprocessed, and returns what mode='tensor' returns"
)


# MMCV's own class, which only a process of a group can build; in inference both are batch norm, of the same names.
_OWN, _TORCH = "MMSyncBN", "SyncBN"
_OWN_NOTE = f"{_OWN} is built as {_TORCH}, which equals it in inference and needs no process group"


def build(target: str, options: dict[str, Any]) -> BuiltModel:
    """Build the entry `model` of a configuration in the registry of its default_scope.

    A configuration is Python code, and reading it runs that code. Weights that it names are not loaded.

    Args:
        target: path of the configuration.
        options: changes of it, such as {"model.backbone.depth": 18}.

    Raises:
        MissingFileError: no such file.
        UsageError: the configuration raises, or has no model or scope.
    """
    path = Path(target)
    if not path.is_file():
        raise MissingFileError(f"no such file {target!r}; expected a configuration on this machine")
    from mmengine.config import Config
    from mmengine.registry import MODELS, init_default_scope

    try:
        config = Config.fromfile(str(path))
        config.merge_from_dict(options)
    except Exception as error:
        raise UsageError(f"the configuration raises {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(config.get("model"), dict):
        raise UsageError("the configuration has no dict 'model'; expected one, as MMSegmentation's have")
    scope = config.get("default_scope")
    if not isinstance(scope, str):
        raise UsageError("the configuration has no default_scope; name the library, such as ?default_scope=mmseg")
    init_default_scope(scope)
    notes = (_NOTE, _OWN_NOTE) if _replace_own(config.model) else (_NOTE,)
    return BuiltModel(_tensor_mode(MODELS.build(config.model)), _input_shape(config), notes)


def _replace_own(config: Any) -> bool:
    """Replace MMCV's sync batch norm by torch's in all of `config`; return whether there was any."""
    found = False
    if isinstance(config, dict) and config.get("type") == _OWN:
        found = True
        config["type"] = _TORCH
        for name in ("group", "stats_mode"):
            config.pop(name, None)
    inner = config.values() if isinstance(config, dict) else config if isinstance(config, (list, tuple)) else ()
    for value in inner:
        found |= _replace_own(value)
    return found


def _tensor_mode(model: nn.Module) -> nn.Module:
    """Make the forward of `model` run in mode "tensor"."""
    parameters = inspect.signature(model.forward).parameters
    mode = parameters.get("mode")
    if mode is not None and mode.default != "tensor":
        model.forward = functools.partial(model.forward, mode="tensor")
    return model


def _input_shape(config: Any) -> tuple[int, ...] | None:
    """Return the shape of one example, from the size that the configuration crops, pads or resizes to."""
    preprocessor = config.model.get("data_preprocessor") or {}
    sizes = (config.get("crop_size"), preprocessor.get("size"), config.get("input_size"), config.get("img_scale"))
    channels = len(preprocessor.get("mean") or (0, 0, 0))
    for size in sizes:
        if isinstance(size, int):
            return 1, channels, size, size
        if isinstance(size, (tuple, list)) and len(size) == 2:
            return 1, channels, *size
    for step in config.get("test_pipeline") or ():
        size = step.get("crop_size") if isinstance(step, dict) else None
        if isinstance(size, int):
            return 1, channels, size, size
    return None
