"""The examples in C and C++, built and run here, and the networks in models/ through the whole product."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import bnexport
from bnexport import tolerances
from models.resnet import ResNet, digits_resnet
from models.segmentation import Segmenter
from tests.docs import pages
from tests.folding.module.nets import trained
from tests.support import warm
from tests.support.checks import assert_within

EXAMPLES = Path(__file__).parents[1] / "examples"
RUNTIME = sorted((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.1.*"))


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory):
    """The folder in which docs/tutorials/cpp.md was followed, and what it printed."""
    if not shutil.which("cmake") or not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no CMake or no compiler here")
    if not RUNTIME:
        pytest.skip("this onnxruntime has no libonnxruntime of its own")
    if torch.version.cuda and not shutil.which("nvcc"):
        pytest.skip("a libtorch built for CUDA needs the CUDA toolkit to build against")
    folder = tmp_path_factory.mktemp("tutorial")
    return folder, pages.run(
        pages.blocks((EXAMPLES.parent / "docs/tutorials/cpp.md").read_text(), "python", "sh"), folder
    )


@pytest.mark.cpp
def test_the_tutorial_runs(tutorial):
    _, printed = tutorial
    assert printed.count("out: [1, 5, 64, 64]") == 3
    assert printed.count("largest difference from PyTorch") == 3


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A model that keeps its nodes."""
    path = tmp_path_factory.mktemp("kept") / "kept.onnx"
    bnexport.export(trained(digits_resnet()), torch.randn(2, 1, 8, 8), path, mode="custom_op", verify=False)
    return path


def run(command, *arguments):
    return subprocess.run([command, *map(str, arguments)], capture_output=True, text=True, check=False)


def program(tutorial, name):
    return tutorial[0] / "build" / name / name


