"""Runs an exported file in a process of its own, without bnexport."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bnexport.errors import MissingDependencyError, VerificationError
from bnexport.verification.torch_outputs import Array, to_array

_RUNNER = Path(__file__).with_name("fresh_process_runner.py")
_TIMEOUT = 600  # seconds: a large model on a busy machine


class FreshProcess:
    """Runs a TorchScript or pt2 file; each call of `run` starts a process. kind: "torchscript" or "pt2".

    Raises VerificationError where the file cannot be loaded.
    """

    def __init__(self, file: Path, kind: str) -> None:
        self.name = f"torch {torch.__version__}, a process without bnexport"
        self._file, self._kind = file, kind

    def run(self, feeds: Sequence[tuple[torch.Tensor, ...]]) -> list[list[Array] | str]:
        if not feeds:
            return []
        return [
            result if isinstance(result, str) else [to_array(value) for value in result]
            for result in _run_elsewhere(self._file, self._kind, list(feeds))
        ]


def _run_elsewhere(file: Path, kind: str, feeds: list[tuple[torch.Tensor, ...]]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        inputs, outputs = Path(folder, "inputs.pt"), Path(folder, "outputs.pt")
        torch.save(feeds, inputs)
        command = [sys.executable, "-c", _RUNNER.read_text(), kind, str(file.resolve()), str(inputs), str(outputs)]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT, check=False, errors="replace"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MissingDependencyError(f"the exported file cannot be checked in a new process: {error}") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            last = lines[-1] if lines else f"exit code {done.returncode}"
            raise VerificationError(f"torch cannot load and run the exported file without bnexport: {last}")
        results: list[Any] = torch.load(outputs, weights_only=True, map_location="cpu")
        return results
