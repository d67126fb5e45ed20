"""Models, checkpoints, exports and initial states appear whole or not at all: kill -9 at any moment, a full disk, a full memory."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bnexport.cli.output import write_whole
from bnexport.errors import UsageError
from bnexport.folding import fold
from bnexport.model_io import load, save
from bnexport.model_io.wire import field
from bnexport.training.state import load_state, save_state
from tests.support import warm
from tests.support.onnx_text import batch_norm, model

ROOT = Path(__file__).parents[2]
_KILLS = int(os.environ.get("BNEXPORT_KILLS", "10"))
BODY = "g (float[N,64,H,W] x) => (float[N,{0},A,B] y) {{ z = Conv (x, w:{0}.64.3.3) y = Norm (z, p:{0}) }}"

# Each writes its target over and over, once it has said that it is ready: the same fold, inside and outside in turn, and
# checkpoints that are full of their own number.
FOLDS = """
import os, sys
from bnexport.folding import fold
print(os.getpid(), flush=True)
for turn in range(10**9):
    fold(sys.argv[2], sys.argv[1], verify=False, external_data=bool(turn % 2), overwrite=True)
"""
CHECKPOINTS = """
import os, sys
import numpy as np
from bnexport.training.state import save_state
for turn in range(10**9):
    save_state({name: np.full((64, 4096), turn, np.float32) for name in "abcd"}, sys.argv[1])
    if not turn:
        print(os.getpid(), flush=True)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "source.onnx"
    save(ir.from_proto(model(BODY.format(256))), path)
    return path


@pytest.fixture(scope="module")
def folded(source: Path) -> np.ndarray:
    return fold(source, verify=False).model.graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]


def weight(path: Path) -> np.ndarray:
    return load(path).graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]


def killed(code: str, most: float, *arguments: Path) -> Iterator[None]:
    """Run a program again and again, each time killed after up to `most` seconds."""
    generator = random.Random(3)
    for _ in range(_KILLS):
        process = warm.start("-c", code, *arguments, stdout=subprocess.PIPE, cwd=ROOT)
        assert process.stdout is not None
        program = int(process.stdout.readline())
        time.sleep(generator.uniform(0.0, most))
        os.kill(program, signal.SIGKILL)
        process.communicate()
        yield


def test_killed_at_any_moment(source: Path, folded: np.ndarray, tmp_path: Path) -> None:
    """The target is whole after each kill, and one more run leaves nothing behind."""
    target = tmp_path / "model.onnx"
    for _ in killed(FOLDS, 0.4, target, source):
        if target.exists():
            np.testing.assert_array_equal(weight(target), folded)
    assert target.exists()
    fold(source, target, verify=False, external_data=True, overwrite=True)
    np.testing.assert_array_equal(weight(target), folded)
    tensors = onnx.load(target, load_external_data=False).graph.initializer
    data = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    assert sorted(os.listdir(tmp_path)) == sorted({"model.onnx", *data})


def test_killed_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    target = tmp_path / "c.safetensors"
    for _ in killed(CHECKPOINTS, 0.15, target):
        state = load_state(target)
        assert sorted(state) == list("abcd")
        assert {float(value) for array in state.values() for value in (array.min(), array.max())} == {state["a"][0, 0]}
    save_state({"a": np.ones(3, np.float32)}, target)
    assert os.listdir(tmp_path) == ["c.safetensors"]


@pytest.mark.parametrize("moment", ["data-written", "data-moved", "model-moved"])
def test_killed_between_two_renames(source: Path, folded: np.ndarray, tmp_path: Path, moment: str) -> None:
    """Each moment of a commit, exactly: the old model with its data, or the new one with its own."""
    target = tmp_path / "model.onnx"
    save(load(source), target, external_data=True)
    old = weight(target)
    code = f"""
import os, sys
from bnexport.folding import fold
from bnexport.model_io import staging
moment = {moment!r}
def end(name):
    real = getattr(staging, name)
    def trap(*arguments):
        if moment == "data-written": os.kill(os.getpid(), 9)
        real(*arguments)
        os.kill(os.getpid(), 9)
    setattr(staging, name, trap)
if moment == "model-moved":
    real = os.rename
    def rename(*arguments):
        real(*arguments)
        os.kill(os.getpid(), 9)
    os.rename = rename
else:
    end("_move_new")
fold(sys.argv[1], sys.argv[2], verify=False, external_data=True, overwrite=True)
"""
    run = warm.run("-c", code, source, target)
    assert run.returncode == -signal.SIGKILL
    np.testing.assert_array_equal(weight(target), folded if moment == "model-moved" else old)
    assert len(os.listdir(tmp_path)) > 2
    fold(source, target, verify=False, external_data=True, overwrite=True)
    assert len(os.listdir(tmp_path)) == 2
    np.testing.assert_array_equal(weight(target), folded)


