"""Start Python programs in processes of their own without paying for the imports each time.

One server per test process imports the heavy packages (torch, onnx, ...) once, but nothing of bnexport, and forks for each
program: 0.1 seconds of processor time instead of 3. `executable()` is a small program that stands for Python's: it asks the
server for a program with its own arguments, environment, folder and open files, passes signals on, and ends as the program does;
the program ends with it. Only the interpreter's own teardown, a second for torch, is left out.

Not for programs that show what gets imported, or how much memory a process takes from its start: they need
`subprocess` and `sys.executable`. With BNEXPORT_COLD=1 everything here starts as they do.
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import linecache
import multiprocessing
import multiprocessing.process
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COLD = os.environ.get("BNEXPORT_COLD") == "1"
# ONNX Runtime is not among them: its import starts a thread, which a fork would not have.
PRELOAD = (
    "numpy torch torch._dynamo torch.export torch.onnx torch.onnx._internal.exporter._core torch.utils.data onnx onnx_ir "
    "onnxscript safetensors.numpy rich.console typer"
)
STAND_IN = """#!{python} -IS
import json, os, signal, socket, sys

def is_inherited(number):  # Python's own files are closed in children
    try:
        return number < 3 or os.get_inheritable(number)
    except OSError:
        return False

caught = {{signal.SIGINT, signal.SIGTERM}}
signal.pthread_sigmask(signal.SIG_BLOCK, caught)  # until there is a program to pass them on to
files = [number for number in map(int, os.listdir("/proc/self/fd")) if is_inherited(number)]
request = os.memfd_create("request")  # may be larger than a packet
asked = dict(arguments=sys.argv[1:], cwd=os.getcwd(), environment=dict(os.environ), files=files)
os.write(request, json.dumps(asked).encode())
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect({address!r})
socket.send_fds(connection, [b"start"], [request, *files])
pid = int(connection.recv(64))
for number in caught:
    signal.signal(number, lambda number, _: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)
code = int(connection.recv(64))
if code >= 0:
    os._exit(code)
if -code != signal.SIGKILL:
    signal.signal(-code, signal.SIG_DFL)
os.kill(os.getpid(), -code)
"""


@functools.cache
def executable() -> str:
    """A program that stands for Python's; the first call starts the server, unless BNEXPORT_WARM names one's program."""
    if COLD:
        return sys.executable
    if "BNEXPORT_WARM" in os.environ:
        return os.environ["BNEXPORT_WARM"]
    stand_in = Path(
        tempfile.mkdtemp(prefix="warm"), "python"
    )  # the server removes it, since a killed test process cannot
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(stand_in)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    # Its standard input is a pipe of ours: with us it ends, however we end.
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT)
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the server of warm processes did not start"
    atexit.register(server.wait)
    atexit.register(server.stdin.close)
    return str(stand_in)


def start(*arguments: str | Path, **options: Any) -> subprocess.Popen[Any]:
    """As `subprocess.Popen([sys.executable, *arguments], ...)`.

    The program has a process of its own: when this one is killed, it is, too, a moment later.
    """
    return subprocess.Popen([executable(), *map(str, arguments)], **{"stdin": subprocess.DEVNULL, **options})


def run(*arguments: str | Path, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)`."""
    options = {"stdin": subprocess.DEVNULL, "timeout": 600, **options}
    return subprocess.run([executable(), *map(str, arguments)], check=check, capture_output=True, text=True, **options)


def script(path: Path, *before: str) -> None:
    """Write a program to `path` that stands for `python BEFORE...` in shell scripts."""
    path.write_text(f'#!/bin/sh\nexec "{executable()}" {" ".join(before)} "$@"\n')
    path.chmod(0o755)


# The server.


def _serve(stand_in: Path) -> dict[str, Any]:
    """Answer requests until standard input ends; returns in the processes of programs only, with the request."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = str(stand_in.with_name("socket"))
    listener.bind(address)
    listener.listen(64)
    for name in PRELOAD.split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    runpy.run_path(str(ROOT / "tests/support/torch_registry.py"))["remember"](opsets=(18,))
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a package of PRELOAD starts threads, {threads - 1} of them: a fork would not have them"
    gc.collect()
    gc.freeze()  # what all share is not written to by a collection
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    python = stand_in.with_name("base")
    python.symlink_to(Path(sys.executable).resolve())  # the first line of a script takes no path with a space
    stand_in.write_text(STAND_IN.format(python=python, address=address))
    stand_in.chmod(0o755)
    print("ready", flush=True)
    while True:
        if 0 in select.select([0, listener], [], [])[0]:
            shutil.rmtree(stand_in.parent)
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _keep(connection)
        connection.close()


def _keep(connection: socket.socket) -> dict[str, Any]:
    """Fork for the program of a request, and tell how it ends; kill it where the server or who asked has gone."""
    _, files, _, _ = socket.recv_fds(connection, 64, 250)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork() if files else os._exit(0)
    if pid == 0:
        connection.close()
        return _receive(files)
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):  # who asked may have gone, which is seen below
        connection.send(str(pid).encode())
    handle = os.pidfd_open(pid)
    if handle not in select.select([handle, connection, 0], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.send(str(code).encode())
    os._exit(0)


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
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.__stderr__ = sys.stderr  # type: ignore[misc]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    rest = asked["arguments"]
    while rest[0] in ("-u", "-B", "-s"):
        rest = rest[1:]
    kind, *rest = rest
    sys.path[:0] = [it for it in asked["environment"].get("PYTHONPATH", "").split(os.pathsep) if it]
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    module = sys.modules["__main__"] = types.ModuleType("__main__")
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
    _end(_serve(Path(sys.argv[2])), sys.argv[2])
