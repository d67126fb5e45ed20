"""Every network of models/ as TorchScript and pt2, in a process without bnexport."""

from __future__ import annotations

import pytest
import torch

import bnexport
from tests.training.networks import NETWORKS

# Norms whose input several layers share through a concatenation stay.
KEPT = {"densenet": 6}


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["torchscript", "pt2"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network(name, file_format, tmp_path):
    network = NETWORKS[name]
    model = network.model()
    with torch.no_grad():
        for seed in range(3):
            model(network.batch(8, seed)[0] * 1.5 + 0.5)  # statistics that are not 0 and 1
    result = bnexport.export(model.eval(), network.batch(4)[0], tmp_path / "m.pt", format=file_format)
    assert result.verification.passed
    assert max(output.max_abs_diff for output in result.verification.outputs) <= 1e-5
    left = result.report.after.batch_norm + result.report.after.sync_batch_norm
    assert left == KEPT.get(name, 0)
