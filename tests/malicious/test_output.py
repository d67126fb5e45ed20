"""Outputs appear whole or not at all: kill -9 at any moment, a full disk, a full memory."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
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
from tests.support import warm
from tests.support.onnx_text import batch_norm, model

_KILLS = int(os.environ.get("BNEXPORT_KILLS", "12"))
SHAPES = {"w": (256, 64, 3, 3), **batch_norm("p", 256)}
BODY = (
    "g (float[N,64,H,W] x) => (float[N,256,A,B] y) { z = Conv (x, w)\n y = BatchNormalization (z, p_s, p_b, p_m, p_v) }"
)

# Folds the same model over and over, inside and outside in turn, once it has said that it is ready.
LOOP = """
import sys
from bnexport.cli.output import write_whole
from bnexport.errors import UsageError
from bnexport.folding import fold
print("ready", flush=True)
for turn in range(10**9):
    fold(sys.argv[1], sys.argv[2], verify=False, external_data=bool(turn % 2), overwrite=True)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "source.onnx"
    save(ir.from_proto(model(BODY, SHAPES)), path)
    return path


def weight(path: Path) -> np.ndarray:
    return load(path).graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]


def test_killed_at_any_moment(source: Path, tmp_path: Path) -> None:
    """The target is whole after each kill, and one more run leaves nothing behind."""
    target, generator = tmp_path / "model.onnx", random.Random(3)
    folded = fold(source, verify=False).model.graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]
    for _ in range(_KILLS):
        process = warm.start("-c", LOOP, source, target, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(generator.uniform(0.0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if target.exists():
            np.testing.assert_array_equal(weight(target), folded)
    assert target.exists()
    fold(source, target, verify=False, external_data=True, overwrite=True)
    np.testing.assert_array_equal(weight(target), folded)
    data = {
        entry.value
        for tensor in onnx.load(target, load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert sorted(os.listdir(tmp_path)) == sorted({"model.onnx", *data})


MOMENTS = ["data-written", "data-moved", "model-moved"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_between_two_renames(source: Path, tmp_path: Path, moment: str) -> None:
    """Each moment of a commit, exactly: the old model with its data, or the new one with its own."""
    target = tmp_path / "model.onnx"
    save(load(source), target, external_data=True)
    old = weight(target)
    code = f"""
import os, sys
from bnexport.cli.output import write_whole
from bnexport.errors import UsageError
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
    new = fold(source, verify=False).model.graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]
    np.testing.assert_array_equal(weight(target), new if moment == "model-moved" else old)
    assert len(os.listdir(tmp_path)) > 2
    fold(source, target, verify=False, external_data=True, overwrite=True)
    assert len(os.listdir(tmp_path)) == 2
    np.testing.assert_array_equal(weight(target), new)


def _limited(limit: int, size: int, source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    def apply() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(limit, (size, size))

    return subprocess.run(
        [
            sys.executable,
            "-m",
            "bnexport",
            "fold",
            str(source),
            str(target),
            "--no-verify",
            "--overwrite",
            "--limit",
            "elements=64M",
        ],
        preexec_fn=apply,
        capture_output=True,
        text=True,
        check=False,
    )


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


def test_full_memory(tmp_path: Path) -> None:
    """A structure that would take 1 GB under a limit of 0.7 GB (RLIMIT_AS): one line, exit code 3, nothing written."""
    graph = field(1, field(5, b"") * 4_000_000)
    (tmp_path / "bomb.onnx").write_bytes(b"\x08\x08" + field(8, b"\x10\x11") + field(7, graph))
    done = _limited(resource.RLIMIT_AS, 700_000_000, tmp_path / "bomb.onnx", tmp_path / "out.onnx")
    assert done.returncode == 3
    assert "more memory than there is" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert os.listdir(tmp_path) == ["bomb.onnx"]


def test_memory_for_the_graph_only(tmp_path: Path) -> None:
    """A model of 300 MB is folded in 150 MB over the interpreter with its imports."""
    weights = {
        "w": np.zeros((1, 1, 1, 1), np.float32),
        **{name: np.ones(64, np.float32) for name in batch_norm("p", 64)},
    }
    proto = model(BODY.replace("256", "64").replace("w)", "w)", 1), values=weights)
    tensor = next(tensor for tensor in proto.graph.initializer if tensor.name == "w")
    del tensor.dims[:]
    tensor.dims.extend([64, 64, 135, 136])
    tensor.raw_data = bytes(64 * 64 * 135 * 136 * 4)
    path = tmp_path / "large.onnx"
    path.write_bytes(proto.SerializeToString())
    assert path.stat().st_size > 300_000_000
    del proto, tensor
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
    """Nor a device: as root, a rename would put a model in the place of /dev/null."""
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="device or pipe"):
        fold(source, pipe, verify=False)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == [pipe.name]


def test_a_report_goes_through_a_pipe(tmp_path: Path) -> None:
    """`--json /dev/null` once put a file in the place of the device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == [pipe.name]
