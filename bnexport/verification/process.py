"""The parent's side of the verifying process: models out by descriptor, a verdict in, whatever happens.

One process is kept for the next request. It sees descriptors of the files that model_io checked, and one
temporary file for what lies in no file: graphs, small weights and inputs. A crash, a limit on its time or
the kernel's killing of it ends this process only, and becomes part of the result.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

import bnexport
from bnexport.errors import UsageError
from bnexport.model_io import ContainedTensor, Parts, limits
from bnexport.model_io.write import stream

_START = """import sys, json; sys.path[:] = json.loads(sys.argv[1]); from bnexport import startup; startup.prepare()
from bnexport.verification import file_job; file_job.main(sys.argv[2])"""
_ALIGNMENT = 64
IDLE_SECONDS = 60.0
# Files of one request; what lies in others goes into the temporary one.
_MOST_FILES = 64
# Signals that do not come from the engine.
_OUTSIDE = tuple(getattr(signal, name) for name in ("SIGKILL", "SIGTERM") if hasattr(signal, name))


class ProcessFailure(Exception):
    """The process ended, or took too long.

    stage: "reference", "candidate", "comparison", or "" before any. crashed: the engine did it, by a signal
    that is not the kernel's for a process that takes too much memory.
    """

    def __init__(self, reason: str, stage: str, engine: str, *, crashed: bool) -> None:
        super().__init__(reason)
        self.stage = stage
        self.engine = engine
        self.crashed = crashed


class Shipment(contextlib.ExitStack):
    """Files for a request. Use it as a context: the descriptors are closed at its end."""

    def __init__(self) -> None:
        super().__init__()
        self._loose = _loose_file(self)
        self._handed: list[Any] = [self._loose.fileno() if limits.HANDS_OVER else self._loose.name]
        self._files: dict[Any, int] = {}

    def model(
        self, parts: Parts, library: str | None, no_library: str | None, training: bool = False
    ) -> dict[str, Any]:
        """Put in a model: its file weights by descriptor, the rest in the temporary file."""
        weights = [self._tensor(name, tensor) for name, tensor in parts.weights.items()]
        start = self._loose.seek(0, os.SEEK_END)
        self._loose.write(parts.data)
        named = {"library": library, "no_library": no_library, "training": training}
        return {"data": (start, len(parts.data)), "weights": weights, **named}

    def array(self, name: str, value: Any) -> dict[str, Any]:
        """Put in an input."""
        array = np.asarray(value)
        if array.dtype == object or array.dtype.kind in "US":
            return {"name": name, "text": array.tolist()}
        start = self._aligned()
        self._loose.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return _entry(name, array.dtype.name, array.shape, 0, start)

    def ready(self) -> list[Any]:
        """Return the descriptors, or paths, once everything has been put in."""
        self._loose.flush()
        return self._handed

    def _tensor(self, name: str, tensor: ir.TensorProtocol) -> dict[str, Any]:
        dtype, shape = tensor.dtype.numpy().name, tensor.shape.numpy()
        if isinstance(tensor, ContainedTensor):
            if tensor.file not in self._files and len(self._handed) < _MOST_FILES:
                self._files[tensor.file] = len(self._handed)
                file = self.enter_context(tensor.file.open())
                self._handed.append(file.fileno() if limits.HANDS_OVER else tensor.file.path)
            if tensor.file in self._files:
                return _entry(name, dtype, shape, self._files[tensor.file], tensor.offset or 0)
        start = self._aligned()
        stream(tensor, self._loose)
        return _entry(name, dtype, shape, 0, start)

    def _aligned(self) -> int:
        end = self._loose.seek(0, os.SEEK_END)
        return self._loose.seek(end + -end % _ALIGNMENT)


def _loose_file(context: contextlib.ExitStack) -> BinaryIO:
    """Return a temporary file without a name; with one where files are handed over by their names."""
    if limits.HANDS_OVER:
        return context.enter_context(tempfile.TemporaryFile(prefix="bnexport-"))
    folder = context.enter_context(tempfile.TemporaryDirectory(prefix="bnexport-"))
    return context.enter_context(open(os.path.join(folder, "loose"), "w+b"))


def _entry(name: str, dtype: str, shape: Sequence[int], file: int, offset: int) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape), "file": file, "offset": offset}


def send(channel: Connection, message: dict[str, Any], files: Sequence[Any] = ()) -> None:
    """Send one message. files: descriptors; paths where descriptors cannot be handed over."""
    channel.send_bytes(json.dumps([message, len(files) if limits.HANDS_OVER else list(files)]).encode())
    for file in files if limits.HANDS_OVER else ():
        reduction.send_handle(channel, file, 0)


def receive(channel: Connection) -> tuple[dict[str, Any], list[int]]:
    """Receive one message and its descriptors. Raises EOFError where the other end has closed."""
    message, files = json.loads(channel.recv_bytes())
    if limits.HANDS_OVER:
        return message, [reduction.recv_handle(channel) for _ in range(files)]
    return message, [os.open(path, limits.READ) for path in files]


def send_arrays(channel: Connection, arrays: Sequence[np.ndarray]) -> None:
    """Send arrays behind a message; texts as NumPy's strings."""
    data = io.BytesIO()
    np.savez(data, *map(_plain, arrays))
    channel.send_bytes(data.getbuffer())


