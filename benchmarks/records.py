"""How results are written: JSON with a row to a line, so that a change of one row changes one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(path: Path, report: dict[str, Any]) -> None:
    """Write a whole file or none."""
    staged = path.with_name(path.name + ".part")
    staged.write_text(text(report))
    staged.replace(path)


def text(report: dict[str, Any]) -> str:
    """An entry of `report` to a line; of a table, which holds lists or objects, a row to a line."""
    return "{\n " + ",\n ".join(f"{json.dumps(name)}: {_entry(value)}" for name, value in report.items()) + "\n}\n"


def _entry(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(row, list | dict) for row in value):
        return "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "\n ]"
    if isinstance(value, dict) and value and all(isinstance(row, dict) for row in value.values()):
        rows = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in value.items())
        return "{\n  " + ",\n  ".join(rows) + "\n }"
    return json.dumps(value)
