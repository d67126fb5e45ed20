"""Compares an exported file, loaded in a process of its own without bnexport, with the module it came from."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bnexport.errors import MissingDependencyError, VerificationError
from bnexport.exporting.comparison import Array, OutputError, compare, to_array
from bnexport.exporting.reference import Reference
from bnexport.exporting.verification import Verification, exact, judge, nearest, scaled
from bnexport.folding.smaller_inputs import SCALES

_RUNNER = Path(__file__).with_name("fresh_process_runner.py")
_TIMEOUT = 600  # seconds: a large model on a busy machine


def check(
    file: Path, kind: str, reference: Reference, inputs: tuple[torch.Tensor, ...], names: list[str], dynamic: bool
) -> Verification:
    """Runs both on `inputs` and, where `dynamic`, on a doubled batch.

    names: of the model's output tensors.

    Raises VerificationError where the file cannot be loaded or run.
    """
    feeds, expected = [inputs], [reference(inputs)]
    if reference.is_random(inputs):
        return Verification.skipped("the model draws random numbers")
    if dynamic and inputs and all(value.dim() >= 2 for value in inputs):
        twice = doubled(inputs)
        with contextlib.suppress(Exception):  # the model itself asks for this batch size
            expected.append(reference(twice))
            feeds.append(twice)
    engine = f"torch {torch.__version__}, a process without bnexport"
    found = _run_elsewhere(file, kind, feeds)

    def judged(index: int) -> tuple[list[OutputError], float]:
        feed, got = feeds[index], {1.0: found[index]}

        def compared(scale: float, rows: Sequence[Array]) -> list[OutputError]:
            if scale not in got:  # a process takes seconds to start: one for all smaller inputs
                smaller = [scaled(feed, scale) for scale in SCALES]
                got.update(zip(SCALES, _run_elsewhere(file, kind, smaller)))
            if len(got[scale]) != len(rows):
                raise VerificationError(f"{file.name}: returns {len(got[scale])} tensors, expected {len(rows)}")
            arrays = [to_array(value) for value in got[scale]]
            return compare(names, arrays, rows, lambda: exact(reference, scaled(feed, scale)), engine)

        return judge(feed, expected[index], reference, compared)

    results = [judged(index) for index in range(len(feeds))]
    errors = nearest([error for errors, _ in results for error in errors])
    return Verification.of(errors, engine, reference.cause, results[0][1])


def doubled(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Each input twice along dimension 0."""
    return tuple(torch.cat([value, value]) for value in inputs)


def _run_elsewhere(file: Path, kind: str, feeds: list[tuple[torch.Tensor, ...]]) -> list[list[torch.Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        inputs, outputs = Path(folder, "inputs.pt"), Path(folder, "outputs.pt")
        torch.save(feeds, inputs)
        command = [sys.executable, "-c", _RUNNER.read_text(), kind, str(file.resolve()), str(inputs), str(outputs)]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT, check=False, errors="replace"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MissingDependencyError(f"the exported file cannot be checked in a new process: {error}") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            last = lines[-1] if lines else f"exit code {done.returncode}"
            raise VerificationError(f"torch cannot load and run the exported file without bnexport: {last}")
        results: list[list[torch.Tensor]] = torch.load(outputs, weights_only=True, map_location="cpu")
        return results
