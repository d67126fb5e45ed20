"""Each network of the corpus is right at every size that its file declares, and declares what it can."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch

import bnexport
from bnexport.errors import UnsupportedModelError
from tests.exporting.size_corpus import CASES, Net

EXAMPLE = (4, 3, 8, 8)
BATCHES = [(n, 3, 8, 8) for n in (1, 2, 3, 5, 7, 9, 16)]
IMAGES = [
    (n, 3, *size) for n in (1, 4) for size in ((5, 6), (7, 7), (8, 16), (9, 13), (12, 8), (15, 8), (31, 33), (64, 48))
]


@pytest.mark.parametrize("exporter", [pytest.param("dynamo", marks=pytest.mark.slow), "torchscript"])
@pytest.mark.parametrize("name", CASES)
def test_every_declared_size(name, exporter, tmp_path):
    case = CASES[name]
    torch.manual_seed(0)
    model = Net(case.function).eval()
    arguments = (model, torch.randn(EXAMPLE), tmp_path / "m.onnx")
    if exporter in case.refused:
        with pytest.raises(UnsupportedModelError):
            bnexport.export(*arguments, exporter=exporter)
        return
    result = bnexport.export(*arguments, exporter=exporter)
    assert result.verification.passed
    session = onnxruntime.InferenceSession(result.path)
    (declared,) = session.get_inputs()
    fixed, word = case.fixed.get(exporter, (frozenset(), ""))
    assert {index for index in (0, 2, 3) if isinstance(declared.shape[index], int)} == fixed, result.notes
    assert len(result.notes) == len(fixed)
    assert all(word in note for note in result.notes)
    compared = 0
    for shape in [EXAMPLE, *BATCHES, *IMAGES]:
        if any(shape[index] != EXAMPLE[index] for index in fixed):
            continue
        x = torch.randn(shape)
        try:
            expected = model(x).detach()
        except (RuntimeError, ValueError):
            continue  # a size that the model itself does not take
        (got,) = session.run(None, {declared.name: x.numpy()})
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4, err_msg=str(shape))
        compared += 1
    assert compared > len(BATCHES) // 3
