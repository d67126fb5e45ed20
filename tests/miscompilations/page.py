"""The table of known mistakes: python -m tests.miscompilations.page, from the catalogue into docs/miscompilations.md."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.markdown import table
from tests.miscompilations.catalogue import GROUPS
from tests.miscompilations.mistake import OURS, Mistake

PAGE = Path(__file__).parents[2] / "docs" / "miscompilations.md"
BLOCK = re.compile(r"(?<=<!-- miscompilations: begin -->\n).*?(?=\n<!-- miscompilations: end -->)", re.DOTALL)
WORDS = {"failed": "failed", "not_verified": "not verified", "refused": "file refused"}


def source(each: Mistake) -> str:
    """Link to the thread; a mistake without one names the release that makes it."""
    if each.source == OURS:
        return "bnexport itself"
    if "#" not in each.source:
        return each.source
    repository, number = each.source.split("#")
    return f"[{each.source}](https://github.com/{repository}/issues/{number})"


def verdict(each: Mistake) -> str:
    """What verify says by default, and where it is wrong itself."""
    methods = () if each.known is None else each.known.methods
    if "both" in methods:
        return f"**passes**: {each.known.why}"  # type: ignore[union-attr]
    parts = [WORDS[each.verdict], *(f"`{method}` alone passes" for method in methods)]
    if each.known_right:
        parts.append(f"**the right one does not pass**: {each.known_right}")
    return "; ".join(parts)


def render() -> str:
    """Return one table for each group."""
    parts = []
    for title, mistakes in GROUPS.items():
        rows = [[f"`{each.name}`", source(each), each.operators, each.what, verdict(each)] for each in mistakes]
        header = ["mistake", "source", "operators", "what went wrong", "verdict"]
        parts.append(f"### {title}\n\n{table(header, rows, left=len(header))}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: render(), PAGE.read_text(), count=1))
    print(f"{PAGE} written")
