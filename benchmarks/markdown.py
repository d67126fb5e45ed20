"""Markdown of the generated tables: what every one of them is made with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks import machine

Report = dict[str, Any]


def table(header: list[str], rows: Iterable[list[str]], left: int = 1) -> str:
    """Markdown; the first `left` columns are text, the others numbers."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    lines.insert(1, "|---" * left + "|---:" * (len(header) - left) + "|")
    return "\n".join(lines)


def setting(report: Report, *more: str) -> str:
    """The line above a table: machine, versions, load, and what else belongs to it."""
    return ", ".join(part for part in (machine.sentence(report), *more) if part) + "."
