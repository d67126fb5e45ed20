"""Limits that a user can raise: by an option of every command, by the environment, by a record."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from bnexport.cli import main
from bnexport.errors import UnsafeModelError, UsageError
from bnexport.model_io import DEFAULT_LIMITS, Limits, limits, load
from tests.malicious.attempts import data, example, external, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path, example())


HELD = ("model_bytes", "structure_bytes", "nodes", "tensors", "values", "name_length", "tensor_bytes")


@pytest.mark.parametrize("name", HELD)
def test_every_number_is_a_limit(path: Path, name: str) -> None:
    with pytest.raises(UnsafeModelError, match="model_bytes" if name == "model_bytes" else f"--limit {name}="):
        load(path, limits=dataclasses.replace(DEFAULT_LIMITS, **{name: 0}))
    # The others need files of their own: test_attempts.py (420, 421) and test_memory.py.
    others = {"elements", "graph_depth", "allow_links"}
    assert {field.name for field in dataclasses.fields(Limits)} == {*HELD, *others}


def test_the_option(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that reads a model has it, and it is gone afterwards."""
    monkeypatch.setenv(limits.ENVIRONMENT_VARIABLE, "nodes=0,values=0")
    out = str(path.with_name("out.onnx"))
    commands = [
        ["inspect", str(path)],
        ["fold", str(path), out, "--no-verify", "--overwrite"],
        ["run", str(path), "--input", "x:2,64"],
        ["verify", str(path), str(path)],
    ]
    for command in commands:
        assert main(command) == 3
        assert "--limit values=" in capsys.readouterr().err
        assert main([*command, "--limit", "nodes=10", "--limit", "values=1K"]) == 0, capsys.readouterr().err
        capsys.readouterr()
    assert os.environ[limits.ENVIRONMENT_VARIABLE] == "nodes=0,values=0"


def test_links_by_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.link(data(tmp_path), tmp_path / "again")
    path = external(tmp_path)
    assert main(["inspect", str(path)]) == 3
    assert "--limit allow_links=yes" in capsys.readouterr().err
    assert main(["inspect", str(path), "--limit", "allow_links=yes"]) == 0


SETTINGS = {
    **{"nodes=5000000": {"nodes": 5_000_000}, "structure_bytes=512M": {"structure_bytes": 2**29}},
    **{"tensor_bytes=2T": {"tensor_bytes": 2**41}, "tensor_bytes=3G": {"tensor_bytes": 3 * 2**30}},
    **{
        "values=3K": {"values": 3072},
        "allow_links=yes": {"allow_links": True},
        "allow_links=no": {"allow_links": False},
    },
}


@pytest.mark.parametrize("text", SETTINGS)
def test_settings(text: str) -> None:
    assert limits.parse([text], "here") == dataclasses.replace(DEFAULT_LIMITS, **SETTINGS[text])


NO_SETTINGS = ("", "nodes", "nodes=", "nodes=-1", "nodes=1.5", "nodes=1k", "nodes=yes", "allow_links=1", "edges=5")


@pytest.mark.parametrize("text", [*NO_SETTINGS, "nodes=" + "9" * 19])
def test_what_is_no_setting(text: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="here: got"):
        limits.parse([text], "here")
    assert main(["inspect", str(path), "--limit", text]) == 2
    if text:
        monkeypatch.setenv(limits.ENVIRONMENT_VARIABLE, text)
        assert main(["inspect", str(path)]) == 2


def test_the_defaults_are_the_documented_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(limits.ENVIRONMENT_VARIABLE, raising=False)
    defaults = limits.current()
    table = (
        (Path(__file__).parents[2] / "docs/security.md").read_text().partition("## Limits")[2].partition("\nA chain")[0]
    )
    documented = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE))
    units = {"GiB": 2**30, "MiB": 2**20, "TiB": 2**40}
    for name, text in documented.items():
        number, _, unit = text.partition(" ")
        unit, _, less = unit.partition(" - ")
        value = False if text == "no" else int(number.replace(",", "")) * units.get(unit, 1) - int(less or 0)
        assert getattr(defaults, name) == value, name
    assert list(documented) == [field.name for field in dataclasses.fields(defaults)]
