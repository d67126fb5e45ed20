"""Models of one node from what it is fed, with names and types of the contract, and a way to run them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from bnexport import schema
from bnexport.training import contract
from tests.support import node_models


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
    types = {name: helper.np_dtype_to_tensor_dtype(feeds[name].dtype) for name in inputs if name}
    data = {value.type: types[value.name] for value in operator.inputs if value.name in types}
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info(name, types[name], [None] * feeds[name].ndim) for name in types],
        [
            helper.make_tensor_value_info(name, data.get(value.type, TensorProto.FLOAT), None)
            for name, value in zip(names, operator.outputs)
            if name
        ],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(operator.domain, operator.version)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()


def session(made: bytes, threads: int = 2) -> ort.InferenceSession:
    return node_models.session(made, threads=threads, training=contract.DOMAIN.encode() in made)


def run(
    operator: schema.Operator,
    feeds: dict[str, Any],
    outputs: Sequence[str] | None = None,
    threads: int = 2,
    **attributes,
) -> dict[str, np.ndarray]:
    """The outputs of one node by name. `feeds`: arrays or tensors."""
    arrays = {name: np.asarray(value) for name, value in feeds.items()}
    return node_models.run(session(model(operator, arrays, outputs, **attributes), threads), arrays)
