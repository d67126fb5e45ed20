"""What is fuzzed: bytes of a model, which must end in one of our errors or in a sound result.

Anything but a BnexportError of one printable line is a finding: another exception, an output that does not load again, a
file where there should be none, a crash, more than SECONDS, or more than MEMORY bytes over what the process had when it began.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bnexport.errors import BnexportError
from bnexport.folding import fold, inspect
from bnexport.model_io import load, save
from tests.fuzz import seeds

SECONDS = 20.0
MEMORY = 2 * 2**30
SECRET = b"nobody may read this" * 500
# How engines say that the memory is full.
_MEMORY_SIGNS = ("more memory than there is", "not enough memory", "bad_alloc", "Failed to allocate memory")


class Finding(Exception):
    """A promise that was broken without an exception of its own."""


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


def load_fold_save(data: bytes, folder: Path) -> bool:
    """A model file through load, inspect, fold and save, and what was written through load and save again.

    Return whether it was accepted. folder: of `work_folder`.
    """
    source, target, again = folder / "model.onnx", folder / "out.onnx", folder / "again.onnx"
    source.write_bytes(data)
    try:
        inspect(source)
        fold(source, target, verify=False, overwrite=True)
        expected = {"model.onnx", "data", "out.onnx", "again.onnx"}
        try:
            save(load(target), again)
            load(again)
        except BnexportError as error:
            raise Finding(f"what was written does not load again: {error}") from error
    except BnexportError as error:
        expected = {"model.onnx", "data"}
        text = str(error)
        if not text.isprintable() or len(text) > 2000:
            raise Finding(f"an error that is not one printable line: {text!r}") from error
        if any(sign in text for sign in _MEMORY_SIGNS):
            raise Finding(f"the memory ran out: {text}") from error
    finally:
        found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for name in set(os.listdir(folder)) - {"data"}:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
    if found.keys() - {"out.onnx.data", "again.onnx.data"} != expected or len(os.listdir(folder.parent)) != 2:
        raise Finding(f"files {sorted(found)}, expected {sorted(expected)}")
    if any(SECRET[:40] in content for name, content in found.items() if name not in ("model.onnx", "data")):
        raise Finding("a file outside the folder was read")
    return "out.onnx" in expected
