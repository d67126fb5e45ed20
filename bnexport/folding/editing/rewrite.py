"""Rewriting of a site's nodes: bypassed once its map is placed, merged otherwise.

Merging keeps the first batch norm, with its variance and epsilon, and gives it the whole map
scale * (x - center) + shift: mean = center, bias = shift, and a scale of scale * sqrt(var + eps).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnexport.folding.context import Context
from bnexport.folding.editing.plan import Plan
from bnexport.folding.reading.site import Site
from bnexport.graph.nodes import get_float, input_at, is_standard


def parameter_type(site: Site, plan: Plan) -> np.dtype:
    """Return the type of the data, or of the weight that takes the scale if the model does not declare it."""
    for value in (site.input, site.output):
        if value.dtype is not None and value.dtype.is_floating_point():
            return value.dtype.numpy()
    node, index = next(iter(plan.edits))
    return plan.context.constants.describe(input_at(node, index), "weight").dtype


def bypass(site: Site, context: Context) -> ir.Value:
    """Remove the nodes of a site: redirect readers of its output to its input, which is returned."""
    source, output = site.input, site.output
    was_output = output.is_graph_output()
    context.surgery.replace(output, source)
    if was_output:
        # `source` was no graph output itself (backward refuses that), so it can take the name over.
        name, output.name = output.name, None
        source.name = name
        source.type, source.shape = output.type or source.type, output.shape or source.shape
    else:
        source.type, source.shape = source.type or output.type, source.shape or output.shape
    _remove(site.nodes, source, context)
    return source


def merge(site: Site, context: Context) -> ir.Node:
    """Merge all nodes of a site that contains a batch norm into one; Refused if its type cannot represent the map."""
    kept = next(node for node in site.nodes if is_standard(node, "BatchNormalization"))
    source, output, result = site.input, site.output, kept.outputs[0]
    std = np.sqrt(context.current(kept, 4, "variance") + get_float(kept, "epsilon", 1e-5))
    plan = Plan(context)
    for index, values in ((1, site.affine.scale * std), (2, site.affine.shift), (3, site.affine.center)):
        dtype = context.constants.describe(input_at(kept, index), "parameter").dtype
        plan.replace(kept, index, values, dtype, "batch norm parameter")
    plan.commit()
    kept.replace_input_with(0, source)
    if output is not result:
        take_over(output, result, context)
    _remove([node for node in site.nodes if node is not kept], source, context)
    return kept


def take_over(old: ir.Value, new: ir.Value, context: Context) -> None:
    """Replace `old` by `new`; a graph output keeps its name."""
    new.type, new.shape = old.type or new.type, old.shape or new.shape
    was_output = old.is_graph_output()
    context.same_shape(new, old)
    context.surgery.replace(old, new)
    if was_output:
        new.name, old.name = old.name, new.name


def _remove(nodes: Sequence[ir.Node], data: ir.Value, context: Context) -> None:
    gone = set(nodes)
    for node in nodes:
        for value in node.inputs:
            # What nodes of a site read beside the data are constants.
            if value is not None and value is not data and value.producer() not in gone:
                context.surgery.may_be_unused(value)
        context.surgery.remove(node)
