"""Write the folding rules into docs/folding.md: a table of `bnexport.folding.rules.ALL`, and the graphs of their files.

python -m docs.write_rules
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from bnexport.folding.placing import Rule
from bnexport.folding.rules import ALL

PAGE = Path(__file__).parent / "folding.md"
BEGIN, END = "<!-- rules: begin -->\n", "<!-- rules: end -->\n"


def table() -> str:
    rows = [f"| `{rule.name}` | {rule.forms} | {rule.behind} | {rule.front} |" for rule in ALL]
    head = "| rule | operators | backward (map on the result) | forward (map on the input) |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def picture(rule: Rule) -> str:
    """Return the first indented block of the docstring of the rule's file. Raises ValueError if there is none."""
    module = (
        sys.modules[next(each.__module__ for each in (rule.backward, rule.forward) if each)] if rule.op_types else None
    )
    if module is None:
        return ""
    found = re.search(r"\n\n((?:    .*\n)+)", module.__doc__ or "")
    if found is None:
        raise ValueError(
            f"the docstring of {module.__name__} has no graph: an indented block behind its first sentence"
        )
    return inspect.cleandoc(found[1])


def section() -> str:
    drawn = {text: None for rule in ALL if (text := picture(rule))}
    return f"{table()}\nThe same as graphs, k, c, t and h as above:\n\n```text\n" + "\n\n".join(drawn) + "\n```\n"


def written(page: str) -> str:
    """Return the page with the section replaced."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + section() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
