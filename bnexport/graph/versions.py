"""The lowest version of the file format that holds a model."""

from __future__ import annotations

import onnx
import onnx_ir as ir

# The first with model-local functions.
_FUNCTIONS = 8


def set_lowest_ir_version(model: ir.Model) -> None:
    """Set the lowest IR version that has the opset, and functions: a newer one keeps the file from older runtimes."""
    opset = model.opset_imports.get("")
    lowest = 0 if opset is None else onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])
    model.ir_version = max(lowest, _FUNCTIONS)
