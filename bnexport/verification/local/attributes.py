"""Compare attributes of nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnexport.verification.local.blocks import same_tensor


def same_attributes(first: ir.Node, second: ir.Node) -> bool:
    """Both have the same attributes, without bodies, with the same values."""
    if first.attributes.keys() != second.attributes.keys():
        return False
    return all(same_attribute(attribute, second.attributes[name]) for name, attribute in first.attributes.items())


def same_attribute(first: ir.Attr, second: ir.Attr) -> bool:
    """Equal type and value."""
    if first.type is not second.type or first.is_ref() != second.is_ref():
        return False
    if first.is_ref():
        return first.ref_attr_name == second.ref_attr_name
    one, two = first.value, second.value
    if first.type is ir.AttributeType.TENSOR:
        return same_tensor(one, two)
    if first.type is ir.AttributeType.TENSORS:
        return len(one) == len(two) and all(map(same_tensor, one, two))
    if isinstance(one, float) and isinstance(two, float):
        return one == two or (math.isnan(one) and math.isnan(two))
    return bool(one == two)


def is_default(node: ir.Node, attribute: ir.Attr, version: int, kernel: Sequence[int] | None = None) -> bool:
    """Whether an absent attribute would mean the same. version: of the opset. kernel: the size of the node's, where known."""
    if attribute.is_ref() or node.domain != "":
        return False
    name, value = attribute.name, attribute.value
    if name in ("strides", "dilations"):
        return all(size == 1 for size in value)
    if name in ("pads", "output_padding"):
        return not any(value)
    if name == "kernel_shape" and node.op_type in ("Conv", "ConvTranspose"):
        return kernel is not None and tuple(value) == tuple(kernel)
    if (node.op_type, name) == ("BatchNormalization", "momentum"):
        return True  # in inference there is nothing to average
    return _schema_default(node.op_type, version, name, value)


def _schema_default(operator: str, version: int, name: str, value: object) -> bool:
    import onnx

    try:
        declared = onnx.defs.get_schema(operator, version).attributes.get(name)
    except onnx.defs.SchemaError:
        return False
    if declared is None or not declared.default_value.name:
        return False
    default = onnx.helper.get_attribute_value(declared.default_value)
    if isinstance(default, bytes):
        default = default.decode()
    if isinstance(default, float):
        return isinstance(value, float) and np.float32(default) == np.float32(value)
    return bool(default == value)
