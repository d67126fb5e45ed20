"""Runs trials one after the other, each in a fork of this process: python -m tests.zoo.worker MODULE.

Reads a line NAME<tab>RESULT<tab>WAY,WAY,... for each and answers with the exit code, or "timeout". What all trials import, and what
the module's `warm` sets up in a first export, is done once; no session and no thread is made before a fork.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.frameworks import stand_ins

SECONDS = 1500
LIBRARIES = (
    "timm",
    "torchvision",
    "segmentation_models_pytorch",
    "transformers",
    "mmseg.models",
    "mmdet.models",
    "mmpretrain.models",
    "ultralytics.nn.tasks",
)


def warm(trials: Any) -> None:
    torch.set_num_threads(1)
    stand_ins.install()
    for package in LIBRARIES:
        importlib.import_module(package)
    trials.warm()
    gc.collect()
    gc.freeze()  # the objects of seven libraries need not be visited again in each fork


def run(trials: Any, name: str, place: Path, ways: list[str]) -> str:
    """Run one trial in a fork; what it prints goes to a file next to the result."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            output = os.open(place.with_suffix(".log"), os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            trials.Trial(trials.find(name), place, ways).run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    end = time.time() + SECONDS
    while time.time() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return f"{os.waitstatus_to_exitcode(status)}"
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    module = importlib.import_module(sys.argv[1])
    warm(module)
    for request in sys.stdin:
        asked, result, names = request.rstrip("\n").split("\t")
        print(run(module, asked, Path(result), names.split(",")), file=answers, flush=True)
