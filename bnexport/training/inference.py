"""From the evaluation graph and a state to a model for inference: weights inside, folded, verified."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnxscript import optimizer

from bnexport import folding, model_io
from bnexport.training.description import Description
from bnexport.training.graph import keep_outputs

if TYPE_CHECKING:
    from bnexport.folding import FoldResult


def export_inference(
    evaluation: str,
    description: Description,
    state: Mapping[str, np.ndarray[Any, Any]],
    path: str | os.PathLike[str],
    *,
    verify: bool,
) -> FoldResult:
    """Writes the model's forward in eval mode with `state` as its weights; the loss and the target are gone."""
    model = model_io.load(evaluation)
    graph = model.graph
    for value in list(graph.inputs):
        array = state.get(str(value.name))
        if array is not None:
            graph.inputs.remove(value)
            value.const_value = ir.tensor(array, name=value.name)
            graph.register_initializer(value)
    keep_outputs(model, description.evaluation_outputs)
    optimizer.fold_constants(model)
    return folding.fold(model, path, verify=verify)
