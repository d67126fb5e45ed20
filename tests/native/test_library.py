"""Finding and loading the compiled library; each thing that can be missing is one typed, clear error."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import bnexport
from bnexport.errors import LibraryError, MissingFileError, UsageError
from bnexport.native import capi, library
from bnexport.runtime import engine
from bnexport.runtime.sessions import InferenceSession
from bnexport.training import contract
from tests.support import training_nodes, warm
from tests.support.node_models import forward_feeds, forward_model


def test_environment_variable_names_the_library(monkeypatch, tmp_path):
    copy = tmp_path / "other.so"
    copy.write_bytes(Path(library.get_library_path()).read_bytes())
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(copy))
    assert library.get_library_path() == str(copy)


def test_environment_variable_names_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(tmp_path / "nothing.so"))
    with pytest.raises(LibraryError, match=r"BNEXPORT_LIBRARY: got '.*nothing\.so', expected an existing"):
        library.get_library_path()


@pytest.fixture
def not_installed(monkeypatch, tmp_path):
    """No distribution, and a package without a library: its folder."""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delenv(library.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "runtime" / "library.py"))
    return tmp_path


def test_not_installed(not_installed):
    with pytest.raises(LibraryError, match=r"is not installed with bnexport; install bnexport with pip"):
        library.get_library_path()


def test_found_beside_the_package(not_installed):
    beside = not_installed / "lib" / library.file_name("ops")
    beside.parent.mkdir()
    beside.write_bytes(b"")
    assert library.get_library_path() == str(beside)


def test_file_that_is_no_library(monkeypatch, tmp_path):
    wrong = tmp_path / "wrong.so"
    wrong.write_bytes(b"not a library")
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(wrong))
    with pytest.raises(LibraryError, match=r"wrong\.so: cannot be loaded"):
        library.register(ort.SessionOptions())
    capi.library.cache_clear()
    try:
        with pytest.raises(LibraryError, match=r"wrong\.so: cannot be loaded"):
            capi.library()
    finally:
        capi.library.cache_clear()


def test_session_runs_a_model(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(forward_model())
    feeds = forward_feeds(np.random.default_rng(0), (2, 3, 4, 5))
    for source in (path, str(path), path.read_bytes()):
        session = InferenceSession(source, providers=["CPUExecutionProvider"])
        assert session.run(None, feeds)[0].shape == (2, 3, 4, 5)


def test_session_of_a_missing_file(tmp_path):
    with pytest.raises(MissingFileError, match=r"nothing\.onnx' does not exist"):
        InferenceSession(tmp_path / "nothing.onnx")


def test_c_api_needs_neither_torch_nor_onnxruntime():
    code = (
        "import sys; from bnexport.native import capi; capi.instruction_set();"
        "print([name for name in ('torch', 'onnxruntime') if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert result.stdout.strip() == "[]"


def relu_gradient() -> bytes:
    """A graph of one node of a training step."""
    x = np.ones((2, 3), np.float32)
    return training_nodes.model(contract.RELU_GRAD, {"grad_output": x, "input": x})


MODELS = {"mmcv": forward_model(), "ai.onnx": forward_model(domain=""), "bnexport": relu_gradient()}


@pytest.mark.parametrize("domains", ["mmcv", "ai.onnx", "mmcv,ai.onnx", "bnexport"])
def test_domains_can_be_left_to_another_library(monkeypatch, domains):
    monkeypatch.setenv("BNEXPORT_DOMAINS", domains)
    for domain, model in MODELS.items():
        options = ort.SessionOptions()
        options.log_severity_level = 4
        library.register(options, training=True)
        if domain in domains.split(","):
            ort.InferenceSession(model, options)
        else:
            with pytest.raises(Exception, match=r"MMCVSyncBatchNorm|ReluGrad"):
                ort.InferenceSession(model, options)


@pytest.mark.parametrize("kind", ["ops", "training"])
def test_every_library_has_a_path_and_the_version_of_the_package(kind):
    path = Path(library.get_library_path(kind))
    assert path.name == library.file_name(kind) and path.is_absolute() and path.is_file()
    assert library.version(kind) == bnexport.__version__


def test_an_unknown_kind_is_refused():
    with pytest.raises(UsageError, match=r"kind: got 'gpu', expected one of 'ops', 'cuda', 'training'"):
        library.get_library_path("gpu")


def test_a_missing_third_library_is_named(monkeypatch, tmp_path):
    """And nothing else stops working."""
    copy = shutil.copy(library.get_library_path(), tmp_path)
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(copy))
    options = ort.SessionOptions()
    library.register(options)
    with pytest.raises(
        LibraryError, match=r"^libbnexport_training\.so: got none next to .*libbnexport_ops\.so; install"
    ):
        library.register(options, training=True)
    assert ort.InferenceSession(forward_model(), options)


@pytest.mark.parametrize("kind", ["ops", "training"])
def test_a_library_of_another_version_is_refused(monkeypatch, kind):
    monkeypatch.setattr(library, "__version__", "9.9")
    with pytest.raises(LibraryError, match=rf"{kind}\.so: got version {bnexport.__version__}, expected 9\.9"):
        library.load(kind)
    with pytest.raises(LibraryError, match=r"got version .*, expected 9\.9"):
        library.register(ort.SessionOptions(), training=kind == "training")


def test_libraries_of_two_versions_next_to_each_other_are_refused(tmp_path):
    """In any language: by ONNX Runtime's own call."""
    ours, other = f"{bnexport.__version__}\0".encode(), b"9.9.9\0"
    content = Path(library.get_library_path()).read_bytes()
    assert content.count(ours) == 1 and len(ours) == len(other)
    (tmp_path / library.file_name("ops")).write_bytes(content.replace(ours, other))
    training = shutil.copy(library.get_library_path("training"), tmp_path)
    with pytest.raises(Exception, match=rf"libbnexport_ops\.so: got version 9\.9\.9, expected {bnexport.__version__}"):
        ort.SessionOptions().register_custom_ops_library(training)
    (tmp_path / "alone").mkdir()
    training = shutil.copy(training, tmp_path / "alone")
    with pytest.raises(Exception, match=r"libbnexport_ops\.so: cannot be opened .*expected next to"):
        ort.SessionOptions().register_custom_ops_library(training)


