"""Environment variables that the code reads, and limits with their defaults, are in the documents."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
