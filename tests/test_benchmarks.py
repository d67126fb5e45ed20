"""What benchmarks measure by."""

from __future__ import annotations

import threading
import time

from benchmarks import machine


def test_rest_waits_until_no_thread_spins() -> None:
    end = time.monotonic() + 0.2
    stopped = threading.Event()

    def spin() -> None:
        while time.monotonic() < end:
            pass
        stopped.set()

    threading.Thread(target=spin).start()
    machine.rest()
    assert stopped.is_set()
