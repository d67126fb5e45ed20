"""Builds the page, runs it in a headless Chromium, compares what it computed with torch.

    python -m examples.web.check [--build build/web] [--screenshot docs/browser.png] [--serve]

Needs npm, for the onnxruntime-web that package.json names, and Chromium. --serve leaves the page at an
address to look at instead.
"""

from __future__ import annotations

import argparse
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

import torch

import bnexport
from models.digits import load_digits
from models.resnet import digits_resnet
from models.training import train

HERE = Path(__file__).parent
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SHOWN, EPOCHS, TIMEOUT = 40, 6, 180
DIFFERENCE_BELOW = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build/web"), help="folder of the page")
    parser.add_argument("--screenshot", type=Path, default=Path("build/web/browser.png"))
    parser.add_argument("--serve", action="store_true", help="serve the page until interrupted")
    arguments = parser.parse_args()
    browser = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if not shutil.which("npm") or not (browser or arguments.serve):
        raise SystemExit(f"expected npm and one of {', '.join(BROWSERS)} on the PATH")
    expected = build(arguments.build)
    with Server(arguments.build) as server:
        if arguments.serve:
            print(f"http://127.0.0.1:{server.server_port}/")
            threading.Event().wait()
        assert browser is not None
        result = look(browser, server, arguments.screenshot)
    if "error" in result:
        raise SystemExit(f"the page failed: {result['error']}")
    print(
        f"{len(expected)} digits, largest difference from torch {result['difference']:.1e},"
        f" {result['milliseconds']:.2f} ms; {arguments.screenshot}"
    )
    if result["predictions"] != expected or not result["difference"] < DIFFERENCE_BELOW:
        raise SystemExit(f"expected {expected} within {DIFFERENCE_BELOW}, got {result}")


def build(folder: Path) -> list[int]:
    """Trains, exports with the nodes kept, and puts all files of the page into `folder`; torch's predictions."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "index.html", "app.js"):
        shutil.copy(HERE / name, folder / name)
    subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder, check=True)
    for name in RUNTIME:
        shutil.copy(folder / "node_modules/onnxruntime-web/dist" / name, folder / name)

    digits, checkpoint = load_digits(), folder / "digits.pt"
    if not checkpoint.exists():
        train(digits_resnet, digits, checkpoint, epochs=EPOCHS)
    model = digits_resnet()
    model.load_state_dict(torch.load(checkpoint, weights_only=True))
    model.eval()
    images = torch.from_numpy(digits.test_images)
    bnexport.export(model, images[:SHOWN], folder / "kept.onnx", mode="custom_op")
    with torch.no_grad():
        logits = model(images)
    samples = {
        "images": images[:SHOWN].flatten().tolist(),
        "labels": digits.test_labels[:SHOWN].tolist(),
        "logits": logits[:SHOWN].flatten().tolist(),
        "shape": list(images[:SHOWN].shape),
        "accuracy": float((logits.argmax(1).numpy() == digits.test_labels).mean()),
    }
    (folder / "samples.json").write_text(json.dumps(samples))
    predictions: list[int] = logits[:SHOWN].argmax(1).tolist()
    return predictions


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


def look(browser: str, server: Server, screenshot: Path) -> dict[str, Any]:
    """Opens the page; what it reported, and a picture of it."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser,
                *("--headless", "--disable-gpu", "--hide-scrollbars", "--window-size=900,850", *sandbox),
                *(f"--user-data-dir={profile}", f"--screenshot={screenshot.resolve()}"),
                f"http://127.0.0.1:{server.server_port}/?check",
            ],
            check=True,
            timeout=TIMEOUT,
            stderr=subprocess.DEVNULL,
        )
    if not server.finished.is_set():
        raise SystemExit("the page did not finish")
    return server.result


if __name__ == "__main__":
    main()
