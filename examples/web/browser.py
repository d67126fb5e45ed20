"""Serves a folder to a headless Chromium and takes what the page found out back."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT = 180
SWITCHES = (
    *("--headless", "--disable-gpu", "--hide-scrollbars", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def find() -> str | None:
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder on a free local port. GET /finished waits for POST /result."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder)))
        self.result: dict[str, Any] = {}
        self.finished = threading.Event()

    def __enter__(self) -> Server:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(http.server.SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == "/finished":
            self.server.finished.wait(TIMEOUT)
            self.send_error(404)
        else:
            super().do_GET()

    def do_POST(self) -> None:
        self.server.result = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.finished.set()
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def look(browser: str, folder: Path, page: str, screenshot: Path, size: tuple[int, int] = (900, 930)) -> dict[str, Any]:
    """Opens `page` of `folder` in a window of `size`; what it reported, and a picture of it."""
    with Server(folder) as server:
        run(
            browser, f"http://127.0.0.1:{server.server_port}/{page}?check", size, f"--screenshot={screenshot.resolve()}"
        )
        if not server.finished.is_set():
            raise SystemExit(f"{page}: it did not finish within {TIMEOUT} s")
        if "error" in server.result:
            raise SystemExit(f"{page}: {server.result['error']}")
        return server.result


def run(browser: str, address: str, size: tuple[int, int], *actions: str) -> str:
    """Opens an address in a new profile; what `actions`, switches such as --dump-dom, print."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *SWITCHES, *sandbox, f"--window-size={size[0]},{size[1]}", f"--user-data-dir={profile}"]
        done = subprocess.run(
            [*command, *actions, address], check=True, timeout=TIMEOUT, capture_output=True, text=True
        )
        return done.stdout
