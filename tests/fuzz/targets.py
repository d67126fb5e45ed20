"""What is fuzzed: functions that take bytes, and must end in one of our errors or in a sound result.

A target returns whether the input was accepted. Anything but a BnexportError of one printable line is a finding:
another exception, an output that does not load again, a file where there should be none, a crash, more than
SECONDS, or more than MEMORY bytes over what the process had when it began.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime

from bnexport.errors import BnexportError
from bnexport.folding import fold, inspect
from bnexport.model_io import load, save
from bnexport.native import capi
from bnexport.runtime import engine
from tests.fuzz import seeds

SECONDS = 10.0
MEMORY = 2 * 2**30
SECRET = b"nobody may read this" * 500


# How engines say that the memory is full.
_MEMORY_SIGNS = ("more memory than there is", "not enough memory", "bad_alloc", "Failed to allocate memory")


class Finding(Exception):
    """A promise that was broken without an exception of its own."""


class Target(NamedTuple):
    """run takes an input and a folder with nothing in it but what `prepare` put there."""

    name: str
    seeds: Callable[[], Iterator[tuple[str, bytes]]]
    prepare: Callable[[], None]
    run: Callable[[bytes, Path], bool]


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """A folder in memory where there is one, with the files that models may name and a secret beside it."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as parent:
        (Path(parent) / "secret").write_bytes(SECRET)
        folder = Path(parent) / "models"
        folder.mkdir()
        (folder / "data").write_bytes(bytes(seeds.DATA_BYTES))
        yield folder


@contextlib.contextmanager
def _checked_errors() -> Iterator[list[BnexportError]]:
    """Collects a refusal, which must be one printable line and not for want of memory."""
    refusals: list[BnexportError] = []
    try:
        yield refusals
    except BnexportError as error:
        text = str(error)
        if not text.isprintable() or len(text) > 2000:
            raise Finding(f"an error that is not one printable line: {text!r}") from error
        if any(sign in text for sign in _MEMORY_SIGNS):
            raise Finding(f"the memory ran out: {text}") from error
        refusals.append(error)


def load_fold_save(data: bytes, folder: Path) -> bool:
    """A model file through load, inspect, fold and save, and what was written through load and save again."""
    source, target, again = folder / "model.onnx", folder / "out.onnx", folder / "again.onnx"
    source.write_bytes(data)
    try:
        with _checked_errors() as refusals:
            inspect(source)
            fold(source, target, verify=False, overwrite=True)
        if not refusals:
            try:
                save(load(target), again)
                load(again)
            except BnexportError as error:
                raise Finding(f"what was written does not load again: {error}") from error
        expected = {"model.onnx", "data"}
        if not refusals:
            expected |= {"out.onnx", "again.onnx"}
        found = set(os.listdir(folder))
        if found - {"out.onnx.data", "again.onnx.data"} != expected or len(os.listdir(folder.parent)) != 2:
            raise Finding(f"files {sorted(found)}, expected {sorted(expected)}")
        for name in found - {"model.onnx", "data"}:
            if SECRET[:40] in (folder / name).read_bytes():
                raise Finding("a file outside the folder was read")
    finally:
        for name in set(os.listdir(folder)) - {"data"}:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
    return not refusals


@capi.ALL_GATHER
def _echo(_, send, receive, count, error, capacity):  # type: ignore[no-untyped-def]
    """Two processes that hold the same data."""
    for rank in range(2):
        ctypes.memmove(receive + 8 * count * rank, send, 8 * count)
    return 0


def prepare_nodes() -> None:
    prepare_models()
    onnxruntime.set_default_logger_severity(4)
    capi.register_group("echo", 2, 0, _echo)


_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
_SIZES = (0, 1, 2, 3, 3, 3, 5, 17)


def run_nodes(data: bytes, folder: Path) -> bool:
    """Nodes of ours in ONNX Runtime, with random arrays of the declared types and of odd shapes."""
    path = folder / "model.onnx"
    path.write_bytes(data)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with _checked_errors() as refusals:
        loaded = engine.load(path, options)
        generator = np.random.default_rng(zlib.crc32(data))
        feeds, sizes = {}, {}
        for value in loaded.runtime.session.get_inputs():
            if value.type not in _TYPES:
                return True  # NumPy has no such arrays; the session was made.
            shape = [
                size
                if isinstance(size, int) and 0 <= size <= 64
                else sizes.setdefault(size, int(generator.choice(_SIZES)))
                for size in value.shape
            ]
            if len(shape) > 8 or generator.random() < 0.03:
                shape = [int(generator.choice(_SIZES)) for _ in range(int(generator.integers(0, 6)))]
            if np.prod(shape, dtype=np.float64) > 2**20:
                shape = [1] * len(shape)
            feeds[value.name] = (generator.standard_normal(shape) * 3).astype(_TYPES[value.type])
        loaded.run(feeds)
    return not refusals


def prepare_models() -> None:
    logging.disable(logging.WARNING)  # onnx-ir's, for odd models


TARGETS = {
    target.name: target
    for target in (
        Target("models", seeds.models, prepare_models, load_fold_save),
        Target("nodes", seeds.nodes, prepare_nodes, run_nodes),
    )
}
