"""Environment variables that the code reads, and limits with their defaults, are in the documents."""

import dataclasses
import re
from pathlib import Path

from bnexport.model_io.limits import DEFAULT_LIMITS

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


def test_the_table_of_limits_has_the_defaults() -> None:
    text = (ROOT / "docs/security.md").read_text().partition("## Limits")[2].partition("\n\nA chain")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", text, re.MULTILINE))
    shown = {"2 GiB - 1": 2**31 - 1, "64 MiB": 2**26, "1 TiB": 2**40, "no": False}
    read = {name: shown[value] if value in shown else int(value.replace(",", "")) for name, value in rows.items()}
    assert read == dataclasses.asdict(DEFAULT_LIMITS)
