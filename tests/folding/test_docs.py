"""docs/folding.md names every rule and every reason."""

from __future__ import annotations

import re
from pathlib import Path

from bnexport.folding.rules import ALL

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/folding.md").read_text()


def test_every_rule() -> None:
    table = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert table[: len(ALL)] == [rule.name for rule in ALL]
    for rule in ALL:
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{rule.name}` |"))
        for operator in rule.op_types:
            assert operator in row, (rule.name, operator)


def test_every_code() -> None:
    """Those of `fold_module`, too; and the page explains none that is gone."""
    sources = [path for room in ("folding", "graph") for path in (ROOT / "bnexport" / room).rglob("*.py")]
    codes = {code for path in sources for code in re.findall(r'Refused\(\s*"([a-z-]+)"', path.read_text())}
    codes |= {"skipped"}
    assert len(codes) > 30
    section = TEXT.split("## When a rule refuses")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {code for row in rows for code in re.findall(r"`([a-z-]+)`", row)} == codes
