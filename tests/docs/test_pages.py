"""What the documents show is run: Python and shell blocks, in order, in an empty folder; names that they use exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bnexport.cli.application import app
from bnexport.cli.common import PLACES
from tests.docs.pages import RESULT, ROOT, blocks, run

PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
# Run elsewhere: by tests/test_examples.py, and with real packages by tests/frameworks.
ELSEWHERE = ("cpp", "mmdetection", "mmsegmentation", "timm", "trainers")


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in ELSEWHERE], ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    printed = run(blocks(page.read_text(), "python", "sh"), tmp_path)
    assert len(RESULT.findall(printed)) == (page.stem in ("apex", "onnx_file")), printed
    for _, line in blocks(page.read_text(), "text"):
        assert not line.startswith("result:") or without_numbers(line).removesuffix("...") in without_numbers(printed)


README = (ROOT / "README.md").read_text()


def without_numbers(text: str) -> str:
    """The text without errors, bounds (numbers in exponent form) and versions."""
    return re.sub(r"\d(\.\d+)?e-\d+|(?<=onnxruntime )[\d.]+", "#", text).strip()


def shown(page: str, before: str) -> str:
    """The first block of output that follows the text `before`."""
    return blocks(page[page.index(before) :], "text")[0][1]


def test_the_readme_runs_as_pasted(tmp_path: Path) -> None:
    """Every block alone, with nothing defined before it, and the output that follows it."""
    ran = [("python", code) for _, code in blocks(README, "python")]
    ran += [("sh", code) for _, code in blocks(README, "sh") if code.startswith("bnexport ")]
    assert {language for language, _ in ran} == {"python", "sh"}
    for number, (language, code) in enumerate(ran):
        folder = tmp_path / str(number)
        folder.mkdir()
        printed = without_numbers(run([(language, code)], folder))
        for line in without_numbers(shown(README, code)).splitlines():
            assert line in printed, f"{line}\nis not in\n{printed}"
        assert (folder / "model.onnx").exists()


def test_no_page_installs_from_an_index_that_has_no_such_package() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    assert [page.name for page in pages if re.search(r"pip install [\"']?bnexport", page.read_text())] == []


def test_the_site_shows_the_help_of_every_command() -> None:
    from docs.site_hooks import on_page_markdown

    page = on_page_markdown((ROOT / "docs/command_line.md").read_text())
    for name in PLACES:
        assert f"<summary>bnexport {name} --help</summary>" in page and f"Usage: bnexport {name} " in page
    assert "--allow-not-verified" in page and on_page_markdown("another page") == "another page"


def test_the_site_and_the_help_name_the_same_commands() -> None:
    """In one order and with the same words: --help, docs/command_line.md, and of targets Makefile and make help."""
    page = (ROOT / "docs/command_line.md").read_text()
    table = re.findall(r"^\| `bnexport ([a-z-]+)[^`]*` \| (.+) \|$", page, re.MULTILINE)
    assert [name for name, _ in table] == sorted(PLACES, key=PLACES.__getitem__)
    commands = {each.name or each.callback.__name__: each for each in app.registered_commands}
    for name, text in table:
        first = commands[name].callback.__doc__.strip().splitlines()[0].partition(". ")[0].rstrip(".")
        assert text.startswith(first), f"docs/command_line.md: {name}"
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert named and named <= targets | {"help"}


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