def run_on(tutorial, name, model, x, folder, *more):
    """Its standard output, and the values that it wrote."""
    source, target = folder / "input.bin", folder / "output.bin"
    x.astype(np.float32).tofile(source)
    done = run(program(tutorial, name), model, ",".join(map(str, x.shape)), source, target, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout, np.fromfile(target, np.float32)


@pytest.mark.cpp
@pytest.mark.parametrize("library", [True, False], ids=["library", "portable body"])
def test_ort_run(tutorial, kept, library, tmp_path):
    x = np.random.default_rng(0).standard_normal((3, 1, 8, 8), np.float32)
    more = [bnexport.get_library_path()] if library else []
    text, got = run_on(tutorial, "ort_run", kept, x, tmp_path, *more)
    session = bnexport.InferenceSession(kept) if library else onnxruntime.InferenceSession(kept)
    (expected,) = session.run(None, {"x": x})
    assert text == "output: [3, 10]\n"
    np.testing.assert_array_equal(got.reshape(expected.shape), expected)


@pytest.mark.cpp
@pytest.mark.parametrize(
    ("shape", "file", "more", "message"),
    [
        ("3,1,8", "input", [], "does not fit the shape"),
        ("3,1,8,8,", "input", [], "expected a shape such as 2,3,32,32"),
        ("3,1,8,8", "missing", [], "missing: cannot be read"),
        ("192,1", "input", [], "Invalid rank for input"),
        ("3,1,8,8", "input", ["no_library.so"], "no_library.so"),
    ],
)
def test_ort_run_says_what_is_wrong(tutorial, kept, shape, file, more, message, tmp_path):
    np.zeros(192, np.float32).tofile(tmp_path / "input")
    done = run(program(tutorial, "ort_run"), kept, shape, tmp_path / file, tmp_path / "out", *more)
    assert done.returncode == 1
    assert "error:" in done.stderr
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.cpp
@pytest.mark.parametrize(
    ("make", "example", "shape", "outputs"),
    [
        (digits_resnet, (2, 1, 8, 8), (3, 1, 8, 8), "output: [3, 10]\n"),
        (Segmenter, (2, 3, 32, 32), (1, 3, 48, 40), "out: [1, 5, 48, 40]\naux: [1, 5, 48, 40]\n"),
    ],
    ids=["resnet", "segmenter"],
)
def test_libtorch_run(tutorial, make, example, shape, outputs, tmp_path):
    net, x = trained(make()), torch.randn(shape)
    path = tmp_path / "m.pt"
    bnexport.export(net, torch.randn(example), path, format="torchscript", verify=False)
    text, got = run_on(tutorial, "libtorch_run", path, x.numpy(), tmp_path)
    with torch.no_grad():
        value = net(x)
    expected = [value] if isinstance(value, torch.Tensor) else list(value.values())
    flat = torch.cat([tensor.flatten() for tensor in expected]).numpy()
    assert text == outputs
    assert_within(got, flat, tolerances.model("float32", flat))


@pytest.mark.cpp
def test_libtorch_run_says_what_is_wrong(tutorial, tmp_path):
    (tmp_path / "m.pt").write_bytes(b"no model")
    np.zeros(4, np.float32).tofile(tmp_path / "input")
    done = run(program(tutorial, "libtorch_run"), tmp_path / "m.pt", "2,2", tmp_path / "input", tmp_path / "out")
    assert done.returncode == 1
    assert f"libtorch {torch.__version__.partition('+')[0]}" in done.stderr
    assert "cannot load it" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_python_snippets_of_the_page(tmp_path, monkeypatch):
    """docs/deploy.md, in order, with a model, images and kept.onnx at hand."""
    monkeypatch.chdir(tmp_path)
    model, images = trained(ResNet(in_channels=1, widths=(4,), blocks=1)), torch.randn(2, 1, 8, 8)
    bnexport.export(model, images, tmp_path / "kept.onnx", mode="custom_op", verify=False)
    namespace = {"bnexport": bnexport, "torch": torch, "model": model, "images": images}
    blocks = re.findall(r"^```python\n(.*?)^```", (EXAMPLES.parent / "docs/deploy.md").read_text(), re.M | re.S)
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "docs/deploy.md", "exec"), namespace)
    (expected,) = namespace["session"].run(None, {"x": namespace["images"].numpy()})
    torch.testing.assert_close(namespace["outputs"].detach(), torch.from_numpy(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(namespace["folded"](namespace["images"]), namespace["outputs"], rtol=1e-4, atol=1e-4)


def test_a_runtime_that_is_not_there(tmp_path):
    if not shutil.which("cmake"):
        pytest.skip("no CMake here")
    done = run("cmake", "-S", EXAMPLES / "ort_run", "-B", tmp_path, "-DONNXRUNTIME_LIBRARY=/nowhere/libonnxruntime.so")
    assert done.returncode != 0
    assert "expected the path of libonnxruntime.so" in " ".join(done.stderr.split())


ROOT = Path(__file__).parents[1]
EXPORTERS = ["dynamo", "torchscript"]


def _trained():
    net = Segmenter().train()
    for _ in range(2):
        net(torch.randn(2, 3, 32, 32))
    return net


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_segmenter_deploys_without_batch_norms(exporter, tmp_path):
    net = _trained()
    result = bnexport.export(net, torch.randn(2, 3, 32, 32), tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.passed
    assert result.outputs == ("out", "aux")
    assert (result.report.after.batch_norm, result.report.after.sync_batch_norm) == (0, 0)
    if exporter == "dynamo":
        image = torch.randn(1, 3, 48, 40)
        got = onnxruntime.InferenceSession(result.path).run(None, {"image": image.numpy()})
        for name, value in zip(result.outputs, got):
            torch.testing.assert_close(torch.from_numpy(value), net.eval()(image)[name].detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("training", "exporter"), [(True, "dynamo"), (True, "torchscript"), (False, "torchscript")])
def test_segmenter_keeps_its_nodes(exporter, training, tmp_path):
    net = _trained().train(training)
    result = bnexport.export(net, torch.randn(2, 3, 32, 32), tmp_path / "m.onnx", mode="custom_op", exporter=exporter)
    assert result.verification.passed, result.verification.summary()
    folded = bnexport.fold(tmp_path / "m.onnx", tmp_path / "f.onnx").report
    assert (folded.verification.passed, folded.meaning_changed) == (True, training)
    assert (folded.after.batch_norm, folded.after.sync_batch_norm) == (0, 0)


@pytest.mark.parametrize("epochs", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_demo_keeps_its_promises(epochs, tmp_path):
    """The demo exits with 1 where accuracy, differences or folding miss their bounds: one epoch is not enough."""
    rounds = "1" if epochs == 1 else "20"
    done = warm.run(*("-m", "models.demo", "--output", tmp_path, "--epochs", str(epochs), "--rounds", rounds), cwd=ROOT)
    if epochs == 1:
        assert done.returncode == 1
        unmet = done.stderr.strip().removeprefix("not as promised: ").split("; ")
        assert len(unmet) == 4 and all(": accuracy " in it for it in unmet), done.stderr
    else:
        assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "demo.json").read_text())["rows"]
    assert [row["batch_norms"] for row in rows] == [15, 15, 15, 0]
    assert (tmp_path / "demo.png").stat().st_size > 10_000
