"""`python -m tests.record run FILE` records; `compare BEFORE AFTER` shows what changed; `count` counts statements.

run: every test of folding, verification, exporting, the command line and the networks runs once under `plugin`, some
eight minutes on two cores. compare: each difference of one test's events, by kind. count: Python statements without
docstrings, and C++ statements without comments, of bnexport/ and custom_ops/: a formatter changes neither.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.record.plugin import FOLDER

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("folding", "verification", "exporting", "cli", "training/test_export.py", "malicious", "test_models.py", "zoo")
_SHOWN = 400
_COMMENTS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'', re.DOTALL)


def run(target: Path, selected: list[str]) -> int:
    """Record into a JSON file; the tests' own result is returned."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-p", "tests.record.plugin", "-n", "2", *selected]
        done = subprocess.run(command, check=False, cwd=ROOT, env={**os.environ, FOLDER: folder})
        merged: dict[str, dict[str, Any]] = {"events": {}, "seconds": {}}
        for path in sorted(Path(folder).glob("*.json")):
            part = json.loads(path.read_text())
            for name, values in merged.items():
                values.update(part[name])
    target.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
    print(f"{len(merged['events'])} tests with {sum(map(len, merged['events'].values()))} events in {target}")
    return done.returncode


def compare(before: Path, after: Path) -> int:
    """Print the tests whose events differ, with the lines that do; the numbers of a test's events may grow."""
    first, second = (json.loads(path.read_text()) for path in (before, after))
    kinds: Counter[str] = Counter()
    for test in sorted({*first["events"], *second["events"]}):
        one, two = first["events"].get(test), second["events"].get(test)
        if one == two:
            continue
        kinds["new" if one is None else "gone" if two is None else "changed"] += 1
        if one is None:
            continue
        print(f"\n{test}" + (": gone" if two is None else ""))
        texts = [json.dumps(each or [], indent=1, sort_keys=True).splitlines() for each in (one, two)]
        for line in list(difflib.unified_diff(*texts, lineterm="", n=0))[2:]:
            if not line.startswith("@@"):
                print(f"  {line[:_SHOWN]}")
    print(f"\n{dict(kinds) or 'no difference'} of {len(first['events'])} tests")
    times = [sum(each["seconds"].values()) for each in (first, second)]
    print(f"seconds of all tests: {times[0]:.0f} before, {times[1]:.0f} after")
    return 1 if kinds["changed"] or kinds["gone"] else 0


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.record", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("run")
    recording.add_argument("file", type=Path)
    recording.add_argument("tests", nargs="*", default=[f"tests/{name}" for name in TESTS])
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    commands.add_parser("count")
    given = parser.parse_args()
    if given.command == "run":
        return run(given.file.resolve(), given.tests)
    return compare(given.before, given.after) if given.command == "compare" else count()


if __name__ == "__main__":
    sys.exit(main())
