"""Write the folding rules into docs/folding.md: a table of `bnexport.folding.rules.ALL`.

python -m docs.write_rules
"""

from __future__ import annotations

from pathlib import Path

from bnexport.folding.rules import ALL

PAGE = Path(__file__).parent / "folding.md"
BEGIN, END = "<!-- rules: begin -->\n", "<!-- rules: end -->\n"


def table() -> str:
    rows = [f"| `{rule.name}` | {rule.forms} | {rule.behind} | {rule.front} |" for rule in ALL]
    head = "| rule | operators | backward (map on the result) | forward (map on the input) |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def written(page: str) -> str:
    """Return the page with the table replaced."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
