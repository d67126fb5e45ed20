"""bnexport: export models trained with sync batch norm to inference formats, and fold their batch norms.

The names below are imported when they are first used: folding and running a model need no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

# Type checkers know the name; importing it from `typing` would take most of the time of importing bnexport.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from bnexport.exporting import ExportResult, export
    from bnexport.exporting.against_file import verify
    from bnexport.exporting.checkpoint import load_checkpoint
    from bnexport.folding import FoldResult, InlineResult, InspectReport, Verification, fold, inline, inspect
    from bnexport.folding.torch_module import fold_module
    from bnexport.native.library import get_library_path, register
    from bnexport.recalibration.deviations import statistics
    from bnexport.recalibration.files import recalibrate_file
    from bnexport.recalibration.modules import recalibrate
    from bnexport.runtime.groups import register_group
    from bnexport.runtime.sessions import InferenceSession
    from bnexport.sync_bn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm
    from bnexport.sync_bn.join import join
    from bnexport.training.api import TrainingExportResult, export_training_step
    from bnexport.training.session import TrainingSession

__version__ = "0.1.0"

_HOMES = {
    "ExportResult": "exporting",
    "FoldResult": "folding",
    "InferenceSession": "runtime.sessions",
    "InlineResult": "folding",
    "InspectReport": "folding",
    "SyncBatchNorm": "sync_bn",
    "TrainingExportResult": "training.api",
    "TrainingSession": "training.session",
    "Verification": "folding",
    "convert_sync_batchnorm": "sync_bn",
    "export": "exporting",
    "export_training_step": "training.api",
    "fold": "folding",
    "fold_module": "folding.torch_module",
    "get_library_path": "native.library",
    "inline": "folding",
    "inspect": "folding",
    "join": "sync_bn.join",
    "load_checkpoint": "exporting.checkpoint",
    "recalibrate": "recalibration.modules",
    "recalibrate_file": "recalibration.files",
    "register": "native.library",
    "register_group": "runtime.groups",
    "revert_sync_batchnorm": "sync_bn",
    "statistics": "recalibration.deviations",
    "verify": "exporting.against_file",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bnexport' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"bnexport.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        from bnexport import interface

        package = (error.name or "").partition(".")[0]
        if interface.advice(package) is None:
            raise
        raise interface.missing(package, f"bnexport.{name} needs it") from error
    except (ImportError, OSError) as error:
        from bnexport import interface

        if "torch" in sys.modules or importlib.util.find_spec("torch") is None:
            raise
        raise interface.broken("torch", error) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
