"""Runs an exported file in a process of its own, without bnexport."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bnexport.errors import MissingDependencyError, VerificationError
from bnexport.modules.tensors import Array, to_array
from bnexport.runtime.engine import EngineFailure

_RUNNER = Path(__file__).with_name("fresh_process_runner.py")
_TIMEOUT = 600  # seconds: a large model on a busy machine


class FreshProcess(contextlib.ExitStack):
    """An engine for a TorchScript or pt2 file. Use it as a context: the process ends with it.

    kind: "torchscript" or "pt2". `run` raises VerificationError where the file cannot be loaded.
    """

    def __init__(self, file: Path, kind: str) -> None:
        super().__init__()
        self.name = f"torch {torch.__version__}, a process without bnexport"
        self._folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        command = [sys.executable, "-c", _RUNNER.read_text(), kind, str(file.resolve()), str(self._folder)]
        self._errors, pipe = self.enter_context((self._folder / "errors").open("w+b")), subprocess.PIPE
        try:
            started = subprocess.Popen(command, 0, None, pipe, pipe, self._errors, cwd=self._folder)
        except OSError as error:
            self.close()
            raise _unavailable(error) from error
        self._process = self.enter_context(started)
        self.callback(self._process.kill)

    def run(self, feeds: Mapping[str, torch.Tensor], outputs: Sequence[str]) -> list[Array]:
        """Return all outputs. Raises EngineFailure."""
        # Without attributes that torch.export may have left on a caller's tensor, which the other process refuses.
        torch.save([value.detach() for value in feeds.values()], self._folder / "inputs.pt")
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        with contextlib.suppress(BrokenPipeError):
            asked.write(b"\n")
        lines: list[bytes] = []
        # A pipe cannot be waited for on every system.
        waiting = threading.Thread(target=lambda: lines.append(answers.readline()), daemon=True)
        waiting.start()
        waiting.join(_TIMEOUT)
        if not lines:
            raise _unavailable(TimeoutError(f"it takes longer than {_TIMEOUT} s"))
        if not lines[0]:
            code = self._process.wait()
            self._errors.seek(0)
            written = self._errors.read().decode(errors="replace").strip().splitlines()
            last = written[-1] if written else f"exit code {code}"
            raise VerificationError(f"torch cannot load and run the exported file without bnexport: {last}")
        result = torch.load(self._folder / "outputs.pt", weights_only=True, map_location="cpu")
        if isinstance(result, str):
            raise EngineFailure(self.name, "run", RuntimeError(result))
        return list(map(to_array, result))


def _unavailable(error: OSError) -> MissingDependencyError:
    return MissingDependencyError(f"the exported file cannot be checked in a new process: {error}")
