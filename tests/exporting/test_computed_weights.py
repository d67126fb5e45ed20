"""Weights that are computed from parameters alone: evaluated, so that the batch norm behind them folds."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bnexport
from bnexport.exporting import finish
from tests.folding.module.nets import trained


class BatchNormStandardised(nn.Conv2d):
    """Standardises its weight with a batch norm in training mode, with a gain for each output."""

    def __init__(self, *arguments, gain: bool = False) -> None:
        super().__init__(*arguments)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5) if gain else None

    def forward(self, input):
        gain = None if self.gain is None else (self.gain * 0.5).view(-1)
        rows = self.weight.reshape(1, self.out_channels, -1)
        rows = F.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0, eps=1e-6)
        return self._conv_forward(input, rows.reshape_as(self.weight), self.bias)


class Standardised(nn.Conv2d):
    """Standardises its weight by arithmetic."""

    def forward(self, input):
        std, mean = torch.std_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        return self._conv_forward(input, (self.weight - mean) / (std + 1e-5), self.bias)


CONVOLUTIONS = {
    "batch norm": BatchNormStandardised,
    "batch norm with gain": lambda *sizes: BatchNormStandardised(*sizes, gain=True),
    "arithmetic": Standardised,
}


# The gain takes the way of the plain batch norm and one step more.
CASES = [
    ("batch norm with gain", "dynamo"),
    *((kind, "torchscript") for kind in CONVOLUTIONS),
    *(pytest.param(kind, "dynamo", marks=pytest.mark.slow) for kind in ("batch norm", "arithmetic")),
]


@pytest.mark.parametrize(("kind", "exporter"), CASES)
def test_standardised_convolutions_fold(kind, exporter, tmp_path):
    """32 * 32 * 9 weights: more than the exporters' optimiser evaluates."""
    conv = CONVOLUTIONS[kind]
    net = trained(nn.Sequential(conv(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), conv(32, 32, 3), nn.BatchNorm2d(32)))
    result = bnexport.export(net, torch.randn(2, 3, 8, 8), tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.passed
    assert [node.op_type for node in result.model.graph] == ["Conv", "Relu", "Conv"]
    assert not result.report.kept
    assert {value.const_value.size for value in result.model.graph.initializers.values()} == {864, 9216, 32}


class OnData(nn.Module):
    """Normalises its input, too, as no exported graph would."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = BatchNormStandardised(3, 4, 1)

    def forward(self, input):
        return F.batch_norm(self.conv(input), None, None, training=True)


def test_batch_statistics_of_data_are_exported(tmp_path):
    result = bnexport.export(OnData().eval(), torch.randn(2, 3, 4, 4), tmp_path / "m.onnx")
    assert result.verification.status == "passed"


class Scaled(nn.Module):
    """Multiplies by a number computed from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, input):
        return input.mean() * self.weight.square().sum().sqrt()


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_computed_number_stays_without_dimensions(exporter, tmp_path):
    result = bnexport.export(Scaled().eval(), torch.randn(2, 3), tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.passed
    assert [value.shape for value in result.model.graph.initializers.values()] == [()]
    assert result.model.graph.outputs[0].shape == ()


def evaluated(text: str) -> list[str]:
    """Kinds of the nodes that are left."""
    model = ir.from_onnx_text(text)
    finish.evaluate(model)
    used = {value for node in model.graph for value in node.inputs} | set(model.graph.outputs)
    return [node.op_type for node in model.graph if used & set(node.outputs)]


HEAD = (
    '<ir_version: 8, opset_import: ["" : 18]>\ngraph (float[N, 3] x) => (float y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> '
)


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ("{ a = ReduceMax (w) y = Mul (x, a) }", ["Mul"]),
        ("{ a = Neg (w) y = Gemm (x, a) }", ["Neg", "Gemm"]),
        ("{ a = RandomNormalLike (w) y = Gemm (x, a) }", ["RandomNormalLike", "Gemm"]),
        ("{ r = Constant <value_ints = [2, 2]> () a = Tile (w, r) y = Gemm (x, a) }", ["Constant", "Tile", "Gemm"]),
        ("{ a = ReduceMax (x) y = Mul (x, a) }", ["ReduceMax", "Mul"]),
        (
            "{ k = Constant <value_ints = [1, 2]> () s = SplitToSequence <axis = 1> (w, k)"
            " i = Constant <value_int = 1> () a = SequenceAt (s, i) y = Gemm (x, a) }",
            ["Constant", "SplitToSequence", "Constant", "SequenceAt", "Gemm"],
        ),
    ],
    ids=["evaluated", "left to the folder", "random", "larger than its source", "of data", "sequence"],
)
def test_what_is_evaluated(nodes, left):
    assert evaluated(HEAD + nodes) == left
