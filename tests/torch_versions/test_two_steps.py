"""The lines of docs/guides/two_steps.md: here, and (slow) in an environment that bnexport cannot be installed in."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import bnexport

GUIDE = Path(__file__).parents[2] / "docs/guides/two_steps.md"
MODEL = """
import numpy, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.SyncBatchNorm(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.SyncBatchNorm(4))
for layer in (model[1], model[4]):
    nn.init.uniform_(layer.running_mean)
    nn.init.uniform_(layer.running_var, 0.5, 2)
    nn.init.normal_(layer.weight)
example = torch.randn(2, 3, 8, 8)
"""
EXPECTED = """
with torch.no_grad():
    numpy.savez("expected.npz", x=example.numpy(), y=model(example).numpy())
"""


def lines() -> str:
    found = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def check(python: str | Path, folder: Path, more: str = "") -> None:
    subprocess.run([python, "-c", MODEL + more + lines() + EXPECTED], cwd=folder, check=True)
    report = bnexport.fold(folder / "unfolded.onnx", folder / "deploy.onnx").report
    assert (report.before.batch_norm, report.after.batch_norm) == (2, 0)
    assert report.verification.status == "passed"
    data = np.load(folder / "expected.npz")
    got = onnxruntime.InferenceSession(str(folder / "deploy.onnx")).run(None, {"x": data["x"]})
    np.testing.assert_allclose(got[0], data["y"], rtol=1e-4, atol=1e-5)


def test_here(tmp_path: Path) -> None:
    # The exporter with these arguments is TorchScript's; a newer torch takes another one by default.
    older = "import functools\ntorch.onnx.export = functools.partial(torch.onnx.export, dynamo=False)\n"
    check(sys.executable, tmp_path, older)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("python3.8") is None, reason="needs Python 3.8")
def test_in_torch_1_13_on_python_3_8(tmp_path: Path) -> None:
    subprocess.run(["python3.8", "-m", "venv", tmp_path / "old"], check=True)
    python = tmp_path / "old/bin/python"
    # torch's CUDA libraries are not needed: its wheel imports without them where they are not asked for.
    install = [python, "-m", "pip", "install", "-q", "torch==1.13.1", "numpy<2", "onnx<1.15"]
    subprocess.run(install, check=True)
    check(python, tmp_path)
