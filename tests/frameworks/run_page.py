"""Runs the blocks of a page in an empty folder: python -m tests.frameworks.run_page PAGE FOLDER [kernels].

kernels: with the compiled operators of MMCV.

Python blocks are one session, shell blocks run in between. Runs in the environment of `environment`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT, blocks
from tests.frameworks import mmcv_kernels, stand_ins


def main(page: Path, folder: Path, kernels: bool) -> None:
    stand_ins.install()
    if kernels:
        mmcv_kernels.install()
    os.chdir(folder)
    programs = Path("bin")
    programs.mkdir()
    command = programs / "bnexport"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -W ignore -m tests.frameworks.command "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join((str(programs.resolve()), os.environ["PATH"]))
    session: dict[str, Any] = {"__name__": "__main__"}
    for language, code in blocks(page.read_text(), "python", "sh"):
        if language == "python":
            exec(compile(code, str(page), "exec"), session)
        else:
            variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
            sys.stdout.flush()
            subprocess.run(["bash", "-euc", code], env=variables, check=True, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), "kernels" in sys.argv[3:])
