"""Deploy files without shape arithmetic: few nodes, the same outputs, and no batch norm that the folder refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import torch
from torch import nn

import bnexport
from bnexport.graph.simplify import simplify
from bnexport.model_io import load
from bnexport.verification.certificate import KEY


class Ghost(nn.Module):
    """A classifier with what leaves shape arithmetic behind: a flatten, a slice of channels that takes all, a sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.SyncBatchNorm(4)
        self.cheap = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.pool, self.classify = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.norm(self.conv(x)).relu()
        y = torch.cat([first, self.cheap(first)], 1)[:, :8, :, :]
        y += torch.cat([first, first], 1)
        return self.classify(self.pool(y).flatten(1))


def operators(result: bnexport.ExportResult) -> list[str]:
    return [node.op_type for node in result.model.graph]


def test_a_deploy_file_holds_what_computes(tmp_path: Path) -> None:
    model, x = Ghost().eval(), torch.randn(2, 3, 8, 8)
    lean = bnexport.export(model, x, tmp_path / "lean.onnx")
    assert operators(lean) == [*("Conv", "Relu", "Conv", "Concat", "Concat", "Add", "ReduceMean", "Reshape", "Gemm")]
    assert lean.verification and len(lean.verification.sizes) > 2
    assert lean.report.after.nodes == 9
    assert lean.report.before.sync_batch_norm == 1
    whole = bnexport.export(model, x, tmp_path / "whole.onnx", simplify=False, verify=False)
    assert len(operators(whole)) > 15


class Plain(nn.Module):
    """Simplification leaves its graph as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.SyncBatchNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu()


def test_the_certificate_stays_where_it_proves_the_folds(tmp_path: Path) -> None:
    """The original is the export without folding."""
    x = torch.randn(2, 3, 8, 8)
    model = Plain().eval()
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
    made = bnexport.export(Ghost().eval(), torch.randn(2, 3, 8, 8), tmp_path / "lean.onnx", verify=False)
    assert not made.report.certificate
    assert "simplification changed more than the folds" in made.report.uncertified
    assert KEY not in load(tmp_path / "lean.onnx").metadata_props


def test_batch_norms_that_the_folder_keeps_stay() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 8, opset_import: ["" : 18]>
        net (float[N, 1, 4, 4] x) => (float[N, 1, 4, 4] y)
        <float[1, 1, 1, 1] w = {2}, float[1] s = {3}, float[1] b = {1}, float[1] m = {0}, float[1] v = {1}>
        { h = Conv (x, w)
          y = BatchNormalization (h, s, b, m, v) }
    """)
    simplify(model)
    assert [node.op_type for node in model.graph] == ["Conv", "BatchNormalization"]


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


def test_random_draws_are_not_shared():
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[2] x) => (float[2] y)
        <float r = {0.5}, bool t = {1}> { a = Dropout(x, r, t) b = Dropout(x, r, t) y = Sub(a, b) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    simplify(model)
    assert [node.op_type for node in model.graph].count("Dropout") == 2
