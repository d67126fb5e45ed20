"""Mutations of seeds in a forked process, which has bounds on its memory and on the time of one input.

The input at hand lies in memory that both processes share, so that it can be saved whatever becomes of the one
that reads it. Inputs that are accepted become seeds themselves, so that changes add up.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import hashlib
import logging
import mmap
import os
import random
import resource
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from tests.fuzz.mutations import LARGEST, mutate
from tests.fuzz.targets import MEMORY, SECONDS, work_folder

Run = Callable[[bytes, Path], bool]
# length of the input, inputs done, accepted
_HEAD = struct.Struct("<qqq")
_POOL = 300
# A process is replaced after so many inputs, in case one of them left something behind.
_INPUTS_A_PROCESS = 5000


@dataclasses.dataclass
class Outcome:
    """findings: file names by what happened."""

    inputs: int = 0
    accepted: int = 0
    findings: dict[str, str] = dataclasses.field(default_factory=dict)


def run(target: Run, seeds: Sequence[bytes], seconds: float, seed: int, folder: Path, most: int = 10) -> Outcome:
    """Fuzzes for so long, and saves inputs of findings in `folder`. Ends early after `most` findings."""
    outcome, end = Outcome(), time.monotonic() + seconds
    with work_folder() as work:
        while time.monotonic() < end and len(outcome.findings) < most:
            with tempfile.TemporaryFile() as trace, mmap.mmap(-1, _HEAD.size + LARGEST) as shared:
                child = os.fork()
                if child == 0:
                    _child(target, seeds, end, seed, work, trace, shared)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                length, inputs, accepted = _HEAD.unpack_from(shared)
                outcome.inputs += inputs
                outcome.accepted += accepted
                if code:
                    verdict = {1: "exception", -signal.SIGALRM: "hang"}.get(code, f"signal-{-code}")
                    trace.seek(0)
                    data = shared[_HEAD.size : _HEAD.size + length]
                    _save(verdict, data, trace.read().decode(errors="replace"), folder, outcome)
            seed += 1
    return outcome


def _save(verdict: str, data: bytes, text: str, folder: Path, outcome: Outcome) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{verdict}-{hashlib.sha256(data).hexdigest()[:12]}.onnx"
    path.write_bytes(data)
    last = text.strip().splitlines()[-1][:80] if text.strip() else verdict
    if last not in outcome.findings:
        print(f"FINDING {verdict}: {path}\n{text}", flush=True)
    outcome.findings.setdefault(last, str(path))


def _child(
    target: Run, seeds: Sequence[bytes], end: float, seed: int, work: Path, trace: IO[bytes], shared: mmap.mmap
) -> None:
    code = 1
    try:
        logging.disable(logging.WARNING)  # onnx-ir's, for odd models
        faulthandler.enable(trace)
        faulthandler.register(signal.SIGALRM, trace, chain=True)  # It writes where it is, and ends.
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _loop(target, seeds, end, random.Random(seed), work, shared)
        code = 0
    except BaseException:
        trace.write(traceback.format_exc().encode(errors="replace"))
        trace.flush()
    finally:
        os._exit(code)


def _loop(
    target: Run, seeds: Sequence[bytes], end: float, generator: random.Random, work: Path, shared: mmap.mmap
) -> None:
    pool = list(seeds)
    refused = sum(not target(data, work) for data in seeds)
    if refused > len(seeds) // 4:
        raise RuntimeError(f"{refused} of {len(seeds)} seeds are refused; they would start nothing")
    accepted = 0
    for inputs in range(_INPUTS_A_PROCESS):
        if time.monotonic() > end:
            break
        data = mutate(generator.choice(pool), generator, seeds)
        shared[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(shared, 0, len(data), inputs, accepted)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        if target(data, work):
            accepted += 1
            if generator.random() < 0.2:
                if len(pool) == len(seeds) + _POOL:
                    pool.pop(generator.randrange(len(seeds), len(pool)))
                pool.append(data)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _HEAD.pack_into(shared, 0, len(data), inputs + 1, accepted)
