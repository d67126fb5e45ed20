"""Prose holds no measured figure: those stand in tables made from benchmarks/results, or in notes of docs/design.

A figure in prose grows old without anyone seeing it. What a page promises (a bound that tests hold, a limit that can be
set) is not measured: each such number is listed here with the reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

# Pages that a program writes as a whole.
GENERATED = {"docs/zoo.md": "tests/zoo/page.py"}
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(
        path
        for path in (ROOT / "docs").rglob("*.md")
        if "design" not in path.relative_to(ROOT / "docs").parts and str(path.relative_to(ROOT)) not in GENERATED
    ),
]
NUMBER = r"(?<![\w.`])\d[\d,]*(?:\.\d+)?"
UNITS = (
    rf"{NUMBER} ?(?:ms|us|µs|ns|milliseconds|microseconds|GB/s|TB/s)\b",
    rf"{NUMBER} ?(?:%|per cent\b)",
    rf"{NUMBER} (?:x|times) (?![A-Z] )[a-zA-Z(]",
    rf"{NUMBER} ?s\b(?! of)",
    rf"(?<!every ){NUMBER}[ -]seconds?\b",  # "every 30 seconds" is an interval
    rf"{NUMBER}e-\d+\b",
)
MEASURED = re.compile("|".join(UNITS))
# page: what may stand there, and why.
ALLOWED: dict[str, dict[str, str]] = {
    "CONTRIBUTING.md": {"85 %": "the share of mutants that should die"},
    "docs/folding.md": {"1 %": "the bound of tolerances.is_evidence"},
    "docs/performance.md": {"45 s": "a limit of the benchmark"},
    "docs/security.md": {"10 s": "a limit of the fuzzer"},
}


def prose(text: str) -> str:
    """The text without code, generated blocks and comments, its line breaks kept."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    for pattern in (
        r"<!-- (\w+): begin -->.*?<!-- \1: end -->",
        r"<!--.*?-->",
        r"^(```|~~~).*?^\1",
        r"`[^`\n]+`",
        r"\]\([^)\s]*\)",
    ):
        text = re.sub(pattern, blank, text, flags=re.MULTILINE | re.DOTALL)
    return text


def measured(text: str) -> list[tuple[int, str]]:
    """(line, figure) of what looks measured."""
    return [
        (number, found[0])
        for number, line in enumerate(prose(text).splitlines(), 1)
        for found in MEASURED.finditer(line)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_has_no_measured_figure(page: Path) -> None:
    allowed = ALLOWED.get(str(page.relative_to(ROOT)), {})
    found = [(line, figure) for line, figure in measured(page.read_text()) if figure not in allowed]
    assert found == [], "a table made by benchmarks/page.py, or a note in docs/design, is the place of a figure"


def test_what_is_allowed_still_stands_there() -> None:
    for name, figures in ALLOWED.items():
        standing = {figure for _, figure in measured((ROOT / name).read_text())}
        assert set(figures) <= standing, name


def test_generated_pages_have_their_program() -> None:
    for page, program in GENERATED.items():
        assert Path(page).name in (ROOT / program).read_text()


def test_measured_figures_are_recognised() -> None:
    found = [
        "takes 4.4 ms",
        "0.5 to 0.7 x as fast",
        "a step in 85 microseconds",
        "saves 2.2 %",
        "within 5e-7",
        "95.6 per cent",
        "in 0.93 s",
        "5.0 GB/s",
        "two runs of 12 seconds",
        "0.60 to 0.82 times what Mul takes",
        "2.4 x memory",
    ]
    assert [text for text in found if not measured(text)] == []
    passed = [
        "4 MB on disk",
        "kernels of 3 x 3",
        "`lr=1e-3`",
        "<!-- a: begin -->\n| 4 ms |\n<!-- a: end -->",
        "```sh\n4 ms\n```",
        "opset 18",
        "[a](x_5ms.md)",
        "1x1 and 2 x 2",
        "a line every 30 seconds",
    ]
    assert [text for text in passed if measured(text)] == []
