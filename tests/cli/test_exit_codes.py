"""The table of exit codes in docs/command_line.md: every code that it documents is one that a command ends with."""

import collections
import os
import re
import signal
from pathlib import Path

import onnx
import pytest

from bnexport.cli import main
from bnexport.errors import GroupError
from tests.support.onnx_text import model

DOCUMENT = Path(__file__).parents[2] / "docs" / "command_line.md"
Usage = collections.namedtuple("Usage", "total used free")


def documented():
    """The codes of the table, with their meanings."""
    table = DOCUMENT.read_text().partition("| exit code | meaning |")[2].partition("\n\n")[0]
    return {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE)}


def full_disk(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(10**12, 10**12 - 100, 100))


def no_torch(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bnexport.exporting.arguments", None)


def interrupted(monkeypatch):
    monkeypatch.setattr("bnexport.folding.inspect", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))


def broken(monkeypatch):
    monkeypatch.setattr("bnexport.folding.inspect", lambda *_, **__: 1 // 0)


def closed_pipe(monkeypatch):
    def write(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("bnexport.folding.inspect", write)
    monkeypatch.setattr("bnexport.cli.application._abandon", lambda _: None)


def lost_group(monkeypatch):
    def meet(*_, **__):
        raise GroupError("a member did not come")

    monkeypatch.setattr("bnexport.folding.inspect", meet)


EXPORT = ["export", "tests.cli.conftest:tiny", "new.onnx", "-i", "x:2,1,8,8"]
# (code, arguments, what is broken)
CASES = [
    (0, ["inspect", "kept.onnx"], None),
    (0, ["fold", "plain.onnx", "new.onnx"], None),
    (1, ["verify", "kept.onnx", "other.onnx"], None),
    (2, ["inspect", "gone.onnx"], None),
    (2, ["fold", "gone.onnx", "new.onnx"], None),
    (2, ["verify", "kept.onnx", "gone.onnx"], None),
    (2, ["run", "gone.onnx"], None),
    (2, [*EXPORT, "--checkpoint", "gone.pth"], None),
    (2, ["fold", "kept.onnx", "gone/new.onnx"], None),
    (2, ["frobnicate"], None),
    (3, ["fold", "text.onnx", "new.onnx"], None),
    (4, ["fold", "kept.onnx", "new.onnx"], full_disk),
    (4, EXPORT, full_disk),
    (4, EXPORT, no_torch),
    (4, ["inspect", "kept.onnx"], lost_group),
    (5, ["verify", "secret.onnx", "other_secret.onnx"], None),
    (0, ["verify", "secret.onnx", "other_secret.onnx", "--allow-not-verified"], None),
    (70, ["inspect", "kept.onnx"], broken),
    (130, ["inspect", "kept.onnx"], interrupted),
    (141, ["inspect", "kept.onnx"], closed_pipe),
]


def made(operator):
    header = '<ir_version: 8, opset_import: ["": 18, "other": 1]>'
    return model(f"g (float[2] x) => (float[2] y) {{ y = {operator} (x) }}", header=header)


@pytest.fixture
def folder(small_files, tmp_path, monkeypatch):
    for path in small_files.iterdir():
        os.link(path, tmp_path / path.name)
    model = onnx.load(tmp_path / "kept.onnx")
    bias = next(each for each in model.graph.initializer if each.name == "classify.bias")
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + 1, bias.name))
    onnx.save(model, tmp_path / "other.onnx")
    onnx.save(made("Relu"), tmp_path / "plain.onnx")
    for name, secret in (("secret.onnx", 1), ("other_secret.onnx", 2)):
        onnx.save(made(f"other.Secret <number = {secret}>"), tmp_path / name)
    (tmp_path / "text.onnx").write_text("no model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_cases_cover_the_table():
    assert set(documented()) == {code for code, _, _ in CASES}


@pytest.mark.parametrize(
    ("code", "arguments", "defect"),
    CASES,
    ids=[f"{code} {' '.join(arguments[:3])} {defect.__name__ if defect else ''}" for code, arguments, defect in CASES],
)
def test_the_documented_exit_code(code, arguments, defect, folder, monkeypatch, capfd):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if defect:
        defect(monkeypatch)
    assert main(arguments) == code
    err = capfd.readouterr().err
    if code in (0, 141):
        assert not any(line.startswith("error:") for line in err.splitlines())
        return
    assert err.startswith("error: ") and err.count("\n") == 1, err
    if code != 0:
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