def _plain(array: np.ndarray) -> np.ndarray:
    """Return an array of a type that NumPy's files have."""
    if array.dtype == object:
        return array.astype(str)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def receive_arrays(channel: Connection) -> list[np.ndarray]:
    """Receive what `send_arrays` sent. Nothing of it is unpickled."""
    with np.load(io.BytesIO(channel.recv_bytes()), allow_pickle=False) as found:
        return [found[name] for name in found.files]


class EngineProcess:
    """A process that verifies, started by `start` or when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._errors: BinaryIO | None = None
        self._owner = 0
        self._used = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the process ahead of its first request, so that it loads its engine meanwhile; `ask` tells what failed."""
        with self._lock, contextlib.suppress(UsageError, OSError):
            self._ensure()

    def ask(self, request: Mapping[str, Any], files: Sequence[Any], timeout: float | None) -> dict[str, Any]:
        """Send a request and return the answer. Raises ProcessFailure."""
        with self._lock:
            try:
                self._ensure()
                answer = self._ask(request, files, timeout)
                self._used = time.monotonic()
                return answer
            except BaseException:
                self._end()
                raise

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ask(self, request: Mapping[str, Any], files: Sequence[Any], timeout: float | None) -> dict[str, Any]:
        assert self._channel is not None
        deadline = None if timeout is None else time.monotonic() + timeout
        stage, engine = "", ""
        try:
            send(self._channel, dict(request), files)
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._channel.poll(left):
                    raise ProcessFailure(f"it took longer than {timeout:g} s", stage, engine, crashed=False)
                message, _ = receive(self._channel)
                if "result" in message:
                    return {**message["result"], "arrays": receive_arrays(self._channel)}
                stage, engine = message["stage"], message["engine"]
        except (EOFError, OSError) as error:
            assert self._process is not None
            code = self._process.wait()
            crashed = code < 0 and -code not in _OUTSIDE
            raise ProcessFailure(self._cause(code), stage, engine, crashed=crashed) from error

    def _cause(self, code: int) -> str:
        """Return how the process ended."""
        if code < 0:
            known = -code in signal.valid_signals()
            return f"it was ended by signal {-code}" + (f" ({signal.Signals(-code).name})" if known else "")
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read(1 << 16).decode(errors="replace").strip().splitlines()
        return f"it ended with code {code}" + (f": {lines[-1][:300]}" if lines else "")

    def _ensure(self) -> None:
        # One that has waited for long may be about to leave.
        recent = time.monotonic() - self._used < IDLE_SECONDS / 2
        if self._process is not None and self._owner == os.getpid() and recent and self._process.poll() is None:
            return
        self._end()
        if not sys.executable:
            raise UsageError("there is no Python executable to start a process with; use verify=False")
        root = os.path.dirname(os.path.dirname(os.path.abspath(bnexport.__file__)))
        # Not the current folder, which may be a stranger's.
        path = [entry for entry in sys.path if entry] + [root]
        self._errors = tempfile.TemporaryFile(prefix="bnexport-")  # noqa: SIM115 - closed with the process
        self._channel, other = multiprocessing.Pipe()
        with other:
            command = [sys.executable, "-I", "-c", _START, json.dumps(path), str(other.fileno())]
            options, silent = _inherited(other.fileno()), subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=silent, stdout=silent, stderr=self._errors, **options)
        self._owner, self._used = os.getpid(), time.monotonic()

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        if self._errors is not None:
            self._errors.close()
        self._process = self._channel = self._errors = None


def _inherited(handle: int) -> dict[str, Any]:
    """Return the arguments of Popen with which a process inherits `handle`."""
    if sys.platform != "win32":
        return {"pass_fds": [handle]}
    os.set_handle_inheritable(handle, True)
    return {"startupinfo": subprocess.STARTUPINFO(lpAttributeList={"handle_list": [handle]})}


PROCESS = EngineProcess()
atexit.register(PROCESS.close)
