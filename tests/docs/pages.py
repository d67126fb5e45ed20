"""Code blocks of documents, and running them."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 240  # seconds


def blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """(language, code) of the fenced blocks."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(language, code) for language, code in found if language in languages]


def run(steps: list[tuple[str, str]], folder: Path) -> str:
    """Python blocks that stand side by side are one program; what was printed."""
    (folder / "bin").mkdir()
    for name, command in (("python", ""), ("bnexport", " -m bnexport")):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable}{command} "$@"\n')
        script.chmod(0o755)
    for name in ("examples", "models"):
        (folder / name).symlink_to(ROOT / name)
    path = os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    printed = ""
    for language, parts in itertools.groupby(steps, key=lambda step: step[0]):
        file = folder / f"page.{language}"
        file.write_text("\n".join(code for _, code in parts))
        command = [sys.executable, file.name] if language == "python" else ["bash", "-euo", "pipefail", file.name]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        assert done.returncode == 0, f"{file.read_text()}\n{done.stdout}{done.stderr}"
        printed += done.stdout + done.stderr
    return printed
