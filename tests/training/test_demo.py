"""The training demo keeps its promise."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_accuracies_agree(tmp_path):
    """It exits with 1 where the mean accuracies of torch and ONNX Runtime differ by more than half a point."""
    command = [sys.executable, "-m", "models.demo_train", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((tmp_path / "training.json").read_text())
    assert len(runs) == 2 * 2 * 3 and min(run["accuracy"] for run in runs) > 0.9
    assert (tmp_path / "training.png").stat().st_size > 10_000
