"""Reading and writing of model files; no other package opens one.

In:  path -> `wire` (lengths; large tensors stay in the file) -> ModelProto -> `validate` (structure, sizes)
     -> onnx_ir.Model whose large and external tensors are `ContainedTensor`s: lazy, checked again at each read.
Out: `encode` (bytes and tensors, in order) -> `write` -> `staging`: a folder beside the target, flushed, and
     renamed into place; or `to_parts`, for an engine that opens no file.
"""

from __future__ import annotations

from bnexport.model_io.external import ContainedTensor
from bnexport.model_io.limits import DEFAULT_LIMITS, Limits
from bnexport.model_io.read import ModelSource, as_model, check, from_proto, load
from bnexport.model_io.staging import Staged, check_space
from bnexport.model_io.write import (
    Parts,
    load_tensors,
    save,
    save_tensors,
    stage,
    stage_file,
    to_bytes,
    to_parts,
    to_proto,
)

__all__ = [
    "DEFAULT_LIMITS",
    "ContainedTensor",
    "Limits",
    "ModelSource",
    "Parts",
    "Staged",
    "as_model",
    "check",
    "check_space",
    "from_proto",
    "load",
    "load_tensors",
    "save",
    "save_tensors",
    "stage",
    "stage_file",
    "to_bytes",
    "to_parts",
    "to_proto",
]
