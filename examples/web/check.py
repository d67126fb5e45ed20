"""Builds the pages, runs them in a headless Chromium, compares what they computed with Python.

    python -m examples.web.check [--build build/web] [--pictures docs] [--serve]

Needs npm, for the onnxruntime-web that package.json names, and Chromium. --serve leaves the pages at an
address to look at instead.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import threading
from pathlib import Path

from examples.web import browser, inference, training

HERE = Path(__file__).parent
RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build/web"), help="folder of the pages")
    parser.add_argument("--pictures", type=Path, default=Path("build/web"), help="folder of the screenshots")
    parser.add_argument("--serve", action="store_true", help="serve the pages until interrupted")
    arguments = parser.parse_args()
    chromium = browser.find()
    if not shutil.which("npm") or not (chromium or arguments.serve):
        raise SystemExit(f"expected npm and one of {', '.join(browser.BROWSERS)} on the PATH")
    folder: Path = arguments.build
    install(folder)
    predictions, trained = inference.build(folder), training.build(folder)
    if arguments.serve:
        with browser.Server(folder) as server:
            print(f"http://127.0.0.1:{server.server_port}/")
            threading.Event().wait()
    assert chromium is not None
    pictures: Path = arguments.pictures
    inference.check(predictions, browser.look(chromium, folder, "index.html", pictures / "browser.png"))
    training.check(trained, browser.look(chromium, folder, "training.html", pictures / "browser_training.png"))
    print(f"screenshots in {pictures}/")


def install(folder: Path) -> None:
    """The pages and stock onnxruntime-web into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in ("html", "css", "js", "json"):
        for source in HERE.glob(f"*.{suffix}"):
            shutil.copy(source, folder / source.name)
    subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder, check=True)
    for name in RUNTIME:
        shutil.copy(folder / "node_modules/onnxruntime-web/dist" / name, folder / name)


if __name__ == "__main__":
    main()
