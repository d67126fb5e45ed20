"""Operators of MMCV and MMDeploy as standard ones, which stock runtimes have.

    MMCVModulatedDeformConv2d(x, offset, mask, W, b)  =  DeformConv(x, W, offset, b, mask)                      opset 19
    MMCVDeformConv2d(x, offset, W)                    =  DeformConv(x, W, offset)                               opset 19
    grid_sampler(x, grid)                             =  GridSample(x, grid)                                    opset 16
    MMCVRoiAlign(x, rois)                             =  RoiAlign(x, rois[:, 1:5], integer of rois[:, 0])       opset 16
    NonMaxSuppression(boxes, scores)                  =  NonMaxSuppression(boxes + [0, 0, d, d], scores)[:, 2]  opset 11
    MMCVCornerPool(x)                                 =  MaxPool(x) over all rows, or columns, from here on     opset 10

Offsets lie in pairs (y, x) for each position of the kernel, in both definitions, and both read zeros outside of the input.
An offset d of NonMaxSuppression counts both borders of a box as inside: its right and lower border move by d.

Refused: RoiAlign's maximum, which MMCV takes over interpolated values and ONNX Runtime over the pixels that are interpolated;
a corner pool over a size that is not known; attributes that are not known here.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from bnexport import schema
from bnexport.errors import first_line
from bnexport.graph.nodes import (
    Refused,
    get_flag,
    get_float,
    get_int,
    get_ints,
    get_string,
    input_at,
    is_sync_batch_norm,
    label,
    only_attributes,
    required_input,
)
from bnexport.graph.scopes import GraphContext, new_constant, scopes
from bnexport.graph.surgery import Surgery
from bnexport.model_io import walk

_PADDING = ("zeros", "border", "reflection")
_MODES = ("bilinear", "nearest", "bicubic")
_MODES_20 = ("linear", "nearest", "cubic")


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """One operator. reason: why it stays, None where it is standard now."""

    name: str
    op_type: str
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where nodes are made: in front of the node that they replace."""

    node: ir.Node
    context: GraphContext

    def add(self, op_type: str, *inputs: ir.Value | None, **attributes: ir.Attr | object) -> ir.Value:
        """Insert a standard node with one output; its first one takes the place of the old node's in the end."""
        graph = self.node.graph
        assert graph is not None
        made = [ir.convenience.convert_attributes({name: value})[0] for name, value in attributes.items()]  # type: ignore[dict-item]
        new = ir.Node("", op_type, inputs, made, name=self.context.names.fresh(f"{label(self.node)}.{op_type}"))
        new.outputs[0].name = self.context.names.fresh(f"{label(self.node)}.{op_type.lower()}")
        graph.insert_before(self.node, new)
        return new.outputs[0]

    def constant(self, value: object, dtype: type) -> ir.Value:
        graph = self.node.graph
        assert graph is not None
        return new_constant(self.context, graph, self.node, np.asarray(value, dtype), f"{label(self.node)}.constant")


def _pair(node: ir.Node, name: str, default: int) -> tuple[int, int]:
    found = get_ints(node, name) or (default, default)
    if len(found) != 2:
        raise Refused("bad-attribute", f"{node.op_type} has {len(found)} values in {name}, expected 2")
    return found[0], found[1]


_CONVOLUTION = ("stride", "padding", "dilation", "groups", "deform_groups")


def _deformable(place: _Place, weight: ir.Value, offset: ir.Value, *rest: ir.Value | None) -> ir.Value:
    node = place.node
    pads = _pair(node, "padding", 0)
    return place.add(
        "DeformConv",
        required_input(node),
        weight,
        offset,
        *rest,
        strides=_pair(node, "stride", 1),
        pads=pads * 2,
        dilations=_pair(node, "dilation", 1),
        group=get_int(node, "groups", 1),
        offset_group=get_int(node, "deform_groups", 1),
    )


def _deform_conv(place: _Place) -> ir.Value:
    node = place.node
    only_attributes(node, (*_CONVOLUTION, "bias", "im2col_step"))
    if get_flag(node, "bias"):
        raise Refused("unknown-attribute", f"{node.op_type} has bias=1, and no input for one")
    return _deformable(place, required_input(node, 2), required_input(node, 1))


def _modulated_deform_conv(place: _Place) -> ir.Value:
    node = place.node
    only_attributes(node, _CONVOLUTION)
    return _deformable(
        place, required_input(node, 3), required_input(node, 1), input_at(node, 4), required_input(node, 2)
    )


