"""Commands of the README as a user sees them: on a terminal of 80 columns, of 20, and with a locale without UTF-8."""

import os
import re
import subprocess
import sys
import time

import pytest

from bnexport import stages
from bnexport.cli import console
from tests.support.terminal import on_terminal

SESSION = """
import sys
from bnexport.cli import main
for line in sys.stdin.read().splitlines():
    assert main(line.split()) == 0, line
"""
COMMANDS = """inspect {0}/kept.onnx
fold {0}/kept.onnx folded.onnx --html report.html
verify {0}/kept.onnx folded.onnx
run folded.onnx
bench {0}/kept.onnx folded.onnx -i x:1,1,8,8 --runs 2 --warm-up 0
doctor
fold --help"""
# What nobody may lose on the way to a terminal, whatever the width.
SAID = [
    *("6/MMCVSyncBatchNorm", "3 of 3 batch norms folded into convolutions", "verification passed", "2x1x32x32", "p99"),
    *("registration in ONNX Runtime", "Exit codes: 0 ok"),
]


def session(folder, cwd, width, **environment):
    """What a terminal of `width` columns shows, without escape sequences."""
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment = {**variables, "TERM": "xterm-256color", **environment}
    shown = on_terminal(SESSION, COMMANDS.format(folder), width=width, seconds=120, cwd=cwd, env=environment)
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


def test_long_work_without_a_terminal_says_where_it_is(monkeypatch, capfd):
    monkeypatch.setattr(console, "_SECONDS", 0.05)
    console.set_level(quiet=False, verbose=False)
    with console.status("folding m.onnx"):
        stages.report("writing", 1_000_000_000, 2_600_000_000)
        time.sleep(0.3)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "folding m.onnx: writing 1.0 of 2.6 GB (0 s)" and len(lines) >= 2
    console.set_level(quiet=True, verbose=False)
    with console.status("folding m.onnx"):
        time.sleep(0.1)
    assert capfd.readouterr().err == ""


QUICK = [["--help"], ["export", "--help"], ["fold"], ["export", "m:f", "m.onnx", "-i", "x=1,3"], ["doctor"]]


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_answers_come_without_torch(arguments, tmp_path):
    """Processor time of the whole process, the least of three: other work on the machine only adds to it."""
    script = "import sys; from bnexport.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    seconds = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, cwd=tmp_path, check=False
        )
        after = os.times()
        assert done.returncode == 0, "torch was imported"
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) <= 0.6
