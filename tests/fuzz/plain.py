"""Mutations of seeds in a forked process, which has a bound on its memory and is watched from outside.

The input at hand lies in memory that both processes share, so that it can be saved whatever becomes of the one
that reads it. Inputs that are accepted become seeds themselves, so that changes add up.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import hashlib
import mmap
import os
import random
import resource
import signal
import struct
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO

from tests.fuzz.mutations import LARGEST, mutate
from tests.fuzz.targets import MEMORY, SECONDS, Target, work_folder

# when the input was started, its length, inputs done, accepted
_HEAD = struct.Struct("<dqqq")
_POOL = 300
# A process is replaced after so many inputs, in case one of them left something behind.
_INPUTS_A_PROCESS = 5000


@dataclasses.dataclass
class Outcome:
    """findings: file names by what happened."""

    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    findings: dict[str, str] = dataclasses.field(default_factory=dict)


def run(target: Target, seconds: float, seed: int, folder: Path, most: int = 10) -> Outcome:
    """Fuzzes for so long, and saves inputs of findings in `folder`. Ends early after `most` findings."""
    outcome = Outcome()
    with work_folder() as work:
        begin = time.monotonic()
        while (left := seconds - (time.monotonic() - begin)) > 0 and len(outcome.findings) < most:
            with tempfile.TemporaryFile() as trace:
                _one_process(target, left, seed, folder, work, trace, outcome)
            seed += 1
        outcome.seconds = time.monotonic() - begin
    return outcome


def _one_process(
    target: Target, seconds: float, seed: int, folder: Path, work: Path, trace: IO[bytes], outcome: Outcome
) -> None:
    shared = mmap.mmap(-1, _HEAD.size + LARGEST)
    _HEAD.pack_into(shared, 0, time.monotonic(), 0, 0, 0)
    child = os.fork()
    if child == 0:
        _child(target, seconds, seed, work, trace, shared)
    verdict = None
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        started, length, inputs, accepted = _HEAD.unpack_from(shared)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code:
                verdict = "exception" if code > 0 else f"signal-{-code}"
            break
        if time.monotonic() - started > SECONDS:
            os.kill(child, signal.SIGUSR1)  # It writes where it is.
            time.sleep(0.5)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            verdict = "hang"
            break
        time.sleep(0.02)
    outcome.inputs += inputs
    outcome.accepted += accepted
    if verdict is not None:
        trace.seek(0)
        data, text = shared[_HEAD.size : _HEAD.size + length], trace.read().decode(errors="replace")
        if verdict == "hang" and not _hangs_again(target, data, work):
            print(f"{target.name}: the machine stood still for {SECONDS:.0f} s; the input does not hang", flush=True)
            return
        _save(target, verdict, data, text, folder, outcome)


def _hangs_again(target: Target, data: bytes, work: Path) -> bool:
    """Whether an input takes too long in a process of its own; else the machine did."""
    child = os.fork()
    if child == 0:
        try:
            target.prepare()
            target.run(data, work)
        finally:
            os._exit(0)
    end = time.monotonic() + 2 * SECONDS
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _save(target: Target, verdict: str, data: bytes, text: str, folder: Path, outcome: Outcome) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target.name}-{verdict}-{hashlib.sha256(data).hexdigest()[:12]}.onnx"
    path.write_bytes(data)
    last = text.strip().splitlines()[-1][:80] if text.strip() else verdict
    if last not in outcome.findings:
        print(f"FINDING {target.name}: {verdict}: {path}\n{text}", flush=True)
    outcome.findings.setdefault(last, str(path))


def _child(target: Target, seconds: float, seed: int, work: Path, trace: IO[bytes], shared: mmap.mmap) -> None:
    code = 1
    try:
        faulthandler.enable(trace)
        faulthandler.register(signal.SIGUSR1, trace)
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        target.prepare()  # Here, since engines have threads that a fork would lose.
        _loop(target, time.monotonic() + seconds, random.Random(seed), work, shared)
        code = 0
    except BaseException:
        trace.write(traceback.format_exc().encode(errors="replace"))
        trace.flush()
    finally:
        os._exit(code)


def _loop(target: Target, end: float, generator: random.Random, work: Path, shared: mmap.mmap) -> None:
    seeds = [data for _, data in target.seeds()]
    pool = list(seeds)
    accepted = inputs = 0
    sound = [target.run(data, work) for data in seeds]
    if sum(sound) < len(sound) * 3 // 4:
        raise RuntimeError(f"{len(sound) - sum(sound)} of {len(sound)} seeds are refused; they would start nothing")
    while inputs < _INPUTS_A_PROCESS and (now := time.monotonic()) < end:
        data = mutate(generator.choice(pool), generator, seeds)
        shared[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(shared, 0, now, len(data), inputs, accepted)
        is_sound = target.run(data, work)
        inputs += 1
        if is_sound:
            accepted += 1
            if generator.random() < 0.2:
                if len(pool) < len(seeds) + _POOL:
                    pool.append(data)
                else:
                    pool[generator.randrange(len(seeds), len(pool))] = data
        _HEAD.pack_into(shared, 0, time.monotonic(), len(data), inputs, accepted)
