"""Compares an exported file, loaded in a process of its own without bnexport, with the module it came from."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bnexport import tolerances
from bnexport.errors import MissingDependencyError, VerificationError
from bnexport.exporting.reference import Reference
from bnexport.exporting.verification import OutputError, Verification

_RUNNER = Path(__file__).with_name("fresh_process_runner.py")
_TIMEOUT = 600  # seconds: a large model on a busy machine


def check(
    file: Path, kind: str, reference: Reference, inputs: tuple[torch.Tensor, ...], names: list[str], dynamic: bool
) -> Verification:
    """Runs both on `inputs` and, where `dynamic`, on a doubled batch.

    names: of the model's output tensors.

    The bound is that of `bnexport.tolerances.model`, or four times the reference's own distance from its
    float64 results where that is larger: then it is ill-conditioned, in torch as elsewhere.

    Raises VerificationError where the file cannot be loaded or run.
    """
    feeds, expected = [inputs], [_on_cpu(reference(inputs))]
    if reference.is_random(inputs):
        return Verification.skipped("the model draws random numbers")
    if dynamic and inputs and all(value.dim() >= 2 for value in inputs):
        twice = doubled(inputs)
        try:
            expected.append(_on_cpu(reference(twice)))
            feeds.append(twice)
        except Exception:  # the model itself asks for this batch size
            pass
    got = _run_elsewhere(file, kind, feeds)
    engine = f"torch {torch.__version__}, a process without bnexport"
    errors = []
    for feed, one, two in zip(feeds, expected, got):
        if len(one) != len(two):
            raise VerificationError(f"{file.name}: returns {len(two)} tensors, expected {len(one)}")
        exact = None
        for index, (name, own, value) in enumerate(zip(names, one, two)):
            error = _compare(name, value, own, engine)
            if not error.passed and own.shape == value.shape:
                exact = exact or _exact(reference, feed)
                error = _allow_own_error(error, value, own, exact[index]) if exact else error
            errors.append(error)
    return Verification(
        passed=all(error.passed for error in errors),
        engine=engine,
        outputs=tuple(errors),
        reason=reference.cause,
        reference=reference.source,
    )


def doubled(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Each input twice along dimension 0."""
    return tuple(torch.cat([value, value]) for value in inputs)


def _on_cpu(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [value.cpu() for value in tensors]


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


def _compare(name: str, value: torch.Tensor, reference: torch.Tensor, engine: str) -> OutputError:
    if value.shape != reference.shape or value.dtype != reference.dtype:
        return OutputError(name, float("inf"), 0.0, engine)
    bound = 0.0
    if reference.is_floating_point():
        dtype = str(reference.dtype).removeprefix("torch.")
        bound = tolerances.model(dtype, reference.double().numpy()).atol
    return OutputError(name, _distance(value, reference), bound, engine)


def _distance(one: torch.Tensor, two: torch.Tensor) -> float:
    """Largest absolute difference; equal infinities and NaN beside NaN count as equal."""
    one, two = one.double(), two.double()
    same = (one == two) | (one.isnan() & two.isnan())
    difference = torch.where(same, 0.0, one - two).abs().nan_to_num(nan=float("inf"))
    return float(difference.max()) if difference.numel() else 0.0


def _exact(reference: Reference, feed: tuple[torch.Tensor, ...]) -> list[torch.Tensor] | None:
    try:
        return _on_cpu(reference.in_float64(feed))
    except (RuntimeError, TypeError):
        return None


def _allow_own_error(
    error: OutputError, value: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor
) -> OutputError:
    own = _distance(reference, exact)
    return OutputError(error.name, _distance(value, exact), max(error.bound, 4.0 * own), error.engine)
