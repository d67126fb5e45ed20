"""Evaluate one node of the standard by onnx.reference, in the types of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError, first_line

# onnx.reference computes these as the opset that follows, or blends statistics; GlobalMaxPool and LRN in another way.
_NEVER = 1 << 30
_WRONG_BELOW = {
    **{"Softmax": 13, "LogSoftmax": 13, "Hardmax": 13, "BatchNormalization": 14},
    **{"GlobalMaxPool": _NEVER, "LRN": _NEVER},
}


class Misfit(UnsupportedModelError):
    """The sizes of an operator's inputs do not fit: a model that has it does not run."""


def evaluate(node: ir.Node, inputs: Sequence[Any], version: int) -> list[Any]:
    """Return the outputs of `node` for these inputs, None for an absent one. Raises UnsupportedModelError."""
    return NodeEvaluator(node, [value is not None for value in inputs], version)(inputs)


class NodeEvaluator:
    """One node, ready to be run on several sets of inputs."""

    def __init__(self, node: ir.Node, present: Sequence[bool], version: int) -> None:
        import onnx
        import onnx.reference

        self._node = node
        if version < _WRONG_BELOW.get(node.op_type, 0):
            raise UnsupportedModelError(f"{node.op_type} of opset {version} is not evaluated here")
        if node.op_type == "DequantizeLinear":
            return
        proto = ir.serde.serialize_node(node)
        del proto.input[:], proto.output[:]
        proto.input.extend(f"i{index}" if given else "" for index, given in enumerate(present))
        self._outputs = [f"o{index}" for index, value in enumerate(node.outputs) if value.name]
        proto.output.extend(f"o{index}" if value.name else "" for index, value in enumerate(node.outputs))
        names = [name for name in proto.input if name]
        graph = onnx.helper.make_graph(
            [proto],
            "node",
            [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, None) for name in names],
            [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, None) for name in self._outputs],
        )
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", max(version, 1))])
        try:
            self._evaluator = onnx.reference.ReferenceEvaluator(model)
        except Exception as error:  # it raises whatever an operator raises
            raise _unsupported(node, error) from error

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        if self._node.op_type == "DequantizeLinear":
            return [_dequantized(self._node, *inputs)]
        feeds = {f"i{index}": value for index, value in enumerate(inputs) if value is not None}
        try:
            with np.errstate(all="ignore"):
                results = dict(zip(self._outputs, self._evaluator.run(None, feeds), strict=True))
        except Exception as error:
            raise Misfit(str(_unsupported(self._node, error))) from error
        return [results.get(f"o{index}") for index in range(len(self._node.outputs))]


def _unsupported(node: ir.Node, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(f"onnx.reference cannot run {node.op_type}: {first_line(error)[:200]}")


def _dequantized(node: ir.Node, data: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None) -> np.ndarray:
    """(data - zero) * scale, rounded to the type of the scale."""
    for name in {*node.attributes} - {"axis"}:
        if name != "block_size" or node.attributes[name].as_int():
            raise UnsupportedModelError(f"DequantizeLinear with {name} is not evaluated here")
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1

    def shaped(values: np.ndarray) -> np.ndarray:
        wide = np.asarray(values, np.float64)
        return wide if wide.size == 1 else wide.reshape([-1 if i == axis % data.ndim else 1 for i in range(data.ndim)])

    exact = np.asarray(data, np.float64) - (0.0 if zero is None else shaped(zero))
    return np.asarray(exact * shaped(scale)).astype(scale.dtype)
