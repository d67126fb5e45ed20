"""Wrong usage and exit codes, judged as a user would: one line that says what, where, got, expected and the way out."""

import collections
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import bnexport
from bnexport.cli import main
from bnexport.errors import GroupError
from models.resnet import ResNet
from tests.support import warm
from tests.support.onnx_text import array_of, model, with_arrays

HERE = "tests.cli.test_cli_errors"


def tiny():
    return ResNet(in_channels=1, widths=(4,), blocks=1)


def raises():
    raise FileNotFoundError("config.py: no such config")


def needs_an_argument(width):
    return tiny()


def a_number():
    return 3


class Fixed(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(48, 2))


class DependsOnValues(torch.nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


class Diagonal(torch.nn.Module):
    """As CCNet masks its attention; the TorchScript exporter does not have the operator."""

    def forward(self, x):
        return torch.diag(x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    torch.manual_seed(0)
    bnexport.export(tiny().eval(), torch.randn(2, 1, 8, 8), folder / "m.onnx", mode="custom_op")
    (folder / "cut.onnx").write_bytes((folder / "m.onnx").read_bytes()[:4000])
    pairs = {"one": "a.onnx", "two": "a.onnx b.onnx", "none": "\n# none", "open": "a.onnx 'b.onnx"}
    for name, text in pairs.items():
        (folder / f"{name}.txt").write_text(f"{text}\n")
    (folder / "m.ort").write_bytes(b"\x18\0\0\0ORTM" + b"\0" * 64)
    (folder / "text").write_text("no model, no array, no checkpoint")
    bad = (
        "g (float[N,3,L] x) => (float[N,3,L] y) { [the_node] y = mmcv.MMCVSyncBatchNorm <eps = -1.0> (x, m:3, p_v:3) }"
    )
    onnx.save(model(bad, header='<ir_version: 10, opset_import: ["": 18, "mmcv": 1]>'), folder / "bad_eps.onnx")
    np.save(folder / "x64.npy", np.zeros((2, 1, 8, 8)))
    np.savez(folder / "several.npz", a=np.zeros(1), b=np.zeros(1))
    state = tiny().state_dict()
    checkpoints = {"w": state, "empty": {"epoch": 3}, "both": {"state_dict": state, "ema": state}}
    checkpoints["other"] = {"state_dict": {"module.head.weight": torch.ones(1)}}
    for name, content in checkpoints.items():
        torch.save(content, folder / f"{name}.pth")
    return folder


BEGINNINGS = {
    "EXPORT": f"export {HERE}:tiny o.onnx -i x:2,1,8,8",
    "FIXED": f"export {HERE}:Fixed o.onnx -i x:2,3,4,4 --exporter torchscript",
    "STEP": f"train-export {HERE}:tiny o.onnx -i x:1",
    "HERE": HERE,
    "LONG": "a" * 240,
}


def read(line):
    """Return the arguments, the exit code, and what the line must say, of a line of wrong_usage.txt."""
    for name, text in BEGINNINGS.items():
        line = re.sub(rf"\b{name}\b", text, line)
    command, *words = line.split("  | ")
    code, *arguments = shlex.split(command)
    return arguments, int(code), words


LINES = Path(__file__).with_name("wrong_usage.txt").read_text().splitlines()
WRONG = [read(line) for line in LINES if not line.startswith("#")]


@pytest.mark.parametrize(("arguments", "exit_code", "words"), WRONG, ids=[" ".join(case[0])[-60:] for case in WRONG])
def test_wrong_usage(arguments, exit_code, words, folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    before = sorted(path.name for path in tmp_path.iterdir())
    code = main(arguments)
    out, err = capfd.readouterr()
    assert (code, out) == (exit_code, "")
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "m.onnx").read_bytes() == (folder / "m.onnx").read_bytes()


def in_a_process(arguments, folder, script=""):
    """The command line in a process of its own, after `script`."""
    program = f"{script}\nimport sys\nfrom bnexport.cli import main\nsys.argv[0] = 'bnexport'\nmain()"
    return warm.run("-c", program, *arguments, cwd=folder)


@pytest.mark.parametrize(
    ("package", "arguments", "way_out"),
    [
        ("onnxruntime", ["run", "m.onnx", "-i", "x:1,1,8,8"], "pip install onnxruntime (extra [cpu])"),
        ("torch", ["export", "collections:Counter", "o.onnx", "-i", "x:1"], "pip install torch onnxscript safetensors (extra [torch])"),
    ],
)  # fmt: skip
def test_a_package_that_is_not_installed(package, arguments, way_out, folder):
    done = in_a_process(arguments, folder, f"import sys; sys.modules[{package!r}] = None")
    assert done.returncode == 4, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert package in done.stderr and way_out in done.stderr


def test_a_group_needs_the_library(folder, tmp_path):
    """Nodes of several processes have no body that could run in the library's place."""
    model = onnx.load(folder / "m.onnx")
    del model.functions[:]
    onnx.save(model, tmp_path / "m.onnx")
    script = "import os; os.environ['BNEXPORT_LIBRARY'] = 'gone.so'"
    done = in_a_process(["run", "m.onnx", "-i", "x:1,1,8,8"], tmp_path, script)
    assert done.returncode == 4
    assert "gone.so" in done.stderr and done.stderr.count("\n") == 1


def test_a_folder_that_may_not_be_written_to(folder, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    done = in_a_process(["fold", folder / "m.onnx", "locked/o.onnx"], tmp_path)
    assert done.returncode == 2
    assert "'locked' may not be written to" in done.stderr


def test_a_full_disk(folder, tmp_path):
    script = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    script += "; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    done = in_a_process(["inspect", str(folder / "m.onnx"), "--json", "out.json"], tmp_path, script)
    assert done.returncode == 4
    assert done.stderr == "error: out.json: cannot be written: File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_our_own_is_told_apart(folder, monkeypatch, call):
    monkeypatch.setattr("bnexport.folding.inspect", lambda *_, **__: 1 // 0)
    _, _, err = call("inspect", folder / "m.onnx", code=70)
    assert "an error of bnexport itself: ZeroDivisionError: " in err and "Traceback" not in err
    assert "Traceback" in call("inspect", folder / "m.onnx", "-v", code=70)[2]


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
ELSEWHERE = {
    70: "test_an_error_of_our_own_is_told_apart",
    130: "test_pipes_and_signals.py",
    141: "test_pipes_and_signals.py",
}


def made(operator):
    header = '<ir_version: 8, opset_import: ["": 18, "other": 1]>'
    return model(f"g (float[2] x) => (float[2] y) {{ y = {operator} (x) }}", header=header)


@pytest.fixture
def files(small_files, tmp_path, monkeypatch):
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
def test_the_documented_exit_code(code, arguments, defect, files, monkeypatch, capfd):
    before = {path.name: path.read_bytes() for path in files.iterdir()}
    if defect:
        defect(monkeypatch)
    assert main(arguments) == code
    err = capfd.readouterr().err
    if code == 0:
        assert not any(line.startswith("error:") for line in err.splitlines())
    else:
        assert err.startswith("error: ") and err.count("\n") == 1, err
        assert {path.name: path.read_bytes() for path in files.iterdir()} == before
