"""What happens to the nodes of a site once its map has a place, or has none.

Merging keeps the first batch norm, with its variance and epsilon, and gives it the whole map
scale * (x - center) + shift: mean = center, bias = shift, and a scale of scale * sqrt(var + eps).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import round_vector
from bnexport.folding.context import Context
from bnexport.folding.editing.parameters import new_constant
from bnexport.folding.editing.plan import Plan
from bnexport.folding.reading.site import Site
from bnexport.graph.nodes import get_float, input_at, is_standard, label
from bnexport.graph.refusal import Refused


def parameter_type(site: Site, plan: Plan) -> np.dtype:
    """The type of the data, or of the weight that takes the scale where the model does not declare it."""
    for value in (site.input, site.output):
        if value.dtype is not None and value.dtype.is_floating_point():
            return value.dtype.numpy()
    node, index = next(iter(plan.edits))
    return plan.context.constants.describe(input_at(node, index), "weight").dtype


def bypass(site: Site, context: Context) -> ir.Value:
    """Removes the nodes of a site: what read its output reads its input, which is returned."""
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
    """One batch norm for all nodes of the site; Refused where its type cannot hold the map."""
    kept = next((node for node in site.nodes if is_standard(node, "BatchNormalization")), None)
    if kept is None:
        return _restore(site, context)
    source, output, result = site.input, site.output, kept.outputs[0]
    std = np.sqrt(context.current(kept, 4, "variance") + get_float(kept, "epsilon", 1e-5))
    plan = Plan(context)
    for index, values in ((1, site.affine.scale * std), (2, site.affine.shift), (3, site.affine.center)):
        dtype = context.constants.describe(input_at(kept, index), "parameter").dtype
        plan.replace(kept, index, values, dtype, "batch norm parameter")
    plan.commit()
    kept.replace_input_with(0, source)
    if output is not result:
        _take_over(output, result, context)
    _remove([node for node in site.nodes if node is not kept], source, context)
    return kept


def _restore(site: Site, context: Context) -> ir.Node:
    """A batch norm in the place of the arithmetic that an exporter made of one: one pass instead of two or more.

    ONNX Runtime runs it in 0.6 to 1.0 times the time of Mul and Add (docs/folding.md). Its variance and
    epsilon add up to 1 as closely as float32 can, and the scale takes the rest.
    """
    dtype = context.dtype(site.input)
    rank = context.rank(site.input)
    if site.axis != 1 or rank is None or dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        raise Refused("not-per-channel", "no batch norm can say it: not along axis 1, or not of float32 or float64")
    parameter = dtype.numpy()
    epsilon = float(np.float32(1e-5))
    variance = np.full(site.affine.channels, 1.0 - epsilon, parameter)
    scale = site.affine.scale * np.sqrt(variance.astype(np.float64) + epsilon)
    last = site.nodes[-1]
    graph = last.graph
    assert graph is not None
    name = context.names.fresh(f"{label(last)}.BatchNormalization")
    values = [site.input]
    for what, array in (("scale", scale), ("bias", site.affine.shift), ("mean", site.affine.center), ("var", variance)):
        rounded = round_vector(np.asarray(array, np.float64), parameter, f"batch norm {what}")
        values.append(new_constant(context, graph, last, rounded, f"{name}.{what}"))
    node = ir.Node("", "BatchNormalization", values, [ir.AttrFloat32("epsilon", epsilon)], name=name)
    node.outputs[0].name = context.names.fresh(f"{name}.output")
    graph.insert_before(last, node)
    _take_over(site.output, node.outputs[0], context)
    _remove(site.nodes, site.input, context)
    return node


def _take_over(old: ir.Value, new: ir.Value, context: Context) -> None:
    """`new` in the place of `old`; a graph output keeps its name."""
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
