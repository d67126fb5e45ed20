"""Wrong usage, judged as a user would: one line that says what, where, got, expected and the way out; the exit code."""

import os
import shutil

import numpy as np
import onnx
import pytest
import torch

import bnexport
from bnexport.cli import main
from models.resnet import ResNet
from tests.support import warm
from tests.support.onnx_text import model

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


EXPORT = ["export", f"{HERE}:tiny", "o.onnx", "-i", "x:2,1,8,8"]
FIXED = ["export", f"{HERE}:Fixed", "o.onnx", "-i", "x:2,3,4,4", "--exporter", "torchscript"]
STEP = ["train-export", f"{HERE}:tiny", "o.onnx", "-i", "x:1"]
# (arguments, exit code, what the line must say)
WRONG = [
    (["frobnicate"], 2, ["'frobnicate'", "bnexport --help"]),
    (["fold", "m.onnx"], 2, ["'OUT'", "bnexport fold --help"]),
    (["fold", "m.onnx", "o.onnx", "--frob"], 2, ["--frob", "bnexport fold --help"]),
    (["fold", "gone.onnx", "o.onnx"], 2, ["IN: gone.onnx", "no such file"]),
    (["fold", ".", "o.onnx"], 3, ["'.'", "is a directory", "expected"]),
    (["fold", "cut.onnx", "o.onnx"], 3, ["'cut.onnx'", "truncated or not an ONNX file"]),
    (["fold", "text", "o.onnx"], 3, ["'text'", "truncated or not an ONNX file"]),
    (["fold", "m.onnx", "m.onnx"], 2, ["OUT: got 'm.onnx'", "is IN", "another file", "--overwrite"]),
    (["fold", "m.onnx", "."], 2, ["OUT: got the folder '.'", "expected the name of a file"]),
    (["fold", "m.onnx", "gone/o.onnx"], 2, ["OUT: cannot write 'gone/o.onnx'", "'gone' does not exist; make it first"]),
    (["fold", "m.onnx", "text/o.onnx"], 2, ["OUT: cannot write 'text/o.onnx'", "'text' is a file"]),
    (["fold", "m.onnx", "o.onnx", "--html", "gone/r.html"], 2, ["--html: cannot write", "make it first"]),
    (["fold", "m.onnx", "o.onnx", "--json", "gone/r.json"], 2, ["--json: cannot write", "make it first"]),
    (["fold", "m.onnx", "o.onnx", "--only", "stem"], 2, ["--only: got 'stem'", "a batch norm of m.onnx: stem.1,"]),
    (["fold", "m.onnx", "o.onnx", "--skip", "stem"], 2, ["--skip: got 'stem'", "expected a batch norm of m.onnx"]),
    (["fold", "m.onnx", "o.onnx", "--explain", "stm"], 2, ["--explain: got 'stm'", "expected a batch norm of m.onnx"]),
    (["fold", "m.onnx", "--explain", "stem", "--bench"], 2, ["Missing argument 'OUT'"]),
    (["inspect", "w.pth"], 3, ["one that torch.save or torch.jit.save wrote", "--checkpoint w.pth"]),
    (["export", "m.onnx", "o.onnx", "-i", "x:1"], 2, ["got the ONNX file 'm.onnx'", "bnexport fold m.onnx OUT.onnx"]),
    (["export", "w.pth", "o.onnx", "-i", "x:1"], 2, ["got the file of weights 'w.pth'", "then --checkpoint w.pth"]),
    (["run", "m.onnx", "--provider", "cuda"], 2, ["pip uninstall onnxruntime", "pip install onnxruntime-gpu"]),
    (["fold", "m.onnx", "o.onnx", "--seed", "one"], 2, ["'--seed'", "integer"]),
    (["verify", "m.onnx", "m.onnx", "--seed", "-1"], 2, ["'--seed'", "greater than or equal to 0"]),
    (["verify", "m.onnx", "m.onnx", "--atol", "-1"], 2, ["'--atol'", "-1 is no bound", "expected a finite number >= 0"]),
    (["verify", "m.onnx", "m.onnx", "--rtol", "nan"], 2, ["'--rtol'", "nan is no bound"]),
    (["verify", "m.onnx", "cut.onnx"], 3, ["'cut.onnx'", "truncated or not an ONNX file"]),
    (["run", "text", "-i", "x:1"], 3, ["'text'", "truncated or not an ONNX file"]),
    (["run", "bad_eps.onnx", "-i", "x:2,3,4"], 3, ["the_node", "eps", "-1"]),
    (["verify", "m.onnx", "gone.onnx"], 2, ["'gone.onnx'", "does not exist"]),
    (["verify", "m.onnx", "m.onnx", "-i", "x:2,3,8,8"], 2, ["x: got shape (2, 3, 8, 8)", "(batch, 1, height, width)"]),
    (["run", "m.onnx", "-i", "x"], 2, ["got 'x'", "expected NAME:SHAPE such as x:1,3,224,224, or NAME:FILE.npy"]),
    (["run", "m.onnx", "-i", "x:"], 2, ["got 'x:'", "expected NAME:SHAPE"]),
    (["run", "m.onnx", "-i", "y:1"], 2, ["m.onnx has no input 'y'", "expected one of: x: float32"]),
    (["run", "m.onnx", "-i", "x:1,1,8,8", "-i", "x:1,1,8,8"], 2, ["got 'x' twice"]),
    (["run", "m.onnx", "-i", "x:1,-1,8,8"], 2, ["'1,-1,8,8' is neither a shape nor a file that exists"]),
    (["run", "m.onnx", "-i", "x:gone.npy"], 2, ["'gone.npy' is neither a shape nor a file that exists"]),
    (["run", "m.onnx", "-i", "x:text"], 2, ["cannot read 'text'", "expected a file that numpy.save wrote"]),
    (["run", "m.onnx", "-i", "x:several.npz"], 2, ["'several.npz' holds several arrays", "expected one"]),
    (["run", "m.onnx", "-i", "x:x64.npy"], 2, ["got float64", "expected x: float32", "convert it first"]),
    (["run", "m.onnx", "-i", "x:1,1,8,8", "-o", "o.txt"], 2, ["--output: got 'o.txt'", "ends in .npz"]),
    (["run", "m.onnx", "-i", "x:1,1,8,8", "-o", "gone/o.npz"], 2, ["--output: cannot write 'gone/o.npz'"]),
    (["run", "m.onnx", "-i", "x:99999999,1,99999,99999"], 4, ["not enough memory"]),
    (["run", "m.onnx", "--provider", "cdua"], 2, ["provider: got 'cdua'", "cpu"]),
    (["export", HERE, "o.onnx", "-i", "x:1"], 2, ["MODULE:FACTORY: got", "models.resnet:digits_resnet"]),
    (["export", "gone:f", "o.onnx", "-i", "x:1"], 2, ["gone:f", "No module named 'gone'", "PYTHONPATH"]),
    (["export", f"{HERE}:gone", "o.onnx", "-i", "x:1"], 2, ["cannot be imported", "no attribute 'gone'"]),
    (["export", f"{HERE}:raises", "o.onnx", "-i", "x:1"], 2, ["failed: FileNotFoundError: config.py: no such config"]),
    (["export", f"{HERE}:needs_an_argument", "o.onnx", "-i", "x:1"], 2, ["'width'", "write a function of your own"]),
    (["export", f"{HERE}:a_number", "o.onnx", "-i", "x:1"], 2, ["returned a int", "expected a torch.nn.Module"]),
    (["export", f"{HERE}:WRONG", "o.onnx", "-i", "x:1"], 2, ["got a list", "expected a function"]),
    (["export", f"{HERE}:tiny", "o.onnx"], 2, ["'--input'", "bnexport export --help"]),
    (["export", f"{HERE}:tiny", "o.onnx", "-i", "1,1,8,8"], 2, ["got '1,1,8,8'", "expected NAME:SHAPE"]),
    (["export", f"{HERE}:tiny", "o.onnx", "-i", "x:1,3,8,8"], 2, ["does not run on inputs of shape (1, 3, 8, 8)", "1 channels"]),
    ([*EXPORT, "-i", "y:1"], 2, ["does not run on inputs of shape (2, 1, 8, 8), (1,)"]),
    ([*EXPORT, "--dynamic-dims", "x"], 2, ["--dynamic-dims: got 'x'", "such as x:0,2,3 or x:0=batch"]),
    ([*EXPORT, "--dynamic-dims", "x:0,h"], 2, ["--dynamic-dims: got 'x:0,h'"]),
    ([*EXPORT, "--dynamic-dims", "x:0="], 2, ["--dynamic-dims: got 'x:0='"]),
    ([*EXPORT, "--dynamic-dims", "y:0"], 2, ["--dynamic-dims: got 'y'", "expected an input among x"]),
    ([*EXPORT, "--dynamic-dims", "x:0", "--static"], 2, ["--dynamic-dims, --static: got both"]),
    ([*FIXED, "--dynamic-dims", "x:2=h"], 3, ["dimension 2 (h) stays 4", "ran at no other size", "leave dimension 2 of 'x' out"]),
    (["inline", "gone.onnx", "o.onnx"], 2, ["IN: gone.onnx: no such file"]),
    (["inline", "m.onnx", "m.onnx"], 2, ["OUT: got 'm.onnx'", "is IN", "--overwrite"]),
    (["inline", "cut.onnx", "o.onnx"], 3, ["'cut.onnx'", "truncated or not an ONNX file"]),
    ([*EXPORT, "--mode", "fast"], 2, ["mode: got 'fast'", "deploy, custom_op"]),
    ([*EXPORT, "--format", "tflite"], 2, ["format: got 'tflite'", "onnx, torchscript, pt2"]),
    (["export", f"{HERE}:tiny", "o.pt2", "-i", "x:1", "--mode", "custom_op"], 2, ["'custom_op' with format 'pt2'", "expected 'deploy'"]),
    ([*EXPORT, "--checkpoint", "gone.pth"], 2, ["gone.pth: no such file", "check the path"]),
    ([*EXPORT, "--checkpoint", "text"], 2, ["text: cannot be read as a checkpoint", "torch.save"]),
    ([*EXPORT, "--checkpoint", "empty.pth"], 2, ["empty.pth: found no tensors, expected a state_dict", "its keys are epoch"]),
    ([*EXPORT, "--checkpoint", "other.pth"], 2, ["17 missing: stem.0.weight", "and 9 more", "1 unexpected", "--allow-unexpected"]),
    ([*EXPORT, "--checkpoint", "both.pth", "--key", "best"], 2, ["has no key 'best'", "expected one of state_dict, ema"]),
    (["export", f"{HERE}:DependsOnValues", "o.onnx", "-i", "x:2,2"], 3, ["cannot export it, though it runs", "exporter torchscript"]),
    (["export", f"{HERE}:Diagonal", "o.onnx", "-i", "x:2,2", "--exporter", "torchscript"], 3, ["aten::diag", "try exporter torchscript"]),
    (["inspect", "gone.onnx"], 2, ["'gone.onnx'", "does not exist"]),
    (["fold", "m.onnx", "text"], 2, ["OUT: 'text' exists", "--overwrite"]),
    (["fold", "m.onnx", "o.pt"], 2, ["OUT: got 'o.pt'", "names 'torchscript'", "expected .onnx"]),
    (["export", f"{HERE}:tiny", "m.onnx", "-i", "x:1"], 2, ["OUT: 'm.onnx' exists", "--overwrite"]),
    (["export", f"{HERE}:tiny", "o", "-i", "x:1"], 2, ["OUT: got 'o', whose suffix names no format", ".pt2", "--format"]),
    (["export", f"{HERE}:tiny", "o.pt", "-i", "x:1", "--format", "onnx"], 2, ["--format: got 'onnx' for 'o.pt'", "names 'torchscript'"]),
    (["export", f"{HERE}:tiny", "o.onnx", "-i", "x=1,3,8,8"], 2, ["got 'x=1,3,8,8'", "did you mean 'x:1,3,8,8'?"]),
    (["export", f"{HERE}:tinny", "o.onnx", "-i", "x:1"], 2, ["no attribute 'tinny'", "did you mean 'tiny'?"]),
    ([*EXPORT, "--mode", "custom-op"], 2, ["--mode: got 'custom-op'", "did you mean 'custom_op'?"]),
    ([*EXPORT, "--format", "onxx"], 2, ["--format: got 'onxx'", "did you mean 'onnx'?"]),
    ([*STEP, "--optimizer", "adan"], 2, ["--optimizer: got 'adan'", "did you mean 'adam'?"]),
    ([*STEP, "--loss", "crossentropy"], 2, ["did you mean 'cross_entropy'?"]),
    ([*STEP, "--dynamic-dims", "y:0"], 2, ["--dynamic-dims: got 'y'", "expected an input among x, target"]),
    (["doctor", "now"], 2, ["(now)", "bnexport doctor --help"]),
]  # fmt: skip


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