def _limited(limit: int, size: int, source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    def apply() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(limit, (size, size))

    options = ["--no-verify", "--overwrite", "--limit", "elements=64M"]
    command = [sys.executable, "-m", "bnexport", "fold", str(source), str(target), *options]
    return subprocess.run(command, preexec_fn=apply, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("external_data", [False, True])
def test_full_disk(source: Path, tmp_path: Path, external_data: bool) -> None:
    """A limit on the size of files acts as a disk that is full in the middle of the weights."""
    own = tmp_path / "source.onnx"
    save(load(source), own, external_data=external_data)
    target = tmp_path / "out.onnx"
    target.write_bytes(b"an older file")
    before = sorted(os.listdir(tmp_path))
    done = _limited(resource.RLIMIT_FSIZE, 100_000, own, target)
    assert done.returncode == 4
    assert "nothing was changed" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert target.read_bytes() == b"an older file"
    assert sorted(os.listdir(tmp_path)) == before


# What a process of its own writes once, under a limit on the size of files.
CHECKPOINT = """
import numpy as np
from bnexport.training.state import save_state
save_state({"a": np.zeros((64, 4096), np.float32)}, sys.argv[1])
"""
EXPORT = """
import torch, bnexport
model = torch.nn.Sequential(torch.nn.Conv2d(3, 256, 3), bnexport.SyncBatchNorm(256), torch.nn.Conv2d(256, 64, 1)).eval()
bnexport.export(model, torch.zeros(1, 3, 8, 8), sys.argv[1], mode=sys.argv[2], verify=False, exporter="torchscript", overwrite=True)
"""
STEP = """
import torch, bnexport
model = torch.nn.Sequential(torch.nn.Linear(256, 300), torch.nn.Linear(300, 4)).train()
batch = (torch.zeros(4, 256), torch.zeros(4, dtype=torch.int64))
bnexport.export_training_step(model, torch.nn.functional.cross_entropy, batch, sys.argv[1], verify=False, overwrite=True)
"""
LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
from bnexport.errors import BnexportError
try:
    exec(sys.argv.pop(1))
except BnexportError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
CASES = {
    "checkpoint": (CHECKPOINT, []),
    "export": (EXPORT, ["deploy"]),
    "export-custom-op": (EXPORT, ["custom_op"]),
    "training-step": (STEP, []),
}


@pytest.mark.parametrize("name", CASES)
def test_full_disk_in_the_library(name: str, tmp_path: Path) -> None:
    code, more = CASES[name]
    target = tmp_path / "out.onnx"
    target.write_bytes(b"an older file")
    done = warm.run("-c", LIMITED, code, target, *more, cwd=ROOT)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("StorageError: cannot write") and "nothing was changed" in last, done.stderr
    assert target.read_bytes() == b"an older file"
    assert os.listdir(tmp_path) == ["out.onnx"]


def test_full_memory(tmp_path: Path) -> None:
    """A structure that would take 1 GB under a limit of 0.7 GB (RLIMIT_AS): one line, exit code 3, nothing written."""
    graph = field(1, field(5, b"") * 4_000_000)
    (tmp_path / "bomb.onnx").write_bytes(b"\x08\x08" + field(8, b"\x10\x11") + field(7, graph))
    done = _limited(resource.RLIMIT_AS, 700_000_000, tmp_path / "bomb.onnx", tmp_path / "out.onnx")
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (3, 1)
    assert "more memory than there is" in done.stderr
    assert os.listdir(tmp_path) == ["bomb.onnx"]


def test_memory_for_the_graph_only(tmp_path: Path) -> None:
    """A model of 300 MB is folded in 150 MB over the interpreter with its imports."""
    values = {
        "w": np.zeros((64, 64, 135, 136), np.float32),
        **{name: np.ones(64, np.float32) for name in batch_norm("p", 64)},
    }
    onnx.save(model(BODY.format(64), values=values), tmp_path / "large.onnx")
    del values
    path = tmp_path / "large.onnx"
    assert path.stat().st_size > 300_000_000
    code = """
import resource, sys
import bnexport.folding.api
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
report = bnexport.folding.fold(sys.argv[1], sys.argv[2], verify=False, max_scale=10.0).report
assert len(report.folded) == 1
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "out.onnx")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 150_000_000


def test_a_pipe_is_not_replaced(source: Path, tmp_path: Path) -> None:
    """Nor a device: as root, a rename would put a model, or the report of `--json /dev/null`, in the place of /dev/null."""
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="device or pipe"):
        fold(source, pipe, verify=False)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == [pipe.name]
