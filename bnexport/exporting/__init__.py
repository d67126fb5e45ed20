"""Export of torch modules to ONNX, TorchScript and pt2.

The names are imported when they are first used: comparing two files needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bnexport.exporting.api import ExportResult, export

__all__ = ["ExportResult", "export"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'bnexport.exporting' has no attribute {name!r}")
    value = getattr(importlib.import_module("bnexport.exporting.api"), name)
    globals()[name] = value
    return value