STEP_WITHOUT_KERNELS = """
import sys
import onnxruntime as ort
import bnexport

model = open(sys.argv[1], "rb").read()
options = ort.SessionOptions()
options.log_severity_level = 4
bnexport.register(options)
try:
    ort.InferenceSession(model, options)
except Exception as error:
    print(error)
bnexport.register(options, training=True)
ort.InferenceSession(model, options)
"""


def test_a_step_s_graph_without_its_kernels_says_what_to_call(tmp_path):
    """In a process of its own: kernels that were registered once serve every session."""
    path = tmp_path / "step.onnx"
    path.write_bytes(relu_gradient())
    done = warm.run("-c", STEP_WITHOUT_KERNELS, str(path))
    assert done.returncode == 0, done.stderr
    assert "ReluGrad node" in done.stdout
    assert "call bnexport.register(session_options, training=True) or use bnexport.TrainingSession" in done.stdout


def test_registering_in_any_order_and_twice():
    for calls in ((True,), (False, True), (True, False, True)):
        options = ort.SessionOptions()
        for training in calls:
            library.register(options, training=training)
        ort.InferenceSession(relu_gradient(), options)
        InferenceSession(forward_model(), sess_options=options)  # which registers once more
    for kinds in (("ops", "training"), ("training", "ops")):
        options = ort.SessionOptions()
        for kind in kinds:
            options.register_custom_ops_library(library.get_library_path(kind))
        ort.InferenceSession(relu_gradient(), options)


def test_a_step_s_graph_runs_where_the_model_says_what_it_needs(tmp_path):
    """`bnexport run` and the verification read the graph, and register what it has."""
    path = tmp_path / "step.onnx"
    path.write_bytes(relu_gradient())
    feeds = {"grad_output": np.ones((2, 3), np.float32), "input": np.array([[-1, 0, 1]] * 2, np.float32)}
    done = engine.run(path, feeds)
    assert done.library and done.outputs["grad_input"].tolist() == [[0, 0, 1]] * 2
    assert bnexport.verify(path, path).status == "passed"
