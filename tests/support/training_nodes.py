"""One-node models of the operators of training steps, and a way to run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from bnexport import schema
from bnexport.native.library import register
from bnexport.training import contract

if TYPE_CHECKING:
    import torch


def model(
    operator: schema.Operator, feeds: dict[str, np.ndarray], outputs: Sequence[str] | None = None, **attributes
) -> bytes:
    """`feeds`: inputs by name; those that it lacks are absent. `outputs`: "" where absent, all of them by default."""
    inputs = [value.name if value.name in feeds else "" for value in operator.inputs]
    while inputs and not inputs[-1]:
        inputs.pop()
    names = [value.name for value in operator.outputs] if outputs is None else list(outputs)
    given = {name: value for name, value in attributes.items() if value is not None}
    node = helper.make_node(operator.name, inputs, names, name="node1", domain=operator.domain, **given)

    def info(name: str, rank: int | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, None if rank is None else [None] * rank)

    graph = helper.make_graph(
        [node],
        "one_node",
        [info(name, feeds[name].ndim) for name in inputs if name],
        [info(name, None) for name in names if name],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(contract.DOMAIN, contract.VERSION)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()


def session(made: bytes, threads: int = 2) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    register(options, training=True)
    return ort.InferenceSession(made, options, providers=["CPUExecutionProvider"])


def run(
    operator: schema.Operator,
    feeds: dict[str, np.ndarray | torch.Tensor],
    outputs: Sequence[str] | None = None,
    threads: int = 2,
    **attributes,
) -> dict[str, np.ndarray]:
    """The outputs of one node by name."""
    arrays = {name: np.asarray(value) for name, value in feeds.items()}
    opened = session(model(operator, arrays, outputs, **attributes), threads)
    names = [output.name for output in opened.get_outputs()]
    return dict(zip(names, opened.run(names, arrays), strict=True))
