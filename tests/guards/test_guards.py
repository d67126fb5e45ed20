"""The tool that removes guards: a change reaches the tests, through an installed package too, and only in a copy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guards.guards import guards
from tests.guards.live import functions_of, patch

ROOT = Path(__file__).resolve().parents[2]
NAMES = "bnexport/graph/nodes.py"


@pytest.mark.slow
def test_a_run_sees_what_the_test_sees_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    before = (ROOT / NAMES).read_bytes()
    command = [sys.executable, "-m", "tests.guards", "names", "--results", str(tmp_path)]
    first = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    log = (tmp_path / "names.jsonl").read_text()
    rows = {row["guard"].removeprefix(NAMES + " "): row for row in map(json.loads, log.splitlines())}
    assert len(rows) == len(guards(ROOT, NAMES))
    assert rows["gone: `value not in (0, 1)` -> `False`"]["outcome"] == "killed"
    assert "test_a_flag_is_0_or_1" in rows["gone: `value not in (0, 1)` -> `False`"]["by"]
    assert rows["gone: `attribute.is_ref()` -> `False`"]["outcome"] == "survived" and "attribute.is_ref()" in first
    assert rows["gone: `unknown` -> `False`"]["tests"] == 0  # no test reaches it
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    assert (tmp_path / "names.jsonl").read_text() == log and (ROOT / NAMES).read_bytes() == before


def test_a_guard_is_gone_or_loses_one_of_its_terms(tmp_path: Path) -> None:
    """Lines stay where they are: functions in memory are found by them."""
    source = """
def f(x, y):
    if x < 0 or (y
                 < 0):
        raise ValueError(x)
    if x == y:
        return None
    return x > 1 and y > 1 and x != y
"""
    (tmp_path / "module.py").write_text(source)
    found = guards(tmp_path, "module.py")
    changed = [it.name.partition(" -> ")[2] for it in found]
    assert changed == [
        *("`False`", "`y < 0`", "`x < 0`"),
        *("`y > 1 and x != y`", "`x > 1 and x != y`", "`x > 1 and y > 1`"),
    ]
    for guard in found:
        assert ast.dump(ast.parse(guard.text)) != ast.dump(ast.parse(source)), guard.name
        assert guard.text.count("\n") == source.count("\n"), guard.name


def test_patched_functions(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    source = "def f(x):\n    return x + 1\nclass C:\n    def m(self):\n        return [f(it) for it in (1, 2)]\n"
    path.write_text(source)
    module: dict[str, object] = {"__name__": "module"}
    exec(compile(source, str(path), "exec"), module)
    found = functions_of(str(path))
    assert sorted(it.__name__ for it in found) == ["f", "m"]
    assert patch(found, source.replace("x + 1", "x - 1"), str(path))
    assert module["C"]().m() == [0, 1]  # type: ignore[operator]
    assert not patch(found, "\n" + source, str(path))
