"""The table of exit codes in docs/command_line.md: every code that it documents is one that a command ends with."""

import collections
import os
import re
import sys
from pathlib import Path

import onnx
import pytest

from bnexport.cli import main
from bnexport.errors import GroupError
from tests.cli.test_cli_errors import WRONG
from tests.support.onnx_text import array_of, model, with_arrays

DOCUMENT = Path(__file__).parents[2] / "docs" / "command_line.md"
Usage = collections.namedtuple("Usage", "total used free")


def documented():
    """The codes of the table, with their meanings."""
    table = DOCUMENT.read_text().partition("| exit code | meaning |")[2].partition("\n\n")[0]
    return {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE)}


def full_disk(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(10**12, 10**12 - 100, 100))


def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "bnexport.exporting.arguments", None)


def lost_group(monkeypatch):
    def meet(*_, **__):
        raise GroupError("a member did not come")

    monkeypatch.setattr("bnexport.folding.inspect", meet)


EXPORT = ["export", "tests.cli.conftest:tiny", "new.onnx", "-i", "x:2,1,8,8"]
# (code, arguments, what is broken)
CASES = [
    (0, ["fold", "plain.onnx", "new.onnx"], None),
    (1, ["verify", "kept.onnx", "other.onnx"], None),
    (4, ["fold", "kept.onnx", "new.onnx"], full_disk),
    (4, EXPORT, full_disk),
    (4, EXPORT, no_torch),
    (4, ["inspect", "kept.onnx"], lost_group),
    (5, ["verify", "secret.onnx", "other_secret.onnx"], None),
    (0, ["verify", "secret.onnx", "other_secret.onnx", "--allow-not-verified"], None),
]
# An error of the package itself, interrupts and closed pipes.
ELSEWHERE = {70: "test_cli_errors.py", 130: "test_pipes_and_signals.py", 141: "test_pipes_and_signals.py"}


def made(operator):
    header = '<ir_version: 8, opset_import: ["": 18, "other": 1]>'
    return model(f"g (float[2] x) => (float[2] y) {{ y = {operator} (x) }}", header=header)


@pytest.fixture
def folder(small_files, tmp_path, monkeypatch):
    for path in small_files.iterdir():
        os.link(path, tmp_path / path.name)
    kept = onnx.load(tmp_path / "kept.onnx")
    onnx.save(with_arrays(kept, {"classify.bias": array_of(kept, "classify.bias") + 1}), tmp_path / "other.onnx")
    onnx.save(made("Relu"), tmp_path / "plain.onnx")
    for name, secret in (("secret.onnx", 1), ("other_secret.onnx", 2)):
        onnx.save(made(f"other.Secret <number = {secret}>"), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_cases_cover_the_table():
    assert set(documented()) == {code for code, *_ in CASES} | {code for _, code, _ in WRONG} | set(ELSEWHERE)


@pytest.mark.parametrize(("code", "arguments", "defect"), CASES)
def test_the_documented_exit_code(code, arguments, defect, folder, monkeypatch, capfd):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if defect:
        defect(monkeypatch)
    assert main(arguments) == code
    err = capfd.readouterr().err
    if code == 0:
        assert not any(line.startswith("error:") for line in err.splitlines())
    else:
        assert err.startswith("error: ") and err.count("\n") == 1, err
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
