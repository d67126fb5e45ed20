"""Runs cases one after the other, each in a fork of this process: python -m tests.campaign.worker TRIAL.

Reads a line NAME<tab>PLACE<tab>WAY,WAY,... for each and answers with the exit code, or "timeout". What all cases import,
and what `warm` sets up, is done once; no session and no thread is made before a fork.
"""

import gc
import importlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def run(trial: Any, name: str, place: Path, ways: list[str]) -> str:
    """Run one case in a fork, with a group of processes of its own; what it prints goes to a file next to the row."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            output = os.open(place.with_suffix(".log"), os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            trial.run(name, place, ways)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = time.time() + trial.SECONDS
    while time.time() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return f"{os.waitstatus_to_exitcode(status)}"
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    module = importlib.import_module(sys.argv[1])
    module.warm()
    gc.collect()
    gc.freeze()  # the objects of seven libraries need not be visited again in each fork
    for request in sys.stdin:
        asked, result, names = request.rstrip("\n").split("\t")
        print(run(module, asked, Path(result), names.split(",")), file=answers, flush=True)
