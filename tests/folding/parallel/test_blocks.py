"""Whole networks of parallel branches: no batch norm and one convolution a block are left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import bnexport
from models import branches
from models.branches import BranchNet, randomise_statistics
from tests.support.onnx_text import operators

STAGES = ((12, 2),)  # a block that changes size and channels, and one that keeps them
# Blocks, and convolutions that are left: the stem, and those of the blocks.
NETS = {
    "repvgg": (branches.repvgg_block, 1 + 2),
    "mobileone": (branches.mobileone_block, 1 + 4),
    "acnet": (branches.asymmetric_block, 1 + 2),
    "diverse": (branches.diverse_block, 1 + 2),
}


def network(name: str) -> BranchNet:
    torch.manual_seed(0)
    net = BranchNet(NETS[name][0], 8, STAGES, classes=5).eval()
    randomise_statistics(net)
    return net


@pytest.mark.parametrize("name", NETS)
def test_a_deploy_export_merges_the_branches(name: str, tmp_path: Path) -> None:
    net, x = network(name), torch.randn(2, 3, 16, 16)
    # The numbers are compared below; a proof for the certificate would take most of the time.
    options = {"exporter": "torchscript", "verify": False, "certificate": False}
    result = bnexport.export(net, x, tmp_path / "m.onnx", **options)
    left = operators(onnx.load(result.path))
    assert left.count("Conv") == NETS[name][1]
    assert not {"BatchNormalization", "Add", "AveragePool", "Pad"}.intersection(left)
    for size in (16, 23):
        x = torch.randn(1, 3, size, size)
        session = onnxruntime.InferenceSession(result.path)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(got, net(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    summaries = [site.summary for site in result.report.sites]
    assert len(summaries) == NETS[name][1] and all(summaries)


def test_sync_batch_norms(tmp_path: Path) -> None:
    """Kept as nodes in a custom-op file, which the fold then merges."""
    net = bnexport.convert_sync_batchnorm(network("repvgg"))
    path = tmp_path / "m.onnx"
    bnexport.export(net, torch.randn(2, 3, 16, 16), path, mode="custom_op", exporter="torchscript", verify=False)
    report = bnexport.fold(path, tmp_path / "f.onnx").report
    assert report.verification is not None and report.verification.passed
    assert (report.after.batch_norm, report.after.sync_batch_norm) == (0, 0)
    assert {site.op_type for site in report.sites} == {"MMCVSyncBatchNorm"}
