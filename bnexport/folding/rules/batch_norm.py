"""A remaining batch norm, with nothing before it that takes its map, absorbs maps that reach it.

    y = s (x - m) / sqrt(v + eps) + b

Backward: k (y - c) + t has the scale k s and the bias k (b - c) + t; mean and variance stay.

Adjacent maps are composed as one site before any rule is asked; this one is for maps that arrive through
other operators, as in batch norm - Reshape - batch norm.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.placing.search import Rule, Search
from bnexport.folding.reading.batch_norm import read_batch_norm
from bnexport.graph.nodes import input_at, label
from bnexport.graph.refusal import Refused


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    own = read_batch_norm(node, search.context)
    if axis != 1 or own.channels != affine.channels:
        raise Refused("axis", f"the map acts on axis {axis}, the channels of {label(node)} are axis 1")
    scale, bias = (search.plan.value(node, index, "batch norm parameter") for index in (1, 2))
    size = np.abs(affine.scale) * (np.abs(bias) + np.abs(affine.center)) + np.abs(affine.shift)
    for index, values, magnitude in ((1, scale * affine.scale, None), (2, affine.apply(bias), size)):
        dtype = search.context.constants.describe(input_at(node, index), "batch norm parameter").dtype
        search.plan.replace(node, index, values, dtype, "batch norm parameter", magnitude)


RULE = Rule("batch_norm", ("BatchNormalization",), backward)
