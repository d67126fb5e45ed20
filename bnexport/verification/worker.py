"""The verifying process: its parent survives if it crashes or fills the memory. It serves one `FileJob` after the other.

It is started by `process`, talks over one end of a `multiprocessing.Pipe`, and ends when the other end closes or after a
minute without work. Messages are JSON; a request brings descriptors of the files that hold the models, opened and checked
by the parent, so this process opens no model file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Sequence
from multiprocessing import connection, reduction
from typing import Any

from bnexport.model_io import limits

IDLE_SECONDS = 60.0


def main(handle: str) -> None:
    """Serves requests until the parent closes its end. handle: of this end of the pipe."""
    from bnexport.verification.file_job import FileJob

    # The parent is still reading the models: wait for its first job.
    with contextlib.suppress(ImportError):
        importlib.import_module("onnxruntime")
    channel = getattr(connection, "PipeConnection", connection.Connection)(int(handle))
    while channel.poll(IDLE_SECONDS):
        try:
            request, descriptors = receive(channel)
        except EOFError:
            return
        try:
            result = FileJob(request, descriptors, lambda message: send(channel, message)).run()
        finally:
            for each in descriptors:
                os.close(each)
        send(channel, {"result": result})


def send(channel: connection.Connection, message: dict[str, Any], files: Sequence[Any] = ()) -> None:
    """Send one message. files: descriptors; paths where descriptors cannot be handed over."""
    channel.send_bytes(json.dumps([message, len(files) if limits.HANDS_OVER else list(files)]).encode())
    for file in files if limits.HANDS_OVER else ():
        reduction.send_handle(channel, file, 0)


def receive(channel: connection.Connection) -> tuple[dict[str, Any], list[int]]:
    """Receive one message and its descriptors. Raises EOFError where the other end has closed."""
    message, files = json.loads(channel.recv_bytes())
    if limits.HANDS_OVER:
        return message, [reduction.recv_handle(channel) for _ in range(files)]
    return message, [os.open(path, limits.READ) for path in files]
