"""Limits: set by an option, the environment or a record; no file within them takes more memory than docs/security.md says."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bnexport.cli import main
from bnexport.errors import UnsafeModelError, UsageError
from bnexport.model_io import DEFAULT_LIMITS, Limits, limits, load, wire
from bnexport.model_io.wire import field, varint
from tests.malicious.attempts import data, example, external, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path, example())


HELD = ("model_bytes", "structure_bytes", "nodes", "tensors", "values", "name_length", "tensor_bytes")


@pytest.mark.parametrize("name", HELD)
def test_every_number_is_a_limit(path: Path, name: str) -> None:
    with pytest.raises(UnsafeModelError, match="model_bytes" if name == "model_bytes" else f"--limit {name}="):
        load(path, limits=dataclasses.replace(DEFAULT_LIMITS, **{name: 0}))
    # The others need files of their own: test_attempts.py (420, 421) and test_memory.
    others = {"elements", "graph_depth", "allow_links"}
    assert {field.name for field in dataclasses.fields(Limits)} == {*HELD, *others}


def test_the_option(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that reads a model has it, and it is gone afterwards."""
    monkeypatch.setenv(limits.ENVIRONMENT_VARIABLE, "nodes=0,values=0")
    model, out = str(path), str(path.with_name("out.onnx"))
    commands = [["inspect", model], ["fold", model, out, "--no-verify", "--overwrite"]]
    for command in (*commands, ["run", model, "--input", "x:2,64"], ["verify", model, model]):
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
    **{
        "nodes=5000000": 5_000_000,
        "structure_bytes=512M": 2**29,
        "tensor_bytes=2T": 2**41,
        "tensor_bytes=3G": 3 * 2**30,
    },
    **{"values=3K": 3072, "allow_links=yes": True, "allow_links=no": False},
}


@pytest.mark.parametrize("text", SETTINGS)
def test_settings(text: str) -> None:
    assert limits.parse([text], "here") == dataclasses.replace(
        DEFAULT_LIMITS, **{text.partition("=")[0]: SETTINGS[text]}
    )


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
    page = (Path(__file__).parents[2] / "docs/security.md").read_text()
    table = page.partition("## Limits")[2].partition("\nA chain")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE))
    units = {"GiB": 2**30, "MiB": 2**20, "TiB": 2**40}
    for name, text in documented.items():
        number, _, unit = text.partition(" ")
        unit, _, less = unit.partition(" - ")
        value = False if text == "no" else int(number.replace(",", "")) * units.get(unit, 1) - int(less or 0)
        assert getattr(defaults, name) == value, name
    assert list(documented) == [field.name for field in dataclasses.fields(defaults)]


HEAD = b"\x08\x08" + field(8, b"\x10\x11")
OPERATOR = field(4, b"A") + field(7, b"d")  # in a domain of its own, it needs no outputs
# The documented bound of `load` for a file of one kind.
BYTES = 2 * 2**30
SCALE = 16


