"""The API reference is complete, examples run, pictures are up to date, and links and anchors lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import bnexport
from bnexport import errors
from tests.docs.pages import ROOT, blocks, run

REFERENCE = (ROOT / "docs/api.md").read_text()
LISTED = re.findall(r"^::: ([\w.]+)", REFERENCE, re.MULTILINE)


def test_every_public_name_is_in_the_reference() -> None:
    assert {f"bnexport.{name}" for name in bnexport.__all__} <= set(LISTED)
    assert "bnexport.errors" in LISTED


@pytest.mark.parametrize("path", LISTED)
def test_it_is_documented(path: str) -> None:
    module, _, name = path.rpartition(".")
    found = (
        importlib.import_module(path) if path == "bnexport.errors" else getattr(importlib.import_module(module), name)
    )
    text = inspect.getdoc(found)
    assert text and not text.startswith(f"{name}("), "a dataclass without a docstring shows its signature"
    if inspect.isfunction(found):
        for parameter in inspect.signature(found).parameters:
            assert re.search(rf"\b{parameter}\b", text), parameter


def test_every_error_is_documented_and_has_an_exit_code() -> None:
    for name in errors.__all__:
        error = getattr(errors, name)
        assert error.__doc__
        assert issubclass(error, Warning) or error.exit_code in (1, 2, 3, 4)


def test_the_examples_of_the_reference_run(tmp_path: Path) -> None:
    run(blocks(REFERENCE, "python"), tmp_path)


def test_the_example_of_the_tests_runs(tmp_path: Path) -> None:
    run(blocks((ROOT / "tests/support/README.md").read_text(), "python"), tmp_path)


def test_the_picture_of_the_readme_is_drawn_from_models() -> None:
    from docs.draw_graphs import FILLS, PICTURE, picture

    drawn = picture()
    fills = [rect.get("fill") for rect in ElementTree.fromstring(drawn).iter() if rect.tag.endswith("rect")]
    assert fills.count(FILLS["norm"]) == fills.count(FILLS["changed"]) == 6
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if pinned and torch.__version__.startswith(pinned[1]):  # another one may export other nodes
        assert PICTURE.read_text() == drawn, "python -m docs.draw_graphs"


def test_the_picture_of_the_packages_is_drawn_from_the_imports() -> None:
    from docs.draw_packages import PICTURE, picture

    drawn = picture()
    assert len([path for path in ElementTree.fromstring(drawn).iter() if path.get("marker-end")]) > 10
    assert PICTURE.read_text() == drawn, "python -m docs.draw_packages"


MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "bnexport").rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_main_functions_have_examples() -> None:
    assert {"bnexport.folding.api", "bnexport.sync_bn.convert"} <= set(MODULES)


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