def _choice(node: ir.Node, name: str, choices: tuple[str, ...]) -> str:
    number = get_int(node, name, 0)
    if not 0 <= number < len(choices):
        raise Refused("unknown-attribute", f"{node.op_type} has {name}={number}, which is not known here")
    return choices[number]


def _grid_sampler(place: _Place) -> ir.Value:
    node = place.node
    only_attributes(node, ("interpolation_mode", "padding_mode", "align_corners"))
    rank = place.context.rank(required_input(node))
    if rank not in (4, None) and place.context.opset < 20:
        raise Refused("rank", f"{node.op_type} of rank {rank}, which GridSample takes from opset 20 on")
    return place.add(
        "GridSample",
        required_input(node),
        required_input(node, 1),
        mode=_choice(node, "interpolation_mode", _MODES if place.context.opset < 20 else _MODES_20),
        padding_mode=_choice(node, "padding_mode", _PADDING),
        align_corners=int(get_flag(node, "align_corners")),
    )


def _roi_align(place: _Place) -> ir.Value:
    node = place.node
    names = ("output_height", "output_width", "spatial_scale", "sampling_ratio", "mode", "aligned")
    only_attributes(node, names)
    absent = [name for name in names if name not in node.attributes]
    if absent:
        raise Refused("bad-attribute", f"{node.op_type} lacks {absent[0]}, for which MMCV has no default")
    if get_string(node, "mode", "") != "avg":
        raise Refused(
            "unknown-mode", f"{node.op_type} takes the maximum of interpolated values, RoiAlign that of pixels"
        )
    rois = required_input(node, 1)
    number = place.add("Gather", rois, place.constant(0, np.int64), axis=1)
    boxes = place.add("Slice", rois, *(place.constant([each], np.int64) for each in (1, 5, 1)))
    return place.add(
        "RoiAlign",
        required_input(node),
        boxes,
        place.add("Cast", number, to=int(ir.DataType.INT64)),
        mode="avg",
        output_height=get_int(node, "output_height", 1),
        output_width=get_int(node, "output_width", 1),
        sampling_ratio=get_int(node, "sampling_ratio", 0),
        spatial_scale=get_float(node, "spatial_scale", 1.0),
        coordinate_transformation_mode="half_pixel" if get_flag(node, "aligned") else "output_half_pixel",
    )


def _non_max_suppression(place: _Place) -> ir.Value:
    node = place.node
    only_attributes(node, ("iou_threshold", "offset"))
    boxes, offset = required_input(node), get_flag(node, "offset")
    if offset:
        dtype = place.context.dtype(boxes) or ir.DataType.FLOAT
        boxes = place.add("Add", boxes, place.constant([0, 0, 1, 1], dtype.numpy().type))
    front, both = place.constant([0], np.int64), place.constant([0, 1], np.int64)
    kept = place.add(
        "NonMaxSuppression",
        place.add("Unsqueeze", boxes, front),
        place.add("Unsqueeze", required_input(node, 1), both),
        place.constant(np.iinfo(np.int32).max, np.int64),
        place.constant(get_float(node, "iou_threshold", 0.0), np.float32),
    )
    return place.add("Gather", kept, place.constant(2, np.int64), axis=1)


def _corner_pool(place: _Place) -> ir.Value:
    node = place.node
    only_attributes(node, ("mode",))
    mode = get_int(node, "mode", -1)
    if not 0 <= mode < 4:
        raise Refused("unknown-attribute", f"{node.op_type} has mode={mode}, expected 0 (top) to 3 (right)")
    axis = 2 + mode // 2
    size = place.context.size(required_input(node), axis)
    if size is None:
        raise Refused("shape", f"{node.op_type} pools over axis {axis}, whose size is not known")
    kernel, before, after = [1, 1], [0, 0], [0, 0]
    kernel[axis - 2] = size
    # From here to the end for top and left, from the start to here for bottom and right.
    (before if mode % 2 else after)[axis - 2] = size - 1
    return place.add("MaxPool", required_input(node), kernel_shape=kernel, pads=before + after, strides=[1, 1])


# The opset that a standard form needs, and how it is made.
_FORMS: dict[str, tuple[int, Callable[[_Place], ir.Value]]] = {
    "MMCVModulatedDeformConv2d": (19, _modulated_deform_conv),
    "MMCVDeformConv2d": (19, _deform_conv),
    "grid_sampler": (16, _grid_sampler),
    "MMCVRoiAlign": (16, _roi_align),
    "NonMaxSuppression": (13, _non_max_suppression),
    "MMCVCornerPool": (13, _corner_pool),
}


def has_foreign(model: ir.Model) -> bool:
    """Whether the model has operators of MMCV or MMDeploy; not sync batch norm, which has its own conversion."""
    return any(map(_is_foreign, walk.nodes(model)))


