"""A cluster of gloo processes on 127.0.0.1 that outlives a test: start once, run many functions.

`Cluster.run(size, function, *arguments)` calls `function(group, *arguments)` in the first `size`
processes, with the group of those processes, and returns the results in rank order. A function that
raises yields its exception as a `Raised`.
"""

import dataclasses
import datetime
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import warm

# Long, for a shared machine may stand still for half a minute: what waits for a peer that comes waits no longer for it.
# Tests of ranks that do not come make a group with a timeout of its own (`short_group`), once all have started.
TIMEOUT = datetime.timedelta(seconds=300)
ROOT = Path(__file__).resolve().parents[2]
MEMBER = """
import sys
from multiprocessing.connection import Connection
from tests.support import cluster
cluster._member(Connection(int(sys.argv[1])))
"""


@dataclasses.dataclass(frozen=True)
class Raised:
    type: str
    message: str
    trace: str


def _start(function: Callable[..., None], *arguments: Any) -> tuple[Connection, subprocess.Popen[Any]]:
    """Call `function(pipe, *arguments)` in a process of its own; the other end of the pipe, and the process."""
    ours, theirs = Pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with theirs:
        file = theirs.fileno()
        process = warm.start("-c", MEMBER, str(file), cwd=ROOT, env=environment, pass_fds=(file,))
    _send(ours, (function, arguments))
    return ours, process


def _send(pipe: Connection, what: Any) -> None:
    """Tensors by value: a pipe's own pickler would share their memory, which ends with the process."""
    pipe.send_bytes(pickle.dumps(what))


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(TIMEOUT.total_seconds() + 60):
        raise TimeoutError("a process of the cluster does not answer")
    return pickle.loads(pipe.recv_bytes())


def _member(pipe: Connection) -> None:
    function, arguments = _receive(pipe)
    function(pipe, *arguments)


def serve_store() -> dist.TCPStore:
    """Start a store on a port that the operating system chooses; it serves as long as the object lives."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def join(rank: int, size: int, port: int) -> None:
    """Join the group of `size` processes that the store on `port` brings together."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def short_group(size: int, seconds: float) -> dist.ProcessGroup:
    """A group of all processes whose collectives fail after `seconds`; it begins once everyone is there."""
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=seconds))
    dist.barrier()
    return group


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    join(rank, size, port)
    groups = {count: dist.new_group(list(range(count)), timeout=TIMEOUT) for count in range(1, size)}
    groups[size] = dist.group.WORLD
    _send(pipe, "ready")
    while (job := pickle.loads(pipe.recv_bytes())) is not None:
        count, function, arguments = job
        try:
            result = function(groups[count], *arguments)
        except Exception as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        _send(pipe, result)
    dist.destroy_process_group()


class Cluster:
    def __init__(self, size: int) -> None:
        self.store = serve_store()
        started = [_start(_serve, rank, size, self.store.port) for rank in range(size)]
        self.pipes, self.processes = zip(*started, strict=True)
        for pipe in self.pipes:
            assert _receive(pipe) == "ready"

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self.pipes[:size]:
            _send(pipe, (size, function, arguments))
        return [_receive(pipe) for pipe in self.pipes[:size]]

    def call(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """As run, but a raised exception fails the test."""
        results = self.run(size, function, *arguments)
        for rank, result in enumerate(results):
            assert not isinstance(result, Raised), f"rank {rank}: {result.trace}"
        return results

    def close(self) -> None:
        for pipe in self.pipes:
            try:
                _send(pipe, None)
            except OSError:
                continue
        for process in self.processes:
            _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_once(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 400) -> list[Any]:
    """`function(rank, size, port, *arguments)` in fresh processes, for tests that end them.

    Returns results in rank order, None for a process that died.
    """
    store = serve_store()
    started = [_start(_once, rank, size, store.port, function, arguments) for rank in range(size)]
    results = []
    for pipe, _ in started:
        try:
            results.append(pickle.loads(pipe.recv_bytes()) if pipe.poll(timeout) else "no answer")
        except EOFError:
            results.append(None)
    for _, process in started:
        _end(process)
    return results


def _once(
    pipe: Connection, rank: int, size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    try:
        result = function(rank, size, port, *arguments)
    except Exception as error:
        result = Raised(type(error).__name__, str(error), traceback.format_exc())
    _send(pipe, result)
    # Leave without waiting for peers that are gone.
    os._exit(0)
