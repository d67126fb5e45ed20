"""A process on a pseudo-terminal: what the terminal receives of it."""

import fcntl
import os
import pty
import struct
import subprocess
import termios

from tests.support import warm


def on_terminal(source: str, stdin: str, *, width: int | None = None, seconds: float = 600, **options: object) -> str:
    """Run Python source with its output on a terminal; return all that it prints there. Fails for another exit code
    than 0.
    """
    first, second = pty.openpty()
    try:
        if width is not None:
            fcntl.ioctl(second, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        process = warm.start("-c", source, stdin=subprocess.PIPE, stdout=second, stderr=second, **options)
        os.close(second)
        process.stdin.write(stdin.encode())
        process.stdin.close()
        received = b""
        while True:
            try:
                part = os.read(first, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            received += part
        assert process.wait(seconds) == 0, received.decode()
        return received.decode()
    finally:
        os.close(first)
