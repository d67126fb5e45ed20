"""Compare attributes of nodes."""

from __future__ import annotations

import math

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
