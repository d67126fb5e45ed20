"""Code blocks of documents, and running them."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

from tests.support import warm

ROOT = Path(__file__).parents[2]
# The line that a command with --bench ends with.
RESULT = re.compile(
    r"^result: \d+ folds? proved, \d+ compared only.*; \d+ batch norms? left.*; .*latency", re.MULTILINE
)
LIMIT = 600  # seconds; a hang is not what these tests look for


def blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """(language, code) of the fenced blocks."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(language, code) for language, code in found if language in languages]


def run(steps: list[tuple[str, str]], folder: Path) -> str:
    """Python blocks that stand side by side are one program; what was printed."""
    (folder / "bin").mkdir()
    warm.script(folder / "bin/python")
    warm.script(folder / "bin/bnexport", "-m", "bnexport")
    for name in ("examples", "models"):
        (folder / name).symlink_to(ROOT / name)
    path = os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))
    # PYTHON_EXEC is what torchrun starts.
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": warm.executable()}
    printed = ""
    for language, parts in itertools.groupby(steps, key=lambda step: step[0]):
        file = folder / f"page.{language}"
        file.write_text("\n".join(code for _, code in parts))
        if language == "python":
            done = warm.run(file.name, cwd=folder, env=environment, timeout=LIMIT)
        else:
            command = ["bash", "-euo", "pipefail", file.name]
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
            )
        assert done.returncode == 0, f"{file.read_text()}\n{done.stdout}{done.stderr}"
        printed += done.stdout + done.stderr
    return printed
