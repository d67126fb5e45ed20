"""What happens to the nodes of a site once its map has a place, or has none.

Merging keeps the first batch norm, with its variance and epsilon, and gives it the whole map
scale * (x - center) + shift: mean = center, bias = shift, and a scale of scale * sqrt(var + eps).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.context import Context
from bnexport.folding.nodes import get_float, input_at, is_standard
from bnexport.folding.parameters import remove_unused_constant
from bnexport.folding.plan import Plan
from bnexport.folding.site import Site


def parameter_type(site: Site, plan: Plan) -> np.dtype:
    """The type of the data, or of the weight that takes the scale where the model does not declare it."""
    for value in (site.input, site.output):
        if value.dtype is not None and value.dtype.is_floating_point():
            return value.dtype.numpy()
    node, index = next(iter(plan.edits))
    return plan.context.constants.describe(input_at(node, index), "weight").dtype


def bypass(site: Site) -> ir.Value:
    """Removes the nodes of a site: what read its output reads its input, which is returned."""
    source, output = site.input, site.output
    if output.is_graph_output():
        # `source` is no graph output itself (backward refuses that), so it can take the name over.
        output.replace_all_uses_with(source, replace_graph_outputs=True)
        name, output.name = output.name, None
        source.name = name
        source.type, source.shape = output.type or source.type, output.shape or source.shape
    else:
        output.replace_all_uses_with(source)
        source.type, source.shape = source.type or output.type, source.shape or output.shape
    constants = [
        value
        for node in site.nodes
        for value in node.inputs
        if value is not None and value is not source and value.producer() not in site.nodes
    ]
    for node in reversed(site.nodes):
        graph = node.graph
        assert graph is not None
        graph.remove(node, safe=True)
    for value in constants:
        remove_unused_constant(value)
    return source


def merge(site: Site, context: Context) -> ir.Node:
    """One batch norm for all nodes of the site; Refused where its type cannot hold the map."""
    kept = next(node for node in site.nodes if is_standard(node, "BatchNormalization"))
    source, output, result = site.input, site.output, kept.outputs[0]
    std = np.sqrt(context.current(kept, 4, "variance") + get_float(kept, "epsilon", 1e-5))
    plan = Plan(context)
    for index, values in ((1, site.affine.scale * std), (2, site.affine.shift), (3, site.affine.center)):
        dtype = context.constants.describe(input_at(kept, index), "parameter").dtype
        plan.replace(kept, index, values, dtype, "batch norm parameter")
    plan.commit()
    others = [node for node in site.nodes if node is not kept]
    kept.replace_input_with(0, source)
    if output is not result:
        result.type, result.shape = output.type or result.type, output.shape or result.shape
        was_output = output.is_graph_output()
        output.replace_all_uses_with(result, replace_graph_outputs=True)
        if was_output:
            result.name, output.name = output.name, result.name
    constants = [
        value for node in others for value in node.inputs if value is not None and value not in (source, result)
    ]
    for node in reversed(others):
        graph = node.graph
        assert graph is not None
        graph.remove(node, safe=True)
    for value in constants:
        remove_unused_constant(value)
    return kept
