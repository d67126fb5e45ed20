"""The verifying process: a crash or a full memory in it hurts nobody. It serves one `FileJob` after the other.

It is started by `isolated_process`, talks over one socket, and ends when the socket does or after a minute
without work. Messages are JSON behind their length; a request brings descriptors of the files that hold
the models, opened and checked by the parent, so this process opens no model file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

LENGTH = struct.Struct("<Q")
MAX_DESCRIPTORS = 64
IDLE_SECONDS = 60.0


def main(descriptor: int) -> None:
    """Serves requests until the parent closes its end."""
    from bnexport.verification.file_job import FileJob

    # Whoever started this process is still at work on the models.
    with contextlib.suppress(ImportError):
        importlib.import_module("onnxruntime")
    with socket.socket(fileno=descriptor) as channel:
        while True:
            channel.settimeout(IDLE_SECONDS)
            try:
                request, descriptors = receive(channel)
            except (TimeoutError, EOFError):
                return
            channel.settimeout(None)
            try:
                result = FileJob(request, descriptors, lambda message: send(channel, message)).run()
            finally:
                for each in descriptors:
                    os.close(each)
            send(channel, {"result": result})


def send(channel: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message; descriptors go with its length."""
    data = json.dumps(message).encode()
    socket.send_fds(channel, [LENGTH.pack(len(data))], list(descriptors))
    channel.sendall(data)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive one message and its descriptors. Raises EOFError where the other end has closed."""
    head, descriptors, _, _ = socket.recv_fds(channel, LENGTH.size, MAX_DESCRIPTORS)
    head += _exactly(channel, LENGTH.size - len(head)) if head else b""
    if not head:
        raise EOFError
    return json.loads(_exactly(channel, LENGTH.unpack(head)[0])), list(descriptors)


def _exactly(channel: socket.socket, size: int) -> bytes:
    pieces = []
    while size:
        piece = channel.recv(min(size, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


if __name__ == "__main__":
    main(int(sys.argv[1]))
