"""Build torch models by their names in known libraries, without weights and without network access."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from pathlib import Path
from typing import Any

from torch import nn

from bnexport.errors import BnexportError, MissingDependencyError, MissingFileError, UsageError, first_line
from bnexport.interface import suggestion

__all__ = ["BuiltModel", "build"]

_SIDE, _FRAMES = 224, 16
_NOTE = (
    "the data preprocessor (mean, std, padding, channel order) is left out: the file takes images "
    "that are preprocessed, and returns what mode='tensor' returns"
)
# MMCV's own class, which only a process of a group can build; in inference both are batch norm, of the same names.
_OWN, _TORCH = "MMSyncBN", "SyncBN"
_OWN_NOTE = f"{_OWN} is built as {_TORCH}, which equals it in inference and needs no process group"


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """A model that a library built.

    shape: of one example input, as the library or the configuration states it; None where neither does.
    notes: what was left out.
    """

    module: nn.Module
    shape: tuple[int, ...] | None
    notes: tuple[str, ...] = ()


def build(library: str, target: str, options: dict[str, Any], *, shown: str) -> BuiltModel:
    """Build the model `target` of a library with random weights.

    Args:
        library: a key of `bnexport.interface.LIBRARIES`.
        target: the model's name there, or the path of its configuration.
        options: keyword arguments of the library's builder; for "mmengine" changes of the configuration.
        shown: how messages name the model.

    Raises:
        UsageError: the library has no such model, or cannot build it with these options.
        MissingDependencyError: the library, or another one that it needs, is not installed.
    """
    builder = {"timm": _timm, "torchvision": _torchvision, "mmengine": _mmengine}[library]
    try:
        return builder(target, options)
    except BnexportError as error:
        raise type(error)(f"{shown}: {error}") from error
    except ModuleNotFoundError as error:
        missing = f"the package {error.name}, which is not installed" if error.name else f"more: {first_line(error)}"
        raise MissingDependencyError(f"{shown}: needs {missing}") from error
    except Exception as error:
        raise UsageError(f"{shown}: building it failed: {type(error).__name__}: {first_line(error)}") from error


def _timm(target: str, options: dict[str, Any]) -> BuiltModel:
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


def _torchvision(target: str, options: dict[str, Any]) -> BuiltModel:
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
    return BuiltModel(model, _trained_shape(target))


def _trained_shape(target: str) -> tuple[int, ...] | None:
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


def _mmengine(target: str, options: dict[str, Any]) -> BuiltModel:
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
    return BuiltModel(_tensor_mode(MODELS.build(config.model)), _configured_shape(config), notes)


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


def _configured_shape(config: Any) -> tuple[int, ...] | None:
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
