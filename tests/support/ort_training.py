"""The gradient operator in ONNX Runtime's training build (onnxruntime-training 1.19.2 is the last one).

The training build makes a gradient graph from registered definitions. One call of `register_gradient`
before `onnxruntime.training.artifacts.generate_artifacts(..., custom_op_library=get_library_path())` is
all it needs. The forward nodes must have the outputs saved_mean and saved_invstd.
"""

from __future__ import annotations

from bnexport import schema
from bnexport.errors import MissingDependencyError, UsageError

__all__ = ["register_gradient"]


def register_gradient(
    *,
    group: str = "",
    group_size: int = 1,
    stats_mode: str = "exact",
    grad_reduction: str = "local",
    domain: str = schema.DOMAIN,
) -> None:
    """Register MMCVSyncBatchNormGrad as the gradient of MMCVSyncBatchNorm, for this process.

    A definition holds attribute values, not references to the forward node's, so all training nodes of
    a process share those given here; give the values that the model's nodes have. The first
    registration of a process is the one that counts.

    Raises:
        UsageError: a value is not one of the contract's.
        MissingDependencyError: this onnxruntime is not a training build.
    """
    attributes = {
        "group": group,
        "group_size": group_size,
        "training_mode": 1,
        "stats_mode": stats_mode,
        "grad_reduction": grad_reduction,
    }
    for attribute in schema.SYNC_BATCH_NORM_GRAD.attributes:
        if attribute.allowed is not None and attributes[attribute.name] not in attribute.allowed:
            raise UsageError(
                f"register_gradient: {attribute.name}: got {attributes[attribute.name]!r}, expected one of {attribute.allowed}"
            )
    if domain not in schema.ACCEPTED_DOMAINS:
        raise UsageError(f"register_gradient: domain: got {domain!r}, expected one of {schema.ACCEPTED_DOMAINS}")
    try:
        from onnxruntime.capi._pybind_state import (
            GradientNodeAttributeDefinition,
            GradientNodeDefinition,
            register_gradient_definition,
        )
    except ImportError as error:
        raise MissingDependencyError(
            "this onnxruntime cannot train; install onnxruntime-training-cpu==1.19.2, the last training build"
        ) from error
    import json

    node = GradientNodeDefinition()
    node.op_type = schema.SYNC_BATCH_NORM_GRAD.name
    node.domain = domain
    forward = schema.SYNC_BATCH_NORM
    inputs, outputs = ([value.name for value in values] for values in (forward.inputs, forward.outputs))
    weight = inputs.index("weight")
    # Output k of the gradient belongs to the forward's input k; an output whose input needs no gradient is dropped.
    node.inputs = [
        "GO(0)",
        "I(0)",
        f"I({weight})",
        f"O({outputs.index('saved_mean')})",
        f"O({outputs.index('saved_invstd')})",
    ]
    node.outputs = ["GI(0)", "", "", f"GI({weight})", f"GI({inputs.index('bias')})"]
    definitions = []
    for name, value in attributes.items():
        definition = GradientNodeAttributeDefinition()
        definition.name, definition.value_json, definition.is_tensor = name, json.dumps(value), False
        definition.dtype = "string" if isinstance(value, str) else "int"
        definitions.append(definition)
    node.attributes = definitions
    register_gradient_definition(f"{domain}::{forward.name}", [node])
