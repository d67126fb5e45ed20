"""The TorchScript exporter: a symbolic for our operator, statistics as plain outputs.

Its symbolics want attribute names with a type suffix, a domain, and the group as a string and a
size; without them the node lands in the default domain or fails to serialise.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch.onnx import symbolic_helper

from bnexport import schema
from bnexport.exporting.dynamo import dynamic_dimensions
from bnexport.exporting.wrapper import Traced
from bnexport.sync_bn.module import SyncBatchNorm

OPSET = 18
_OPERATOR = "bnexport::sync_batch_norm"


@symbolic_helper.parse_args("v", "v", "v", "v", "v", "i", "f", "f", "s", "i", "s", "s", "i")
def _symbolic(
    g: Any,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any,
    bias: Any,
    training: int,
    momentum: float,
    eps: float,
    group: str,
    group_size: int,
    stats_mode: str,
    grad_reduction: str,
    layer: int,
) -> Any:
    del grad_reduction, layer
    double = input.type().scalarType() == "Double"
    to = int(ir.DataType.DOUBLE if double else ir.DataType.FLOAT)
    wanted = "Double" if double else "Float"

    def statistics(vector: Any) -> Any:
        if symbolic_helper._is_none(vector) or vector.type().scalarType() == wanted:
            return vector
        return g.op("Cast", vector, to_i=to)

    outputs = g.op(
        f"{schema.DOMAIN}::{schema.SYNC_BATCH_NORM.name}",
        input,
        statistics(running_mean),
        statistics(running_var),
        statistics(weight),
        statistics(bias),
        momentum_f=momentum,
        eps_f=eps,
        group_s=group,
        group_size_i=group_size,
        training_mode_i=training,
        stats_mode_s=stats_mode,
        outputs=len(schema.SYNC_BATCH_NORM.outputs),
    )
    outputs[0].setType(input.type())
    statistics_type = input.type().with_dtype(torch.float64 if double else torch.float32)
    sizes = input.type().sizes()
    if sizes is not None:
        statistics_type = statistics_type.with_sizes([sizes[1]])
    for output in outputs[1:]:
        output.setType(statistics_type)
    return tuple(outputs)


def trace(
    wrapper: Traced, args: tuple[torch.Tensor, ...], names: list[str], dynamic: bool
) -> tuple[ir.Model, list[str]]:
    """Traces `wrapper` to an onnx_ir Model with torch.onnx.export(dynamo=False)."""
    axes: dict[str, dict[int, str]] = {}
    if dynamic:
        axes = {name: shape for name, shape in zip(names, dynamic_dimensions(names, args)) if shape}
    torch.onnx.register_custom_op_symbolic(  # type: ignore[attr-defined]
        _OPERATOR, _symbolic, OPSET
    )
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file = Path(folder) / "model.onnx"
            torch.onnx.export(
                wrapper,
                args,
                str(file),
                dynamo=False,
                opset_version=OPSET,
                custom_opsets={schema.DOMAIN: schema.VERSION} if _has_sync_batch_norm(wrapper) else {},
                training=torch.onnx.TrainingMode.PRESERVE,
                do_constant_folding=False,
                keep_initializers_as_inputs=False,
                input_names=names,
                dynamic_axes=axes,
            )
            model = ir.load(file)
            for initializer in model.graph.initializers.values():
                # The folder goes away: external tensors of models over 2 GB come into memory.
                tensor = initializer.const_value
                if isinstance(tensor, ir.ExternalTensor):
                    initializer.const_value = ir.Tensor(tensor.numpy().copy(), name=tensor.name)
            _forget_inner_shapes(model.graph)
            return model, []
    finally:
        torch.onnx.unregister_custom_op_symbolic(_OPERATOR, OPSET)  # type: ignore[attr-defined]


def _has_sync_batch_norm(wrapper: Traced) -> bool:
    return any(isinstance(module, SyncBatchNorm) for module in wrapper.modules())


def _forget_inner_shapes(graph: ir.Graph) -> None:
    """The exporter gives every output of a custom node the shape of its first; only types are kept."""
    spreading: set[ir.Value] = set()
    for node in graph:
        wrong = set(node.outputs[1:]) if node.op_type == schema.SYNC_BATCH_NORM.name else set()
        if node.op_type != schema.SYNC_BATCH_NORM.name and spreading.intersection(
            value for value in node.inputs if value is not None
        ):
            wrong = set(node.outputs)
        for value in wrong:
            value.shape = None
        spreading |= wrong
