"""Conversion of the evaluation graph and a state to an inference model: weights inside, folded, verified."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnxscript import optimizer

from bnexport import folding, model_io
from bnexport.training.building.description import Description
from bnexport.training.building.graph import keep_outputs

if TYPE_CHECKING:
    from bnexport.folding import FoldResult


def export_inference(
    evaluation: str,
    description: Description,
    state: Mapping[str, np.ndarray[Any, Any]],
    path: str | os.PathLike[str],
    *,
    verify: bool,
    overwrite: bool,
) -> FoldResult:
    """Write the model's forward in eval mode with `state` as its weights, without the loss and the target."""
    model = model_io.load(evaluation)
    graph = model.graph
    for value in list(graph.inputs):
        array = state.get(str(value.name))
        if array is not None:
            graph.inputs.remove(value)
            value.const_value = ir.tensor(array, name=value.name)
            graph.register_initializer(value)
    _count_rows_of_inputs(graph, description)
    keep_outputs(model, description.evaluation_outputs)
    optimizer.fold_constants(model)
    return folding.fold(model, path, verify=verify, overwrite=overwrite)


def _count_rows_of_inputs(graph: ir.Graph, description: Description) -> None:
    """Read the batch size from an input: the exporter may read it from the target, which inference lacks."""
    *names, target = description.inputs
    inputs = {str(value.name): value for value in graph.inputs}
    if target not in inputs or not inputs[target].shape:
        return
    rows = _rows(inputs[target])
    for name in names:
        if name in inputs and rows is not None and _rows(inputs[name]) == rows:
            for node, index in list(inputs[target].uses()):
                if node.op_type == "Shape" and _reads_rows_only(node):
                    node.replace_input_with(index, inputs[name])
            return


def _rows(value: ir.Value) -> object:
    """Return dimension 0: a number, or a name that is the same if the sizes are."""
    if not value.shape:
        return None
    size = value.shape[0]
    return size if isinstance(size, int) else size.value


def _reads_rows_only(node: ir.Node) -> bool:
    start, end = node.attributes.get("start"), node.attributes.get("end")
    return (start is None or start.as_int() == 0) and end is not None and end.as_int() == 1
