"""docs/folding.md names every rule and every reason."""

from __future__ import annotations

import re
from pathlib import Path

from bnexport.folding.rules import ALL
from docs import write_rules

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/folding.md").read_text()


def test_the_rules_are_as_written() -> None:
    assert write_rules.written(TEXT) == TEXT, "python -m docs.write_rules"
    for rule in ALL:
        assert rule.forms and (rule.behind or rule.front), rule.name
        for operator in rule.op_types:
            assert operator in rule.forms, (rule.name, operator)


def test_every_code() -> None:
    """Those of `fold_module`, too; and the page explains none that is gone."""
    sources = [path for room in ("folding", "graph") for path in (ROOT / "bnexport" / room).rglob("*.py")]
    codes = {code for path in sources for code in re.findall(r'Refused\(\s*"([a-z-]+)"', path.read_text())}
    codes |= {"skipped"}
    assert len(codes) > 30
    section = TEXT.split("## When a rule refuses")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {code for row in rows for code in re.findall(r"`([a-z-]+)`", row)} == codes
