"""Rewriting of a site's nodes: bypassed once its map is placed, merged or restated otherwise.

Merging keeps the first batch norm, with its variance and epsilon, and gives it the whole map
scale * (x - center) + shift: mean = center, bias = shift, and a scale of scale * sqrt(var + eps).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import round_vector
from bnexport.folding.context import Context
from bnexport.folding.editing.edits import Exact
from bnexport.folding.editing.plan import Plan
from bnexport.folding.reading.site import Site
from bnexport.graph.nodes import get_float, input_at, is_standard, label
from bnexport.graph.refusal import Refused
from bnexport.graph.scopes import new_constant


def parameter_type(site: Site, plan: Plan) -> np.dtype:
    """Return the type of the data, or of the weight that takes the scale if the model does not declare it."""
    for value in (site.input, site.output):
        if value.dtype is not None and value.dtype.is_floating_point():
            return value.dtype.numpy()
    node, index = next(iter(plan.edits), (next(node for node in site.nodes if len(node.inputs) > 1), 1))
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
        # The shape stays: what the file declares for the output may be wrong, and engines infer it less often for the source.
        source.type = source.type or output.type
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


def restate(site: Site, form: str, context: Context) -> list[ir.Node]:
    """Write a site as a depthwise 1x1 Conv ("conv") or as a Mul and an Add ("arithmetic"), what is neutral left out.

    Data of rank 2, and another axis than a Conv's, have no Conv: there it is arithmetic. Returns the new nodes; Refused
    where the type cannot represent the map, or an Add needs the rank, which is not known.
    """
    source, output, affine = site.input, site.output, site.affine
    rank, dtype = context.rank(source), parameter_type(site, Plan(context))
    if rank is None:
        raise Refused("rank", "the rank of its input is not known, so no other form can take its place")
    if context.opset < 7 and form == "arithmetic":
        raise Refused("opset", "Mul and Add before opset 7 broadcast by an attribute")
    size = np.abs(affine.scale * affine.center) + np.abs(affine.shift)
    scale = Exact(affine.scale, round_vector(affine.scale, dtype, "scale"))
    shift = Exact(affine.offset, round_vector(affine.offset, dtype, "shift", size))
    graph, name = site.nodes[-1].graph, label(site.nodes[0])
    assert graph is not None
    steps: list[tuple[str, list[tuple[Exact, tuple[int, ...]]]]] = []
    if form == "conv" and rank > 2 and site.axis == 1:
        steps.append(("Conv", [(scale, (-1, *[1] * (rank - 1))), (shift, (-1,))]))
    else:
        wide = (-1, *[1] * (rank - site.axis - 1))
        steps += [("Mul", [(scale, wide)])] if (scale.rounded != 1).any() else []
        steps += [("Add", [(shift, wide)])] if shift.rounded.any() or not steps else []
    made: list[ir.Node] = []
    value = source
    for op_type, parameters in steps:
        attributes = [ir.AttrInt64("group", affine.channels)] if op_type == "Conv" else []
        own = context.names.fresh(f"{name}.{op_type.lower()}")
        node = ir.Node("", op_type, [value], attributes, name=own)
        graph.insert_after(made[-1] if made else site.nodes[-1], node)
        node.resize_inputs(1 + len(parameters))
        for index, (exact, shape) in enumerate(parameters, start=1):
            array = exact.rounded.reshape(shape)
            node.replace_input_with(index, new_constant(context, graph, node, array, f"{own}.constant"))
            # As behind `insert_add`: a later fold starts from the exact values.
            context.edits[node, index] = Exact(exact.values.reshape(shape), array)
        value = node.outputs[0]
        context.same_shape(value, output)
        value.name, value.type, value.shape = context.names.fresh(f"{own}.output"), output.type, output.shape
        made.append(node)
    context.created += made
    take_over(output, value, context)
    _remove(site.nodes, source, context)
    return made


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
