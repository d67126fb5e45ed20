"""Closed pipes, closed standard streams and interrupts: exit codes, one line, nothing half-written."""

import os
import signal

import pytest

from tests.support import warm


def with_a_closed_pipe(*arguments, stderr=None):
    """A command whose stdout is a pipe that nobody reads any more; its stderr goes there too where None."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = warm.start("-m", "bnexport", *map(str, arguments), stdout=writer, stderr=stderr or writer)
        text = process.stderr.read().decode() if stderr is not None else ""
        return process.wait(120), text
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "arguments",
    [["inspect", "{0}/kept.onnx"], ["inspect", "{0}/kept.onnx", "--json", "-"], ["--help"], ["run", "--help"]],
    ids=" ".join,
)
def test_a_reader_that_left_is_141_and_no_message(arguments, small_files):
    arguments = [argument.format(small_files) for argument in arguments]
    assert with_a_closed_pipe(*arguments, stderr=warm.subprocess.PIPE) == (141, "")


def test_messages_come_before_the_table_that_nobody_reads(small_files, tmp_path):
    code, text = with_a_closed_pipe("fold", small_files / "kept.onnx", tmp_path / "f.onnx", stderr=warm.subprocess.PIPE)
    assert code == 141
    assert "3 of 3 batch norms folded" in text and "verification passed" in text
    assert [path.name for path in tmp_path.iterdir()] == ["f.onnx"]


def test_an_error_that_nobody_reads(small_files):
    assert with_a_closed_pipe("inspect", small_files / "gone.onnx") == (141, "")


CLOSED = """
import os, sys
for descriptor in ({},):
    os.close(descriptor)
os.execv(sys.executable, [sys.executable, "-m", "bnexport", *sys.argv[1:]])
"""


@pytest.mark.parametrize("closed", ["0", "1", "0, 1, 2"])
def test_closed_standard_streams(closed, small_files, tmp_path):
    done = warm.run("-c", CLOSED.format(closed), "inspect", small_files / "kept.onnx", "--json", tmp_path / "r.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "r.json").stat().st_size


@pytest.mark.parametrize("before", [None, b"old"])
def test_an_interrupted_fold_leaves_the_file(before, small_files, tmp_path, monkeypatch, call):
    target = tmp_path / "f.onnx"
    if before is not None:
        target.write_bytes(before)
    monkeypatch.setattr("bnexport.folding.fold", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    _, _, err = call("fold", small_files / "kept.onnx", target, "--overwrite", code=130)
    assert err == "error: interrupted; files are as they were, or complete\n"
    assert (target.read_bytes() if target.exists() else None) == before
