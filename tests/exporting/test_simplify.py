"""Deploy files without shape arithmetic: few nodes, computed weights evaluated, the same outputs, and no batch norm that the
folder refused.
"""

from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bnexport
from bnexport.exporting import finish
from bnexport.graph.simplify import simplify
from bnexport.model_io import load
from bnexport.verification.certificate import KEY
from tests.folding.module.nets import trained
from tests.support import onnx_text
from tests.support.modules import compose


def ghost():
    """A classifier with what leaves shape arithmetic behind: a flatten, a slice of channels that takes all, a sum in place."""

    def forward(self, x):
        first = self.norm(self.conv(x)).relu()
        y = torch.cat([first, self.cheap(first)], 1)[:, :8, :, :]
        y += torch.cat([first, first], 1)
        return self.classify(self.pool(y).flatten(1))

    convolutions = {"conv": nn.Conv2d(3, 4, 3, padding=1), "cheap": nn.Conv2d(4, 4, 3, padding=1, groups=4)}
    rest = {"norm": nn.SyncBatchNorm(4), "pool": nn.AdaptiveAvgPool2d(1), "classify": nn.Linear(8, 5)}
    return compose(forward, **convolutions, **rest).eval()


def operators(result: bnexport.ExportResult) -> list[str]:
    return [node.op_type for node in result.model.graph]


def test_a_deploy_file_holds_what_computes(tmp_path: Path) -> None:
    model, x = ghost(), torch.randn(2, 3, 8, 8)
    lean = bnexport.export(model, x, tmp_path / "lean.onnx")
    assert operators(lean) == [*("Conv", "Relu", "Conv", "Concat", "Concat", "Add", "ReduceMean", "Reshape", "Gemm")]
    assert lean.verification and len(lean.verification.sizes) > 2
    assert lean.report.after.nodes == 9
    assert lean.report.before.sync_batch_norm == 1
    whole = bnexport.export(model, x, tmp_path / "whole.onnx", simplify=False, verify=False)
    assert len(operators(whole)) > 15


def test_the_certificate_stays_where_it_proves_the_folds(tmp_path: Path) -> None:
    """The original is the export without folding."""
    x = torch.randn(2, 3, 8, 8)
    # Simplification leaves its graph as it is.
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.SyncBatchNorm(4), nn.ReLU()).eval()
    bnexport.export(model, x, tmp_path / "original.onnx", fold=False, verify=False)
    made = bnexport.export(model, x, tmp_path / "folded.onnx", verify=False)
    assert made.report.certificate
    assert made.to_dict()["report"]["certificate"]
    verdict = bnexport.verify(tmp_path / "original.onnx", tmp_path / "folded.onnx", method="local")
    assert (verdict.status, verdict.certificate, len(verdict.sites)) == ("passed", "used", 1)
    bare = bnexport.export(model, x, tmp_path / "bare.onnx", verify=False, certificate=False)
    assert not bare.report.certificate
    assert KEY not in bare.model.metadata_props


def test_a_certificate_that_simplification_made_useless_is_dropped(tmp_path: Path) -> None:
    made = bnexport.export(ghost(), torch.randn(2, 3, 8, 8), tmp_path / "lean.onnx", verify=False)
    assert not made.report.certificate
    assert "simplification changed more than the folds" in made.report.uncertified
    assert KEY not in load(tmp_path / "lean.onnx").metadata_props


@pytest.mark.parametrize(
    "text",
    [
        """g (float[N, 1, 4, 4] x) => (float[N, 1, 4, 4] y) { h = Conv (x, w:1.1.1.1) y = Norm (h, p:1) }""",
        """g (float[2] x) => (float[2] y) <float r = {0.5}, bool t = {1}>
            { a = Dropout (x, r, t) b = Dropout (x, r, t) y = Sub (a, b) }""",
    ],
    ids=["a batch norm that the folder keeps", "random draws"],
)
def test_what_stays(text):
    source = onnx_text.model(text)
    model = ir.from_proto(source)
    simplify(model)
    assert [node.op_type for node in model.graph] == onnx_text.operators(source)


def test_equal_outputs_keep_their_names():
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[2] x) => (float[2] a, float[2] b, float[2] c) {
        a = Relu(x) b = Relu(x) c = Relu(x) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    simplify(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert [output.name for output in proto.graph.output] == ["a", "b", "c"]
    assert [node.op_type for node in proto.graph.node].count("Relu") == 1
    x = np.array([-1, 2], np.float32)
    for got in onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x}):
        np.testing.assert_array_equal(got, [0, 2])


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


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_computed_number_stays_without_dimensions(exporter, tmp_path):
    model = compose(
        lambda self, x: x.mean() * self.weight.square().sum().sqrt(), weight=nn.Parameter(torch.randn(4, 3))
    )
    result = bnexport.export(model.eval(), torch.randn(2, 3), tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.passed
    assert [value.shape for value in result.model.graph.initializers.values()] == [()]
    assert result.model.graph.outputs[0].shape == ()


def evaluated(text: str) -> list[str]:
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
