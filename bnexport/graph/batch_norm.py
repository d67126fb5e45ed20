"""Mode of BatchNormalization by opset, as ONNX Runtime decides it.

opset 1 to 6     training unless the attribute is_test is set
opset 7 to 13    training if outputs after the first are named, whether or not anything reads them
opset 14 and up  training if the attribute training_mode is set
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.graph.nodes import get_int


def is_training(node: ir.Node, opset: int) -> bool:
    """Whether the node normalises with batch statistics. Raise Refused if its attribute cannot be read."""
    if opset < 7:
        return get_int(node, "is_test", 0) == 0
    if opset < 14:
        return any(output.name for output in node.outputs[1:])
    return get_int(node, "training_mode", 0) != 0
