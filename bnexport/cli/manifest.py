"""Many pairs for `verify`, one a line of a manifest, each in a process of its own; the JSON result is what a later run resumes from."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

from bnexport import __version__
from bnexport.cli.common import NOT_VERIFIED
from bnexport.cli.output import check_exists, emit, say
from bnexport.errors import BnexportError, UsageError
from bnexport.pages import table

# Exit codes from good to bad, and what they say where verify gave no verdict.
_CODES = {
    0: "passed",
    NOT_VERIFIED: "not_verified",
    1: "failed",
    3: "refused",
    2: "usage",
    4: "environment",
    70: "defect",
}
# Those that the same files give again.
_FINAL = (0, NOT_VERIFIED, 1, 3)
# Seconds between two writes of the result while pairs run.
_PAUSE = 5
_BLOCK = 1 << 20


def verify_pairs(manifest: Path, jobs: int, options: list[str], json_target: str | None) -> int:
    """Verify every pair and return the worst exit code. options: of all pairs; those of a line come behind them."""
    pairs = _read(manifest)
    seen = _seen(json_target)
    rows: dict[int, dict[str, Any]] = {}
    columns = ("A", "B", "verdict", "largest difference", "seconds", "")
    written = time.monotonic()
    pool = futures.ThreadPoolExecutor(jobs)
    try:
        running = {pool.submit(_row, [*options, *pair], pair, seen): number for number, pair in enumerate(pairs)}
        for done in futures.as_completed(running):
            row = rows[running[done]] = done.result()
            again = ", seen before" if row["seen"] else ""
            say(f"{len(rows)} of {len(pairs)}: {row['a']} {row['b']}: {row['status']}{again}")
            if json_target not in (None, "-") and time.monotonic() > written + _PAUSE:
                emit(_result(rows), json_target, [])
                written = time.monotonic()
    finally:
        pool.shutdown(cancel_futures=True)
        shown = [
            (row["a"], row["b"], row["status"], f"{row['largest']:.3g}", f"{row['seconds']:.1f}", row["message"])
            for _, row in sorted(rows.items())
        ]
        emit(_result(rows), json_target, [table(str(manifest), columns, shown, right=columns[3:5])])
    return max((row["exit_code"] for row in rows.values()), key=list(_CODES).index)


def _result(rows: dict[int, dict[str, Any]]) -> dict[str, Any]:
    return {"pairs": [row for _, row in sorted(rows.items())]}


def _read(manifest: Path) -> list[list[str]]:
    check_exists(manifest, "--manifest")
    pairs = []
    for number, line in enumerate(manifest.read_text(encoding="utf-8").splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UsageError(f"--manifest: {manifest}, line {number}: {error}") from error
        if len(words) == 1 or any(word.startswith("-") for word in words[:2]):
            raise UsageError(
                f"--manifest: {manifest}, line {number}: got {line!r}, expected A B and options behind them"
            )
        pairs += [words] if words else []
    if not pairs:
        raise UsageError(f"--manifest: {manifest} has no pairs, expected lines such as: a.onnx b.onnx -i x:1,3,224,224")
    return pairs


def _seen(json_target: str | None) -> dict[str, dict[str, Any]]:
    """Return the rows of an earlier run by their digests."""
    if json_target in (None, "-") or not Path(str(json_target)).exists():
        return {}
    try:
        rows = json.loads(Path(str(json_target)).read_text(encoding="utf-8"))["pairs"]
        return {row["digest"]: row for row in rows if row["digest"] and row["exit_code"] in _FINAL}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--json: {json_target!r} exists and is no result of an earlier --manifest; remove it, or name another file"
        ) from error


def _row(arguments: list[str], pair: list[str], seen: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Verify one pair in a process of its own, unless the same was verified before."""
    digest = _digest(arguments, pair)
    names = {"a": pair[0], "b": pair[1], "arguments": arguments}
    if digest in seen:
        return {**seen[digest], **names, "seen": True}
    start = time.monotonic()
    command = [sys.executable, "-m", "bnexport", "verify", *arguments, "--json", "-", "-q"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    code = done.returncode if done.returncode in _CODES else 70
    verdict = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    lines = done.stderr.strip().splitlines()
    return {
        **names,
        "digest": digest,
        "seen": False,
        "status": verdict.get("status", _CODES[code]),
        "exit_code": code,
        "message": lines[-1].removeprefix("error: ") if lines and code else "",
        "largest": max((each["max_abs_diff"] or 0.0 for each in verdict.get("outputs", ())), default=0.0),
        "seconds": time.monotonic() - start,
    }


def _digest(arguments: list[str], pair: list[str]) -> str | None:
    """Return the SHA-256 of the arguments with the contents of the files that they name, and of our version; None where A is
    code or B is missing.
    """
    if not all(Path(name).is_file() for name in pair[:2]):
        return None
    total = hashlib.sha256(__version__.encode())
    for argument in arguments:
        name = argument if Path(argument).is_file() else argument.rpartition(":")[2]
        paths = list(_files(Path(name))) if Path(name).is_file() else []
        total.update(f"\0{argument.removesuffix(name) if paths else argument}".encode())
        for path in paths:
            total.update(f"\0{path.stat().st_size}\0".encode())
            with open(path, "rb") as file:
                for block in iter(lambda: file.read(_BLOCK), b""):
                    total.update(block)
    return total.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    """Return a file, and those in which an ONNX file keeps its weights."""
    yield path
    if path.suffix == ".onnx":
        from bnexport.graph.inspection import inspect

        try:
            yield from (path.parent / name for name in inspect(path).external_files)
        except (BnexportError, OSError):
            return  # verify says why
