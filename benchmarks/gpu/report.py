"""Rows of a section: written one by one, so that each survives whatever ends the process."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDEST = 100  # characters of a value in the table
LIMIT = 30  # seconds of a step that says nothing else
INCOMPLETE = 3  # exit code of a section that ran out of time


class NotRun(Exception):
    """A step cannot run here, and that is nothing wrong; the message is the reason. The next call tries again."""


class Row:
    """What a step fills in. ok: None where there is nothing to be right or wrong."""

    def __init__(self) -> None:
        self.ok: bool | None = True
        self.value = ""
        self.data: dict[str, Any] = {}


class Report:
    """Appends rows to a file of JSON lines whose first line is a header. Steps that it holds already are skipped, and those
    that hung.

    A row is written before a step starts, so that the kit sees how long it takes and can name it when it ends it.
    unreached: steps for which no time was left.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.end = path, time.monotonic() + seconds
        self.done = {
            row["name"]
            for row in read_rows(path)
            if row.get("hung") or (row["ok"] is not False and not row.get("not_run"))
        }
        self.failed = False
        self.unreached: list[str] = []

    def left(self) -> float:
        """Seconds until the section is killed."""
        return self.end - time.monotonic()

    def wanted(self, name: str, seconds: float = 5) -> bool:
        """Whether a step is still to do, and can be done in the time that is left."""
        if name in self.done:
            return False
        if self.left() > seconds:
            return True
        self.unreached.append(name)
        return False

    @contextlib.contextmanager
    def step(self, name: str, limit: float = LIMIT) -> Iterator[Row]:
        """A row; an exception in the body is a wrong one, and the section goes on. limit: seconds until the kit ends it."""
        row, start = Row(), time.perf_counter()
        append(self.path, {"name": name, "started": time.time(), "limit": limit})
        try:
            yield row
        except NotRun as reason:
            row.ok, row.value, row.data = None, f"not run: {reason}", {"not_run": True}
        except Exception as error:
            traceback.print_exc()
            row.ok, row.value = False, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        self.failed |= row.ok is False
        made = {
            "name": name,
            "ok": row.ok,
            "value": row.value,
            "seconds": round(time.perf_counter() - start, 3),
            **row.data,
        }
        append(self.path, made)


def append(path: Path, row: dict[str, Any]) -> None:
    """Write a row to the disk."""
    with path.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def running_step(path: Path) -> dict[str, Any] | None:
    """Return the row of a step that has started and not ended."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    with contextlib.suppress(json.JSONDecodeError):
        row: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        return row if "started" in row else None
    return None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Whole rows of steps that ended or hung, the last one of each name; what a killed process left of a line is dropped."""
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if "ok" in row:
                rows[row["name"]] = row
    return list(rows.values())


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Writes a whole file or none."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=indent) + "\n")
    part.replace(path)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows for a terminal, the wrong ones first; those that only say that they are right are counted."""
    marks = {True: "ok", False: "WRONG", None: "--"}
    shown = [row for row in rows if row["ok"] is not True or row["value"]]
    shown.sort(key=lambda row: row["ok"] is not False)
    width = max((len(row["name"]) for row in shown), default=0)
    lines = [f"{marks[row['ok']]:6}{row['name']:{width}}  {row['value'][:WIDEST]}" for row in shown]
    rest = len(rows) - len(shown)
    return "\n".join([*lines, *([f"ok    {rest} more"] if rest else [])])
