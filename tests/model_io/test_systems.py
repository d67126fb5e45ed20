"""Files and the verifying process on a system without what POSIX alone has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bnexport.model_io import limits

# Modules and names of POSIX. What the standard library needs of them itself is imported before they go.
HIDE = """
import multiprocessing.reduction, os, shutil, signal, socket, subprocess, sys, tempfile, threading
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("fork", "pread", "copy_file_range", "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "O_CLOEXEC", "getuid"):
    delattr(os, name)
for name in ("setitimer", "SIGALRM", "SIGKILL"):
    delattr(signal, name)
for name in ("send_fds", "recv_fds"):
    delattr(socket, name)
os.supports_dir_fd.clear()
shutil._use_fd_functions = False
tempfile._bin_openflags = tempfile._text_openflags = os.O_RDWR | os.O_CREAT | os.O_EXCL
"""
FOLD = """
import bnexport, onnx, os
from bnexport.model_io import limits as systems
from bnexport.verification import process
assert not systems.HANDS_OVER
process._START = HIDE + process._START
report = bnexport.fold("kept.onnx", "folded.onnx", external_data=True).report
assert report.verification.status == "passed", report.verification
bnexport.fold("folded.onnx", "again.onnx")
seen = bnexport.verify("kept.onnx", "folded.onnx")
assert seen.status == "passed" and seen.engine == "onnxruntime " + __import__("onnxruntime").__version__, seen
changed = onnx.load("folded.onnx")
weights = onnx.numpy_helper.to_array(changed.graph.initializer[0]).copy()
weights.flat[0] += 1
changed.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weights, changed.graph.initializer[0].name))
onnx.save(changed, "wrong.onnx")
assert bnexport.verify("kept.onnx", "wrong.onnx").status == "failed"
assert sorted(os.listdir(".")) == ["again.onnx", "folded.onnx", "folded.onnx.data", "kept.onnx", "wrong.onnx"]
"""


def test_a_system_without_posix_folds_and_verifies(tmp_path: Path) -> None:
    from tools.check_install import MODEL

    subprocess.run([sys.executable, "-c", MODEL], cwd=tmp_path, check=True)
    source = f"HIDE = {HIDE!r}\nimport numpy, onnx\nexec(HIDE)\n{FOLD}"
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("walks", [True, False])
def test_links_are_refused_anywhere_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, walks: bool) -> None:
    monkeypatch.setattr(limits, "_WALKS", walks)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a/link").symlink_to(tmp_path / "a/file")
    with open(limits.open_below(str(tmp_path), ("a", "file")), "rb") as file:
        assert limits.pread(file.fileno(), 5, 0) == b"x"
    for parts in (("link", "file"), ("a", "link")):
        with pytest.raises(OSError):
            limits.open_below(str(tmp_path), parts)
