"""Targets and environment variables that documents name exist, and variables that the code reads are named."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (target, path.name)
        for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md"))
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 20
    assert {(target, page) for target, page in named if target not in targets} == set()


def test_every_variable_is_documented() -> None:
    sources = [*ROOT.glob("bnexport/**/*.py"), *ROOT.glob("custom_ops/**/*.cpp"), *ROOT.glob("custom_ops/**/*.h")]
    read = {
        name
        for path in sources
        for name in re.findall(r"(?:getenv\(|_VARIABLE = |environ[.\[(]\w*\(?)[\"'](BNEXPORT_\w+)", path.read_text())
    }
    assert {"BNEXPORT_LIBRARY", "BNEXPORT_ISA"} <= read
    table = (ROOT / "docs/command_line.md").read_text().partition("## Environment variables")[2]
    assert sorted(name for name in read if f"`{name}`" not in table) == []
