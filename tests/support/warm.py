"""Start Python programs in processes of their own without paying for the imports each time.

One server per test process imports the heavy packages (torch, onnx, ...) once, but nothing of bnexport, and forks for
each program: 0.1 seconds of processor time instead of 3. The program finds the arguments, the environment, the folder
and the standard streams that it was given, and ends with its exit handlers run; only the interpreter's own teardown, a
second for torch, is left out.

Not for programs that show what gets imported, or how much memory a process takes from its start: they need
`subprocess` and `sys.executable`. With BNEXPORT_COLD=1 everything here starts as they do.

    done = warm.run("-m", "bnexport", "doctor", cwd=folder)      # as subprocess.run(..., capture_output=True, text=True)
    process = warm.start("-c", code, stdout=subprocess.PIPE)     # as subprocess.Popen; kill() and wait() work
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import linecache
import multiprocessing
import multiprocessing.process
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
COLD = os.environ.get("BNEXPORT_COLD") == "1"
# ONNX Runtime is not among them: its import starts a thread, which a fork would not have.
PRELOAD = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.export",
    "torch.onnx",
    "torch.onnx._internal.exporter._core",
    "torch.utils.data",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "safetensors.numpy",
    "rich.console",
    "typer",
)


class Process:
    """A started program: what `subprocess.Popen` offers and the tests use."""

    def __init__(self, connection: socket.socket, pid: int, **streams: IO[Any] | None) -> None:
        self._connection, self.pid = connection, pid
        self.stdin, self.stdout, self.stderr = (streams[name] for name in ("stdin", "stdout", "stderr"))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            answer = self._connection.recv(64)
            assert answer, "the server of warm processes is gone"
            self.returncode = int(answer)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str | None, str | None]:
        texts: dict[str, str] = {}

        def read(name: str, stream: IO[str]) -> None:
            with stream:
                texts[name] = stream.read()

        streams = {"stdout": self.stdout, "stderr": self.stderr}
        threads = [threading.Thread(target=read, args=it, daemon=True) for it in streams.items() if it[1] is not None]
        for thread in threads:
            thread.start()
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                self.stdin.write(input or "")
        self.wait(timeout)
        for thread in threads:
            thread.join()
        return texts.get("stdout"), texts.get("stderr")


class _Server:
    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="warm"))  # the server removes it, since a killed test process cannot
        self.address = str(folder / "socket")
        # Its standard input is a pipe of ours: with us it ends, however we end.
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve", self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", "the server of warm processes did not start"
        _write_stand_in(folder / "python", self.address, [])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


_server: _Server | None = None


def preload() -> None:
    """Import in this process what the server has imported."""
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def address() -> str:
    """The path of the server's socket; the first call starts the server, unless BNEXPORT_WARM names one."""
    if "BNEXPORT_WARM" in os.environ:
        return os.environ["BNEXPORT_WARM"]
    global _server  # noqa: PLW0603  (one per process, started when it is needed)
    if _server is None:
        _server = _Server()
        atexit.register(_server.close)
    return _server.address


def request(
    path: str, arguments: list[str], cwd: str, environment: Mapping[str, str], files: Mapping[int, int]
) -> tuple[socket.socket, int]:
    """Ask the server on `path` for a program: the connection, and its pid. It is killed when the connection is closed.

    files: its open files, streams included, by number, with their numbers here.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    asked = {"arguments": arguments, "cwd": cwd, "environment": dict(environment), "files": list(files)}
    with tempfile.TemporaryFile() as message:  # larger than what a packet may hold
        message.write(json.dumps(asked).encode())
        message.flush()
        socket.send_fds(connection, [b"start"], [message.fileno(), *files.values()])
        return connection, int(connection.recv(64))


def start(
    *arguments: str | Path,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
    text: bool = False,
    pass_fds: Sequence[int] = (),
) -> Any:
    """As `subprocess.Popen([sys.executable, *arguments], ...)`."""
    words = [str(argument) for argument in arguments]
    if COLD:
        command = [sys.executable, *words]
        streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr, "text": text}
        return subprocess.Popen(command, cwd=cwd, env=env, pass_fds=pass_fds, **streams)  # type: ignore[call-overload]
    theirs = {number: number for number in pass_fds}
    ours: dict[str, Any] = {}
    opened = []
    for number, (name, kind) in enumerate((("stdin", stdin), ("stdout", stdout), ("stderr", stderr))):
        ours[name] = None
        if kind == subprocess.PIPE:
            ends = os.pipe() if number else os.pipe()[::-1]
            mode = ("r" if number else "w") + ("" if text else "b")
            ours[name] = open(ends[0], mode, buffering=1 if text else -1)  # noqa: SIM115
            theirs[number] = ends[1]
            opened.append(ends[1])
        elif kind == subprocess.DEVNULL:
            opened.append(os.open(os.devnull, os.O_RDWR))
            theirs[number] = opened[-1]
        else:
            theirs[number] = number if kind is None else theirs[1] if kind == subprocess.STDOUT else kind
    try:
        connection, pid = request(address(), words, str(cwd or os.getcwd()), os.environ if env is None else env, theirs)
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return Process(connection, pid, **ours)


def run(
    *arguments: str | Path,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = 600,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)`."""
    process = start(*arguments, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        raise
    done = subprocess.CompletedProcess([str(it) for it in arguments], process.returncode, out, err)
    if check and done.returncode:
        raise subprocess.CalledProcessError(done.returncode, done.args, out, err)
    return done


def script(path: Path, *before: str) -> None:
    """Write a program to `path` that stands for `python BEFORE...` in shell scripts."""
    if COLD:
        words = " ".join(before)
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        path.chmod(0o755)
    else:
        _write_stand_in(path, address(), list(before))


def _write_stand_in(path: Path, server: str, before: list[str]) -> None:
    path.write_text(
        f"#!{sys.executable} -IS\n"
        "import runpy, sys\n"
        f"warm = runpy.run_path({str(Path(__file__).resolve())!r})\n"
        f"sys.exit(warm['_stand_in']({server!r}, {before!r} + sys.argv[1:]))\n"
    )
    path.chmod(0o755)


def executable() -> str:
    """A program that stands for Python's, with as short a start."""
    return sys.executable if COLD else str(Path(address()).with_name("python"))


def _stand_in(path: str, arguments: list[str]) -> int:
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [number for number in files if number < 3 or _is_inherited(number)]
    connection, pid = request(path, arguments, os.getcwd(), os.environ, dict(zip(files, files)))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda caught, _: os.kill(pid, caught))
    code = int(connection.recv(64))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    return code


