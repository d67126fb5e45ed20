"""The tool that changes the source: a change reaches the tests, through an installed package too, and only in a copy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.groups import GROUPS, ROOT
from tests.mutation.live import functions_of, patch
from tests.mutation.mutants import mutants

NAMES = "bnexport/graph/nodes.py"


@pytest.mark.slow
def test_a_run_kills_what_the_test_notices_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    before = (ROOT / NAMES).read_bytes()
    command = [sys.executable, "-m", "tests.mutation", "names", "--results", str(tmp_path)]
    subprocess.run([*command, "--count", "3"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    first = (tmp_path / "names.jsonl").read_text()
    done = subprocess.run([*command, "--count", "100"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    log = (tmp_path / "names.jsonl").read_text()
    assert "a planted mutant: killed" in done.stdout
    assert first.count("\n") == 3 and log.startswith(first)
    rows = {row["mutant"].removeprefix(NAMES + " "): row for row in map(json.loads, log.splitlines())}
    assert len(rows) == len(mutants(ROOT, NAMES))
    assert rows["comparison: `name in self._taken` -> `name not in self._taken`"]["outcome"] == "killed"
    assert rows["constant: `1` -> `2`"]["outcome"] == "killed"
    assert "test_a_name_that_is_taken" in rows["constant: `1` -> `2`"]["by"]
    # The example asks for one name only: it cannot see that names are remembered.
    assert rows["statement: `self._taken.add(name)` -> `pass`"]["outcome"] == "survived"
    assert (ROOT / NAMES).read_bytes() == before


def test_a_mutant_is_a_change_of_one_place_that_compiles() -> None:
    """Lines stay where they are: functions in memory are found by them."""
    for group in GROUPS.values():
        everything = [mutant for file in group.sources() for mutant in mutants(ROOT, file)]
        assert len({mutant.name for mutant in everything}) == len(everything)
        for mutant in sorted(everything, key=lambda it: it.order(0))[:10]:
            source = (ROOT / mutant.file).read_text()
            assert ast.dump(ast.parse(mutant.text)) != ast.dump(ast.parse(source)), mutant.name
            assert mutant.text.count("\n") == source.count("\n"), mutant.name


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
