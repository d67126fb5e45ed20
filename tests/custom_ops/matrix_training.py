"""ONNX Runtime's training build: our gradient, registered by one call, trains; see matrix.py.

conv -> sync batch norm -> reduce -> linear, mean squared loss. generate_artifacts makes the training
graph with MMCVSyncBatchNormGrad in it. The gradients of the first step are compared with torch's, and
a few steps of AdamW must lower the loss.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import torch
from onnx import numpy_helper
from onnxruntime.training import api, artifacts

from bnexport import schema
from bnexport.native.library import get_library_path

STEPS = 6
TRAINED = ("conv_weight", "bn_weight", "bn_bias", "linear_weight", "linear_bias")


# The artifact builder infers shapes with onnx, which does not know our node.
MODEL = """
<ir_version: 8, opset_import: ["": 17, "mmcv": 1]>
net (float[N,3,8,8] x) => (float[N,2] y) <float[N,4,8,8] n, float[4] new_mean, float[4] new_var, float[4] m, float[4] i> {
    h = Conv <pads = [1, 1, 1, 1]> (x, conv_weight)
    n, new_mean, new_var, m, i = mmcv.MMCVSyncBatchNorm <training_mode = 1> (h, bn_mean, bn_var, bn_weight, bn_bias)
    a = Relu (n)
    p = ReduceMean <axes = [2, 3], keepdims = 0> (a)
    y = Gemm <transB = 1> (p, linear_weight, linear_bias)
}
"""


def make_model(values: dict[str, np.ndarray]) -> onnx.ModelProto:
    model = onnx.parser.parse_model(MODEL)
    for node in model.graph.node:
        node.name = node.op_type
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    return model


def register_gradient() -> None:
    """Register MMCVSyncBatchNormGrad as the gradient of MMCVSyncBatchNorm; the training build makes its graph from that."""
    from onnxruntime.capi import _pybind_state as state

    node, forward = state.GradientNodeDefinition(), schema.SYNC_BATCH_NORM
    node.op_type, node.domain = schema.SYNC_BATCH_NORM_GRAD.name, schema.DOMAIN
    inputs, outputs = ([value.name for value in values] for values in (forward.inputs, forward.outputs))
    weight, bias = inputs.index("weight"), inputs.index("bias")
    mean, invstd = (outputs.index(name) for name in ("saved_mean", "saved_invstd"))
    # Output k of the gradient belongs to the forward's input k; an output whose input needs no gradient is dropped.
    node.inputs = ["GO(0)", "I(0)", f"I({weight})", f"O({mean})", f"O({invstd})"]
    node.outputs = ["GI(0)", "", "", f"GI({weight})", f"GI({bias})"]
    definition = state.GradientNodeAttributeDefinition()
    definition.name, definition.value_json, definition.is_tensor, definition.dtype = "training_mode", "1", False, "int"
    node.attributes = [definition]
    state.register_gradient_definition(f"{schema.DOMAIN}::{forward.name}", [node])


def torch_gradients(values, x, target):
    tensors = {name: torch.tensor(value.tolist(), requires_grad=name in TRAINED) for name, value in values.items()}
    hidden = torch.nn.functional.conv2d(torch.tensor(x.tolist()), tensors["conv_weight"], padding=1)
    hidden = torch.nn.functional.batch_norm(
        hidden, tensors["bn_mean"], tensors["bn_var"], tensors["bn_weight"], tensors["bn_bias"], training=True
    )
    y = torch.nn.functional.linear(hidden.relu().mean((2, 3)), tensors["linear_weight"], tensors["linear_bias"])
    loss = torch.nn.functional.mse_loss(y, torch.tensor(target.tolist()))
    loss.backward()
    return float(loss.detach()), {name: np.array(tensors[name].grad.tolist(), np.float32) for name in TRAINED}


def main() -> None:
    rng = np.random.default_rng(0)
    values = {
        "conv_weight": rng.normal(size=(4, 3, 3, 3)), "bn_mean": np.zeros(4), "bn_var": np.ones(4), "bn_weight": rng.normal(size=4),
        "bn_bias": rng.normal(size=4), "linear_weight": rng.normal(size=(2, 4)), "linear_bias": rng.normal(size=2),
    }  # fmt: skip
    values = {name: value.astype(np.float32) for name, value in values.items()}
    x, target = rng.normal(size=(5, 3, 8, 8)).astype(np.float32), rng.normal(size=(5, 2)).astype(np.float32)
    register_gradient()
    with tempfile.TemporaryDirectory() as folder:
        artifacts.generate_artifacts(
            make_model(values),
            requires_grad=list(TRAINED),
            frozen_params=["bn_mean", "bn_var"],
            loss=artifacts.LossType.MSELoss,
            optimizer=artifacts.OptimType.AdamW,
            artifact_directory=folder,
            custom_op_library=get_library_path(),
        )
        nodes = [node.op_type for node in onnx.load(str(Path(folder) / "training_model.onnx")).graph.node]
        assert nodes.count("MMCVSyncBatchNormGrad") == 1, nodes
        state = api.CheckpointState.load_checkpoint(str(Path(folder) / "checkpoint"))
        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(get_library_path())
        module = api.Module(str(Path(folder) / "training_model.onnx"), state, session_options=options)
        optimizer = api.Optimizer(str(Path(folder) / "optimizer_model.onnx"), module)
        optimizer.set_learning_rate(0.02)
        module.train()
        losses, worst = [], 0.0
        for step in range(STEPS):
            losses.append(float(module(x, target)))
            if step == 0:
                expected_loss, expected = torch_gradients(values, x, target)
                assert abs(losses[0] - expected_loss) < 1e-5, (losses[0], expected_loss)
                for name in TRAINED:
                    difference = np.abs(state.parameters[name].grad - expected[name]).max()
                    worst = max(worst, float(difference))
                    assert difference < 1e-5, (name, difference)
            optimizer.step()
            module.lazy_reset_grad()
        assert losses[-1] < losses[0], losses
    print(
        f"onnxruntime {onnxruntime.__version__} training: {STEPS} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
        f"gradients within {worst:.1e} of torch's"
    )


if __name__ == "__main__":
    sys.exit(main())
