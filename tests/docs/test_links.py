"""Relative links and anchors of the documents lead somewhere. (`make docs` checks the site as it is built.)"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / name / "README.md" for name in ("examples", "models", "benchmarks")]
PAGES = sorted([*ROOT.glob("*.md"), *FOLDERS, ROOT / "tests/support/README.md", *(ROOT / "docs").rglob("*.md")])
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(
    r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)|(?:src|href|srcset)=\"([^\"]+)\"", re.MULTILINE
)


def links(text: str) -> list[str]:
    return [next(part for part in found if part) for found in LINK.findall(CODE.sub("", text))]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them for pages of the repository, and mkdocs for those under docs."""
    text = page.read_text()
    headings = re.findall(
        r"^#+ +(.+?)(?: *#*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", it).lower()).strip() for it in headings]
    made = [re.sub(r"[-\s]+", "-", it) if page.is_relative_to(ROOT / "docs") else it.replace(" ", "-") for it in plain]
    named = re.findall(r"\{ *#([\w-]+) *\}|id=\"([\w-]+)\"", text)
    return {*made, *(one or other for one, other in named), *re.findall(r"^::: ([\w.]+)", text, re.MULTILINE)}


def broken(page: Path, text: str) -> list[str]:
    wrong = []
    for link in links(text):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        within = ROOT / "docs" if page.is_relative_to(ROOT / "docs") else ROOT
        if not target.exists() or not target.is_relative_to(within):
            wrong.append(f"{link}: no such file under {within.name}/")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{link}: no such heading")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text()) == []
