"""The verifying process: its parent survives if it crashes or fills the memory. It serves one `FileJob` after the other.

It is started by `isolated_process`, talks over one socket, and ends when the socket does or after a minute
without work. Messages are JSON behind their length; a request brings descriptors of the files that hold
the models, opened and checked by the parent, so this process opens no model file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

from bnexport.model_io import limits

LENGTH = struct.Struct("<Q")
MAX_DESCRIPTORS = 64
IDLE_SECONDS = 60.0


def main(address: str) -> None:
    """Serves requests until the parent closes its end. address: a descriptor, or host:port:secret."""
    from bnexport.verification.file_job import FileJob

    # The parent is still reading the models: wait for its first job.
    with contextlib.suppress(ImportError):
        importlib.import_module("onnxruntime")
    with _connect(address) as channel:
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


def _connect(address: str) -> socket.socket:
    if ":" not in address:
        return socket.socket(fileno=int(address))
    host, port, secret = address.split(":")
    channel = socket.create_connection((host, int(port)))
    channel.sendall(secret.encode())
    return channel


def listen() -> tuple[socket.socket, str, str]:
    """Return a listening socket of this machine alone, its address for `main`, and the secret in it."""
    listener, secret = socket.create_server(("127.0.0.1", 0)), secrets.token_hex(16)
    return listener, "{}:{}:{}".format(*listener.getsockname(), secret), secret


def accept(listener: socket.socket, secret: str, timeout: float) -> socket.socket:
    """Return the connection of the process that knows the secret. Raises OSError where none comes in time."""
    deadline = time.monotonic() + timeout
    while True:
        listener.settimeout(max(0.0, deadline - time.monotonic()))
        channel, _ = listener.accept()
        channel.settimeout(timeout)
        with contextlib.suppress(EOFError, OSError):
            if secrets.compare_digest(_exactly(channel, len(secret)), secret.encode()):
                channel.settimeout(None)
                return channel
        channel.close()


def send(channel: socket.socket, message: dict[str, Any], files: Sequence[int] | Sequence[str] = ()) -> None:
    """Send one message. files: descriptors, which go with its length; paths where descriptors cannot be handed over."""
    if not limits.HANDS_OVER:
        message = {"message": message, "files": list(files)}
    data = json.dumps(message).encode()
    if limits.HANDS_OVER:
        socket.send_fds(channel, [LENGTH.pack(len(data))], [int(file) for file in files])
        channel.sendall(data)
    else:
        channel.sendall(LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive one message and its descriptors. Raises EOFError where the other end has closed."""
    if not limits.HANDS_OVER:
        received = json.loads(_exactly(channel, LENGTH.unpack(_exactly(channel, LENGTH.size))[0]))
        return received["message"], [os.open(path, limits.READ) for path in received["files"]]
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
    main(sys.argv[1])
