"""A cluster of gloo processes on 127.0.0.1 that outlives a test: start once, run many functions.

`Cluster.run(size, function, *arguments)` calls `function(group, *arguments)` in the first `size`
processes, with the group of those processes, and returns the results in rank order. A function that
raises yields its exception as a `Raised`.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Long: a shared machine may stand still for half a minute. Tests of dead ranks bring their own.
TIMEOUT = datetime.timedelta(seconds=120)


@dataclasses.dataclass(frozen=True)
class Raised:
    type: str
    message: str
    trace: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join(rank: int, size: int, port: int, timeout: datetime.timedelta = TIMEOUT) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timeout)


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    join(rank, size, port)
    groups = {count: dist.new_group(list(range(count)), timeout=TIMEOUT) for count in range(1, size)}
    groups[size] = dist.group.WORLD
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        count, function, arguments = job
        try:
            result = function(groups[count], *arguments)
        except Exception as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(result)
    dist.destroy_process_group()


class Cluster:
    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            assert _receive(pipe) == "ready"

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self.pipes[:size]:
            pipe.send((size, function, arguments))
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
                pipe.send(None)
            except OSError:
                continue
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _receive(pipe: Any) -> Any:
    if not pipe.poll(180):
        raise TimeoutError("a process of the cluster does not answer")
    return pipe.recv()


def run_once(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Any]:
    """`function(rank, size, port, *arguments)` in fresh processes, for tests that end them.

    Returns results in rank order, None for a process that died.
    """
    context = mp.get_context("spawn")
    port = free_port()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_once, args=(rank, size, port, theirs, function, arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results = []
    for pipe in pipes:
        try:
            results.append(pipe.recv() if pipe.poll(timeout) else "no answer")
        except EOFError:
            results.append(None)
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
    return results


def _once(rank: int, size: int, port: int, pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(rank, size, port, *arguments)
    except Exception as error:
        result = Raised(type(error).__name__, str(error), traceback.format_exc())
    pipe.send(result)
    # Leave without waiting for peers that are gone.
    os._exit(0)
