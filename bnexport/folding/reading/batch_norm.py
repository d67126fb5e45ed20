"""BatchNormalization in every opset, read as a ChannelAffine or refused with a reason.

Opset 1 to 8 carry spatial (0: one mean for each position). In newer ones no engine takes it; 1 is what they mean.
`graph.batch_norm` has the modes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.graph.batch_norm import is_training
from bnexport.graph.nodes import get_float, get_int, input_at, only_attributes, used
from bnexport.graph.refusal import Refused

_ATTRIBUTES = {
    1: ("epsilon", "momentum", "is_test", "spatial", "consumed_inputs"),
    6: ("epsilon", "momentum", "is_test", "spatial"),
    7: ("epsilon", "momentum", "spatial"),
    9: ("epsilon", "momentum", "spatial"),
    14: ("epsilon", "momentum", "spatial", "training_mode"),
}

_TRAINS = (
    "it is in training mode: it normalises with the statistics of the batch"
    " (training_to_inference=True, --training-to-inference use the stored ones)"
)

PARAMETERS = (("scale", 1), ("bias", 2), ("mean", 3), ("variance", 4))


def read_batch_norm(node: ir.Node, context: Context) -> ChannelAffine:
    """Return the map of an inference batch norm with constant parameters. Raise Refused otherwise."""
    opset = context.opset
    since = max(version for version in _ATTRIBUTES if version <= opset)
    only_attributes(node, _ATTRIBUTES[since])
    if is_training(node, opset):
        raise Refused("training", _TRAINS)
    if any(used(output) for output in node.outputs[1:]):
        raise Refused("statistics-used", "its statistics outputs are used")
    if get_int(node, "spatial", 1) != 1:
        raise Refused("not-per-channel", _spatial(node, context))
    if len(node.inputs) != 5:
        raise Refused("bad-node", f"it has {len(node.inputs)} inputs, expected 5")
    source = node.inputs[0]
    if source is None:
        raise Refused("bad-node", "it has no input")
    # Inference takes time: it is asked only where the file declares less.
    if source.shape is not None and len(source.shape) < 2 and (context.rank(source) or 2) < 2:
        raise Refused("rank", f"its input has rank {context.rank(source)}: one channel, without an axis of its own")
    gamma, beta, mean, var = (_vector(context.current(node, index, name), name) for name, index in PARAMETERS)
    if len({vector.size for vector in (gamma, beta, mean, var)}) != 1:
        raise Refused("shape", f"its parameters have {gamma.size}, {beta.size}, {mean.size} and {var.size} elements")
    affine = ChannelAffine.from_batch_norm(gamma, beta, mean, var, get_float(node, "epsilon", 1e-5))
    largest = float(np.abs(affine.scale).max(initial=0.0))
    if largest > context.options.max_scale:
        raise Refused(
            "scale", f"gamma / std reaches {largest:.3g}, the bound is {context.options.max_scale:.3g} (max_scale)"
        )
    return affine


def _spatial(node: ir.Node, context: Context) -> str:
    """Return what spatial=0 means with the parameters of a node."""
    if all(context.constants.describe(input_at(node, index), name).ndim == 1 for name, index in PARAMETERS):
        return (
            "spatial=0 asks for a mean for every position, and its parameters have one for every channel: no engine runs"
            " it; MXNet wrote this where it meant channels, and then spatial=1 is right"
        )
    return "spatial=0: it has a mean for every position, not for every channel"


def _vector(array: np.ndarray, what: str) -> np.ndarray:
    if array.ndim != 1:
        raise Refused("shape", f"the {what} has shape {array.shape}, expected one value for each channel")
    return array