def _is_foreign(node: ir.Node) -> bool:
    return node.domain in schema.MMCV_DOMAINS and not is_sync_batch_norm(node)


def standardise(model: ir.Model) -> tuple[Rewrite, ...]:
    """Replace the operators in place, and raise the opset where their standard forms need it; return what was done, and what
    stays.
    """
    foreign = [node for node in walk.nodes(model) if _is_foreign(node)]
    if not foreign:
        return ()
    needed = max((_FORMS[node.op_type][0] for node in foreign if node.op_type in _FORMS), default=0)
    refusal = ""
    if model.graph.opset_imports.get("", needed) < needed:
        try:
            raise_opset(model, needed)
        except Refused as reason:
            refusal = f"; {reason.text}"
    found, surgery = [], Surgery()
    for scope in scopes(model, surgery, GraphContext):
        for graph in scope.graphs:
            for node in [node for node in graph if _is_foreign(node)]:
                name, text = label(node), None
                try:
                    _replace(node, scope.context, surgery)
                except Refused as reason:
                    text = reason.text + (refusal if reason.code == "opset" else "")
                found.append(Rewrite(name, node.op_type, text))
    surgery.sweep()
    for domain in schema.MMCV_DOMAINS:
        if not any(node.domain == domain for node in walk.nodes(model)):
            model.graph.opset_imports.pop(domain, None)
    return tuple(found)


def words_for(rewrites: Sequence[Rewrite], opset: int | None, model: ir.Model) -> tuple[str, ...]:
    """Return what a report notes of them: how many became standard, by kind, the model's new opset, and each that stays
    with its reason.
    """
    made = collections.Counter(each.op_type for each in rewrites if each.reason is None)
    listed = ", ".join(f"{count} {op_type}" for op_type, count in made.items())
    notes = [f"operators of MMCV that became standard ones: {listed}"] if made else []
    if opset != (new := model.graph.opset_imports.get("")):
        notes.append(f"the opset is {new} instead of {opset}, which they need")
    return (*notes, *(f"{each.name} stays: {each.reason}" for each in rewrites if each.reason is not None))


# Bytes from which a tensor is no constant that a conversion of versions reads.
_WEIGHT = 1 << 12


def raise_opset(model: ir.Model, opset: int) -> None:
    """Convert the model in place to a newer opset, by onnx's own converter. Raises Refused."""
    if model.functions:
        raise Refused(
            "opset", "onnx.version_converter converts no model with functions (`bnexport inline` replaces them)"
        )
    import onnx.version_converter

    light, weights, inputs = model.clone(), {}, len(model.graph.inputs)
    for name, value in list(light.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and tensor.nbytes > _WEIGHT:
            weights[name] = tensor
            del light.graph.initializers[name]
            if not value.is_graph_input():
                light.graph.inputs.append(value)
    try:
        converted = ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(light), opset))
    except Exception as error:  # whatever its adapters raise
        raise Refused("opset", f"onnx.version_converter does not reach it: {first_line(error)}") from error
    graph = converted.graph
    for value in graph.inputs[:]:
        if str(value.name) in weights:
            value.const_value = weights[str(value.name)]
            graph.initializers[str(value.name)] = value
    graph.inputs[:] = graph.inputs[:inputs]
    notes = {node.name: node.metadata_props for node in model.graph}
    for node in graph:
        node.metadata_props.update(notes.get(node.name, {}) if node.name else {})
    graph.metadata_props.update(model.graph.metadata_props)
    model.graph = graph
    lowest = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])
    model.ir_version = max(model.ir_version or 0, lowest)


def _replace(node: ir.Node, context: GraphContext, surgery: Surgery) -> None:
    if node.op_type not in _FORMS:
        raise Refused("no-rule", f"no standard operator computes {node.op_type}")
    opset, form = _FORMS[node.op_type]
    dtype = context.dtype(required_input(node))
    if dtype is not None and not dtype.is_floating_point():
        raise Refused("type", f"{node.op_type} of {dtype.name} values")
    if context.opset < opset:
        raise Refused(
            "opset", f"the standard form of {node.op_type} needs opset {opset}, the model has {context.opset}"
        )
    if len(node.outputs) != 1:
        raise Refused("bad-node", f"{node.op_type} has {len(node.outputs)} outputs, expected 1")
    new, old = form(_Place(node, context)), node.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    producer = new.producer()
    assert producer is not None
    producer.name = node.name
    producer.metadata_props.update(node.metadata_props)
    surgery.replace(old, new)
    surgery.remove(node)
