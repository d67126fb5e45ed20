"""Commands of the README as a user sees them: on a terminal of 80 columns, of 20, and with a locale without UTF-8."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.support.terminal import on_terminal

SESSION = """
import shlex
import sys
from bnexport.cli import main
for line in sys.stdin.read().splitlines():
    assert main(shlex.split(line)) == 0, line
"""
COMMANDS = """inspect {0}/kept.onnx
fold {0}/kept.onnx folded.onnx --html report.html
verify {0}/kept.onnx folded.onnx
run folded.onnx
doctor
fold --help"""
# What nobody may lose on the way to a terminal, whatever the width.
SAID = [
    *("6/MMCVSyncBatchNorm", "3 of 3 batch norms folded into convolutions", "verification passed", "2x1x32x32"),
    *("registration in ONNX Runtime", "Exit codes: 0 ok"),
]


def session(folder, cwd, width, **environment):
    """What a terminal of `width` columns shows, without escape sequences."""
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment = {**variables, "TERM": "xterm-256color", **environment}
    shown = on_terminal(
        SESSION, COMMANDS.format(shlex.quote(str(folder))), width=width, seconds=120, cwd=cwd, env=environment
    )
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


@pytest.mark.parametrize("width", [80, 20])
def test_a_terminal(width, small_files, tmp_path):
    text = session(small_files, tmp_path, width)
    lines = [line for part in text.split("\n") for line in part.split("\r")]
    if width == 80:
        assert max(map(len, lines)) <= width, max(lines, key=len)
        shown = " ".join(re.sub("[│┃]", " ", text).split())
        for said in SAID[1:]:
            assert said in shown, said
    assert (tmp_path / "folded.onnx").exists() and (tmp_path / "report.html").exists()


def test_a_locale_without_utf_8(small_files):
    environment = {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "bnexport", "inspect", small_files / "kept.onnx"],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    assert b"MMCVSyncBatchNorm" in done.stdout and b"\\u" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
