"""Finding and loading the compiled library; each thing that can be missing is one typed, clear error."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from bnexport.errors import LibraryError, MalformedModelError
from bnexport.native import capi, library
from bnexport.runtime.session import InferenceSession
from tests.support.node_models import forward_feeds, forward_model


def test_path_is_absolute_and_exists():
    path = Path(library.get_library_path())
    assert path.is_absolute() and path.is_file()


def test_environment_variable_names_the_library(monkeypatch, tmp_path):
    copy = tmp_path / "other.so"
    copy.write_bytes(Path(library.get_library_path()).read_bytes())
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(copy))
    assert library.get_library_path() == str(copy)


def test_environment_variable_names_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(tmp_path / "nothing.so"))
    with pytest.raises(LibraryError, match=r"BNEXPORT_LIBRARY: got '.*nothing\.so', expected an existing"):
        library.get_library_path()


def test_not_installed(monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delenv(library.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "runtime" / "library.py"))
    with pytest.raises(LibraryError, match=r"is not installed with bnexport; install bnexport with pip"):
        library.get_library_path()


def test_found_beside_the_package(monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delenv(library.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "runtime" / "library.py"))
    beside = tmp_path / "lib" / library._FILE_NAME
    beside.parent.mkdir()
    beside.write_bytes(b"")
    assert library.get_library_path() == str(beside)


def test_file_that_is_no_library(monkeypatch, tmp_path):
    wrong = tmp_path / "wrong.so"
    wrong.write_bytes(b"not a library")
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(wrong))
    with pytest.raises(LibraryError, match=r"ONNX Runtime .* cannot load .*wrong\.so"):
        library.register(ort.SessionOptions())
    capi.library.cache_clear()
    try:
        assert not capi.available()
        with pytest.raises(LibraryError, match=r"wrong\.so: cannot be loaded"):
            capi.library()
    finally:
        capi.library.cache_clear()


def test_registering_twice_is_the_same_as_once():
    once, twice = ort.SessionOptions(), ort.SessionOptions()
    library.register(once)
    library.register(twice)
    library.register(twice)
    feeds = forward_feeds(np.random.default_rng(0), (2, 3, 4, 5))
    sessions = [ort.InferenceSession(forward_model(), options) for options in (once, twice)]
    sessions.append(InferenceSession(forward_model(), session_options=twice))
    first, *others = (session.run(None, feeds) for session in sessions)
    for other in others:
        for value, expected in zip(other, first, strict=True):
            np.testing.assert_array_equal(value, expected)


def test_session_runs_a_model(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(forward_model())
    feeds = forward_feeds(np.random.default_rng(0), (2, 3, 4, 5))
    for source in (path, str(path), path.read_bytes()):
        session = InferenceSession(source, providers=["CPUExecutionProvider"])
        assert session.run(None, feeds)[0].shape == (2, 3, 4, 5)


def test_session_of_a_missing_file(tmp_path):
    with pytest.raises(MalformedModelError, match=r"nothing\.onnx' does not exist"):
        InferenceSession(tmp_path / "nothing.onnx")


def test_c_api_needs_neither_torch_nor_onnxruntime():
    code = (
        "import sys; from bnexport.native import capi; capi.instruction_set();"
        "print([name for name in ('torch', 'onnxruntime') if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("domains", "works"), [("mmcv", ("mmcv",)), ("ai.onnx", ("",)), ("mmcv,ai.onnx", ("mmcv", ""))]
)
def test_domains_can_be_left_to_another_library(monkeypatch, domains, works):
    monkeypatch.setenv("BNEXPORT_DOMAINS", domains)
    for domain in ("mmcv", ""):
        options = ort.SessionOptions()
        options.log_severity_level = 4
        library.register(options)
        if domain in works:
            ort.InferenceSession(forward_model(domain=domain), options)
        else:
            with pytest.raises(Exception, match="MMCVSyncBatchNorm"):
                ort.InferenceSession(forward_model(domain=domain), options)
