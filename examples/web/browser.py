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


def look(browser: str, folder: Path, page: str, screenshot: Path) -> dict[str, Any]:
    """Opens `page` of `folder`; what it reported, and a picture of it."""
    with Server(folder) as server:
        _open(browser, f"http://127.0.0.1:{server.server_port}/{page}?check", screenshot)
        if not server.finished.is_set():
            raise SystemExit(f"{page}: it did not finish within {TIMEOUT} s")
        if "error" in server.result:
            raise SystemExit(f"{page}: {server.result['error']}")
        return server.result


def _open(browser: str, address: str, screenshot: Path) -> None:
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser,
                *("--headless", "--disable-gpu", "--hide-scrollbars", "--window-size=900,930", *sandbox),
                *(f"--user-data-dir={profile}", f"--screenshot={screenshot.resolve()}"),
                address,
            ],
            check=True,
            timeout=TIMEOUT,
            stderr=subprocess.DEVNULL,
        )