def scaled(limits: Limits, scale: int) -> Limits:
    names = ("structure_bytes", "elements", "nodes", "tensors", "values")
    return dataclasses.replace(limits, **{name: getattr(limits, name) // scale for name in names})


def graph(content: bytes) -> bytes:
    return HEAD + field(7, content)


def name(number: int, index: int) -> bytes:
    return field(number, b"%x" % index)


def attributes(content: bytes, kind: int) -> Callable[[int], bytes]:
    """A node with so many attributes."""

    def build(count: int) -> bytes:
        tail = content + b"\xa0\x01" + bytes([kind])
        return graph(field(1, b"".join(field(5, name(1, i) + tail) for i in range(count)) + OPERATOR))

    return build


def list_attribute(number: int, entry: bytes, kind: int) -> Callable[[int], bytes]:
    return lambda count: graph(
        field(1, OPERATOR + field(5, field(1, b"a") + field(number, entry * count) + b"\xa0\x01" + bytes([kind])))
    )


def many(number: int, content: Callable[[int], bytes]) -> Callable[[int], bytes]:
    return lambda count: graph(b"".join(field(number, content(i)) for i in range(count)))


# Accepted: the limit that counts the entries of this kind, and so many of them.
ACCEPTED: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "nodes": ("nodes", many(1, lambda i: name(2, i) + OPERATOR)),
    "graphs": ("nodes", attributes(field(6, b""), 5)),
    "functions": ("nodes", lambda count: graph(b"") + b"".join(field(25, name(1, i)) for i in range(count))),
    "initializers": ("tensors", many(5, lambda i: b"\x08\x00\x10\x01" + name(8, i))),
    "tensors": ("tensors", attributes(field(5, b"\x08\x00\x10\x01"), 4)),
    "outputs": ("values", lambda count: graph(field(1, b"".join(name(2, i) for i in range(count)) + OPERATOR))),
    "attributes": ("values", attributes(b"\x18\x01", 2)),
    "integers": ("values", list_attribute(8, b"\x01", 7)),
    "inputs": ("values", many(11, lambda i: name(1, i))),
    "dimensions": ("elements", lambda count: graph(field(11, field(1, b"x") + field(2, field(1, b"\x08\x01" + field(2,
        field(1, b"") * count)))))),
    "annotations": ("elements", many(14, lambda i: name(1, i))),
    "metadata": ("elements", lambda count: graph(b"") + b"".join(field(14, name(1, i)) for i in range(count))),
    "numbers": ("structure_bytes",
        lambda count: graph(field(5, b"\x08" + varint(count) + b"\x10\x07" + field(7, b"\x01" * count) + name(8, 0)))),
}  # fmt: skip
# Refused once they are parsed: what fits into the limit on elements.
REFUSED: dict[str, bytes] = {
    "empty-nodes": field(1, b""),
    "empty-attributes": field(1, field(5, b"") * 1000),
    "empty-tensors": field(5, b""),
    "empty-graphs": field(1, field(5, field(11, b"") * 1000)),
}
# For each line of standard input, a model and the limits, a process that loads it: forked, so that it starts with nothing
# but the imports. VmHWM, since ru_maxrss begins with what the process that started this one had.
LOAD = """
import os, sys
import bnexport.model_io
from bnexport.errors import BnexportError
from bnexport.model_io import Limits
def read(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
for line in sys.stdin:
    if os.fork():
        os.wait()
        continue
    path, limits = line.split("\t")
    before = read("VmRSS")
    try:
        bnexport.model_io.load(path, limits=eval(limits))
        outcome = "accepted"
    except BnexportError:
        outcome = "refused"
    print(outcome, read("VmHWM") - before, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def loader() -> Iterator[subprocess.Popen[str]]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", LOAD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        yield process
        process.communicate()


def measure(loader: subprocess.Popen[str], data: bytes, limits: Limits, folder: Path) -> tuple[str, int]:
    """Whether a model is accepted, and how many bytes its loading takes."""
    path = folder / "model.onnx"
    path.write_bytes(data)
    assert loader.stdin is not None and loader.stdout is not None
    print(path, repr(limits), sep="\t", file=loader.stdin, flush=True)
    outcome, nbytes = loader.stdout.readline().split()
    path.unlink()
    return outcome, int(nbytes)


def content(kind: str, limits: Limits) -> bytes:
    """A file of `kind` close to the limits: a tenth is left for what stands around it."""
    if kind in REFUSED:
        return graph(REFUSED[kind] * int(limits.elements * 0.9 / wire._tags(REFUSED[kind])))
    limit, build = ACCEPTED[kind]
    tags = 0 if kind == "numbers" else wire._tags(build(4096)) / 4096
    return build(int(min(getattr(limits, limit), limits.elements / tags if tags else 1e18) * 0.9))


@pytest.mark.parametrize("scale", [SCALE, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*ACCEPTED, *REFUSED])
def test_memory(kind: str, scale: int, loader: subprocess.Popen[str], tmp_path: Path) -> None:
    limits = scaled(DEFAULT_LIMITS, scale)
    outcome, nbytes = measure(loader, content(kind, limits), limits, tmp_path)
    assert outcome == ("accepted" if kind in ACCEPTED else "refused")
    assert nbytes < BYTES / scale


@pytest.mark.parametrize("kind", [*ACCEPTED, *REFUSED])
def test_one_entry_too_many(kind: str, tmp_path: Path) -> None:
    """A small limit refuses what is larger, by its name."""
    small = {"structure_bytes": 100_000, "elements": 10_000, "nodes": 1000, "tensors": 1000, "values": 5000}
    limit = ACCEPTED[kind][0] if kind in ACCEPTED else "elements"
    count = int(small[limit] * 1.1)
    data = ACCEPTED[kind][1](count) if kind in ACCEPTED else graph(REFUSED[kind] * count)
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(UnsafeModelError, match=f"--limit {limit}="):
        load(tmp_path / "m.onnx", limits=dataclasses.replace(DEFAULT_LIMITS, **{limit: small[limit]}))


def test_numbers_are_no_elements(tmp_path: Path) -> None:
    """The packed numbers of a large tensor look like tags, and count as none."""
    path = tmp_path / "m.onnx"
    path.write_bytes(ACCEPTED["numbers"][1](100_000).replace(b"\x01" * 100_000, b"\x0a" * 100_000))
    assert load(path, limits=Limits(elements=1000)).graph.initializers["0"].const_value.shape == (100_000,)  # type: ignore[union-attr]
