"""`python -m tests.record count` counts the statements of bnexport/ and custom_ops/.

Python statements without docstrings, and C++ statements without comments: a formatter changes neither.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_COMMENTS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'', re.DOTALL)


def python_statements(source: str) -> int:
    """Count statements, docstrings left out."""
    count = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            count += not (is_text and isinstance(node.value.value, str))  # type: ignore[attr-defined]
    return count


def cpp_statements(source: str) -> int:
    """Count statements, blocks and directives: semicolons, opening braces and lines with #."""
    code = _COMMENTS.sub(lambda found: "" if found[0].startswith("/") else '""', source)
    lines = re.sub(r"\\\n", " ", code).splitlines()
    directives = [line for line in lines if line.lstrip().startswith("#")]
    rest = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    return len(directives) + rest.count(";") + rest.count("{")


def count() -> int:
    """Print the statements of each folder."""
    total: Counter[str] = Counter()
    for top, suffixes, statements in (
        ("bnexport", {".py"}, python_statements),
        ("custom_ops", {".cpp", ".h", ".cu", ".c"}, cpp_statements),
    ):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in suffixes:
                parts = path.relative_to(ROOT).parts
                total["/".join(parts[:2]) if len(parts) > 2 else top] += statements(path.read_text())
    for name, number in sorted(total.items()):
        print(f"{number:7,}  {name}")
    print(f"{total.total():7,}  in all")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.record", description=__doc__)
    parser.add_argument("command", choices=["count"])
    parser.parse_args()
    sys.exit(count())
