"""Markdown of the generated tables: what every one of them is made with."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

from benchmarks import machine

Report = dict[str, Any]
# Rows of a table that a screen shows; the rest is behind a summary.
SCREEN = 22


def table(header: list[str], rows: Iterable[list[str]], left: int = 1) -> str:
    """Markdown; the first `left` columns are text, the others numbers."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    lines.insert(1, "|---" * left + "|---:" * (len(header) - left) + "|")
    return "\n".join(lines)


def setting(report: Report, *more: str) -> str:
    """The line above a table: machine, versions, load, and what else belongs to it."""
    return ", ".join(part for part in (machine.sentence(report), *more) if part) + "."


def behind_summary(text: str) -> str:
    """Text with each table that is longer than a screen behind a line to open it, and the counts of its words in front."""
    parts = text.split("\n\n")
    for index, part in enumerate(parts):
        header, _, *rows = part.splitlines() if part.startswith("|") else ("", "")
        if len(rows) > SCREEN:
            opened = f'<details markdown="1">\n<summary>All {len(rows)} rows</summary>\n\n{part}\n\n</details>'
            parts[index] = "\n\n".join(filter(None, (_counts(header, rows), opened)))
    return "\n\n".join(parts)


def _counts(header: str, rows: list[str]) -> str:
    """A table of how often each word stands in each column; empty where the cells are no words."""
    columns = list(zip(*([cell.strip() for cell in row.strip("|").split("|")] for row in rows)))[1:]
    words = collections.Counter(word for column in columns for word in column)
    if len(words) > 8 or any(word[:1].isdigit() for word in words):
        return ""
    names = [cell.strip() for cell in header.strip("|").split("|")][1:]
    counted = [[word or "nothing", *(str(column.count(word)) for column in columns)] for word, _ in words.most_common()]
    return table(["rows", *names], counted)