def _is_inherited(number: int) -> bool:
    """True for what whoever started this process left open; Python's own files are closed in children."""
    with contextlib.suppress(OSError):
        return os.get_inheritable(number)
    return False


# The server.


def _serve(path: str) -> dict[str, Any]:
    """Answer requests until standard input ends; returns in the processes of programs only, with the request."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    preload()
    runpy.run_path(str(ROOT / "tests/support/torch_registry.py"))["remember"](opsets=(18,))
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a package of PRELOAD starts threads, {threads - 1} of them: a fork would not have them"
    gc.collect()
    gc.freeze()  # what all share is not written to by a collection
    print("ready", flush=True)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    programs: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process
    while True:
        for key, _ in selector.select():
            if key.fd == 0:
                for pid, _ in programs.values():
                    os.kill(pid, signal.SIGKILL)
                shutil.rmtree(Path(path).parent)
                os._exit(0)
            if key.fd in programs:
                pid, connection = programs.pop(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):
                    connection.send(str(code).encode())
                selector.unregister(key.fd)
                if connection in selector.get_map():
                    selector.unregister(connection)
                os.close(key.fd)
                connection.close()
            elif key.fileobj is not listener:
                # Who asked has closed the connection. The end of the program is seen above.
                for pid, connection in programs.values():
                    if connection is key.fileobj:
                        selector.unregister(connection)
                        os.kill(pid, signal.SIGKILL)
            else:
                connection, _ = listener.accept()
                _, descriptors, _, _ = socket.recv_fds(connection, 64, 250)
                if not descriptors:  # it went away before it asked
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    listener.close()
                    connection.close()
                    for handle, (_, other) in programs.items():
                        os.close(handle)
                        other.close()
                    return _receive(descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                connection.send(str(pid).encode())
                handle = os.pidfd_open(pid)
                programs[handle] = pid, connection
                for watched in (handle, connection):
                    selector.register(watched, selectors.EVENT_READ)


def _receive(descriptors: list[int]) -> dict[str, Any]:
    """The request in the first of the files; the others get the numbers that it says."""
    with open(descriptors[0], "rb") as message:
        message.seek(0)
        asked = json.load(message)
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 300) for descriptor in descriptors[1:]]
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    for number, descriptor in zip(asked["files"], high, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return asked


def _become(asked: dict[str, Any], stand_in: str) -> None:
    """Run the program of a request as this process's `__main__`."""
    os.chdir(asked["cwd"])
    multiprocessing.process.ORIGINAL_DIR = asked["cwd"]  # type: ignore[attr-defined]
    multiprocessing.set_executable(stand_in)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    rest = asked["arguments"]
    while rest[0] in ("-u", "-B", "-s"):
        rest = rest[1:]
    kind, *rest = rest
    path = [it for it in asked["environment"].get("PYTHONPATH", "").split(os.pathsep) if it]
    sys.path[:0] = path
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if kind == "-c":
        sys.path.insert(0, "")
        code, name, sys.argv = rest[0], "<string>", ["-c", *rest[1:]]
    else:
        sys.path.insert(0, str(Path(kind).resolve().parent))
        code, name, sys.argv = Path(kind).read_text(), str(Path(kind).absolute()), [kind, *rest]
        module.__file__ = name
    linecache.cache.pop(name, None)
    exec(compile(code, name, "exec"), module.__dict__)


def _end(asked: dict[str, Any], stand_in: str) -> None:
    """Run the program of a request, and end as the interpreter would."""
    code = 0
    try:
        _become(asked, stand_in)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if code == 1 and error.code != 1:
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__" and sys.argv[1:2] == ["--serve"]:
    sys.path.pop(0)  # tests/
    _end(_serve(sys.argv[2]), str(Path(sys.argv[2]).with_name("python")))
