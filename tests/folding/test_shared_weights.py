"""A head that runs on several levels: weights that are shared stay shared where their results are equal."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bnexport.folding import fold
from tests.support.onnx_text import batch_norms, model, run

LEVELS, DEPTH, CHANNELS = 5, 2, 4


def head(*, norms: str, kind: str = "Conv", biased: bool = False) -> onnx.ModelProto:
    """A tower of `kind` and batch norm on each level; norms: "shared" or "separate"."""
    nodes, inputs, outputs = [], [], []
    for level in range(LEVELS):
        value = f"x{level}"
        for depth in range(DEPTH):
            norm = f"p{depth}" if norms == "shared" else f"p{depth}_{level}"
            weight = f"w{depth}:{CHANNELS}.{CHANNELS}{'.3.3' * (kind == 'Conv')}{f', b{depth}:{CHANNELS}' * biased}"
            made = f"{level}_{depth}"
            nodes.append(
                f"c{made} = {kind} ({value}, {weight}) n{made} = Norm (c{made}, {norm}:{CHANNELS}) r{made} = Relu (n{made})"
            )
            value = f"r{made}"
        nodes.append(f"y{level} = Neg ({value})")
        inputs.append(f"float[N,{CHANNELS}{f',S{level},S{level}' * (kind == 'Conv')}] x{level}")
        outputs.append(f"float[] y{level}")
    return model(f"g ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {' '.join(nodes)} }}")


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("kind", ["Conv", "Gemm"])
@pytest.mark.parametrize("norms", ["shared", "separate"])
def test_a_head_on_levels(norms: str, kind: str, biased: bool) -> None:
    source = head(norms=norms, kind=kind, biased=biased)
    result = fold(source)
    assert batch_norms(result.model) == 0
    assert result.report.verification.passed
    copies = DEPTH if norms == "shared" else DEPTH * LEVELS
    weight = CHANNELS * CHANNELS * (9 if kind == "Conv" else 1)
    tensors = result.model.graph.initializer
    assert len(tensors) == 2 * copies
    assert result.report.after.parameter_bytes == 4 * copies * (weight + CHANNELS)
    size = (2, CHANNELS) if kind == "Gemm" else (2, CHANNELS, 5, 5)
    feeds = {f"x{level}": np.random.default_rng(level).standard_normal(size, np.float32) for level in range(LEVELS)}
    for want, got in zip(run(source, feeds), run(result.model, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_level_with_a_norm_of_its_own_has_weights_of_its_own() -> None:
    """Four levels share the result; what another node reads keeps its weight."""
    source = head(norms="shared")
    for node in source.graph.node:
        if node.op_type == "BatchNormalization" and node.output[0].startswith("n4_"):
            node.input[1] = node.input[2]
    source.graph.node.append(onnx.helper.make_node("Identity", ["w0"], ["plain"]))
    source.graph.output.append(onnx.helper.make_tensor_value_info("plain", onnx.TensorProto.FLOAT, None))
    result = fold(source)
    assert result.report.verification.passed
    assert batch_norms(result.model) == 0
    assert len(result.model.graph.initializer) == 1 + 2 * (2 * DEPTH)
