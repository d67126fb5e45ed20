"""Checkpoints, exports and initial states appear whole or not at all: kill -9 at any moment, a full disk."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from bnexport.training.state import load_state, save_state
from tests.support import warm

ROOT = Path(__file__).parents[2]
_KILLS = int(os.environ.get("BNEXPORT_KILLS", "8"))

# Writes checkpoints over and over, each full of its own number.
LOOP = """
import sys
import numpy as np
from bnexport.training.state import save_state
for turn in range(10**9):
    save_state({name: np.full((64, 4096), turn, np.float32) for name in "abcd"}, sys.argv[1])
    if not turn:
        print("ready", flush=True)
"""
# What a process of its own writes once, under a limit on the size of files.
CHECKPOINT = """
import sys
import numpy as np
from bnexport.training.state import save_state
save_state({"a": np.zeros((64, 4096), np.float32)}, sys.argv[1])
"""
EXPORT = """
import sys
import torch, bnexport
model = torch.nn.Sequential(torch.nn.Conv2d(3, 256, 3), bnexport.SyncBatchNorm(256), torch.nn.Conv2d(256, 64, 1)).eval()
bnexport.export(model, torch.zeros(1, 3, 8, 8), sys.argv[1], mode=sys.argv[2], verify=False, exporter="torchscript", overwrite=True)
"""
STEP = """
import sys
import torch, bnexport
model = torch.nn.Sequential(torch.nn.Linear(256, 300), torch.nn.Linear(300, 4)).train()
batch = (torch.zeros(4, 256), torch.zeros(4, dtype=torch.int64))
bnexport.export_training_step(model, torch.nn.functional.cross_entropy, batch, sys.argv[1], verify=False, overwrite=True)
"""
REPORT = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
from bnexport.errors import BnexportError
try:
    exec(sys.argv.pop(1))
except BnexportError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def test_killed_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    target, generator = tmp_path / "c.safetensors", random.Random(5)
    for _ in range(_KILLS):
        process = warm.start("-c", LOOP, target, stdout=subprocess.PIPE, cwd=ROOT)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(generator.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        state = load_state(target)
        assert sorted(state) == list("abcd")
        last = float(state["a"][0, 0])
        assert all((array == last).all() for array in state.values())
    save_state({"a": np.ones(3, np.float32)}, target)
    assert os.listdir(tmp_path) == ["c.safetensors"]


CASES = {
    "checkpoint": (CHECKPOINT, []),
    "export": (EXPORT, ["deploy"]),
    "export-custom-op": (EXPORT, ["custom_op"]),
    "training-step": (STEP, []),
}


@pytest.mark.parametrize("name", CASES)
def test_full_disk(name: str, tmp_path: Path) -> None:
    """A limit on the size of files acts as a disk that is full in the middle of the weights."""
    code, more = CASES[name]
    target = tmp_path / "out.onnx"
    target.write_bytes(b"an older file")
    done = warm.run("-c", REPORT, code, target, *more, cwd=ROOT)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("StorageError: cannot write"), done.stderr
    assert "nothing was changed" in last
    assert target.read_bytes() == b"an older file"
    assert os.listdir(tmp_path) == ["out.onnx"]
