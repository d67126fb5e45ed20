"""The structs of the C API: Python's description is the header's, field by field, and the compiler's."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bnexport.errors import UsageError
from bnexport.native import capi

INCLUDE = Path(__file__).resolve().parents[2] / "custom_ops" / "include"
STRUCTS: dict[str, Any] = {"bnexport_forward": capi.ForwardParams, "bnexport_backward": capi.BackwardParams}
KINDS = {"uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "double": ctypes.c_double}
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")


def header_fields(struct: str) -> list[tuple[str, Any]]:
    """Names and types of a struct's fields, as the header declares them."""
    text = re.sub(r"/\*.*?\*/", "", (INCLUDE / "bnexport.h").read_text(), flags=re.DOTALL)
    found = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", text, flags=re.DOTALL)
    assert found is not None
    fields = []
    for declaration in filter(None, (part.strip() for part in found[1].split(";"))):
        parts = re.fullmatch(r"(?:const )?(\w+)(\*?) ([\w, ]+)", declaration)
        assert parts is not None, declaration
        kind = ctypes.c_void_p if parts[2] else KINDS[parts[1]]
        fields += [(name.strip(), kind) for name in parts[3].split(",")]
    return fields


@pytest.mark.parametrize("struct", STRUCTS)
def test_fields_are_those_of_the_header(struct: str) -> None:
    assert list(STRUCTS[struct]._fields_) == header_fields(struct)


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_offsets_are_those_of_the_compiler(tmp_path: Path) -> None:
    lines = [
        f'printf("{struct} {name} %zu %zu\\n", offsetof({struct}, {name}), sizeof((({struct}*)0)->{name}));'
        for struct, described in STRUCTS.items()
        for name, _ in described._fields_
    ]
    lines += [f'printf("{struct} %zu\\n", sizeof({struct}));' for struct in STRUCTS]
    source = tmp_path / "offsets.c"
    source.write_text(
        '#include <stdio.h>\n#include "bnexport.h"\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0; }\n"
    )
    subprocess.run([str(COMPILER), f"-I{INCLUDE}", source, "-o", tmp_path / "offsets"], check=True)
    printed = subprocess.run([tmp_path / "offsets"], check=True, capture_output=True, text=True).stdout.splitlines()
    expected = [
        f"{struct} {name} {getattr(described, name).offset} {getattr(described, name).size}"
        for struct, described in STRUCTS.items()
        for name, _ in described._fields_
    ]
    assert printed == expected + [f"{struct} {ctypes.sizeof(described)}" for struct, described in STRUCTS.items()]


def test_enums_are_those_of_the_header() -> None:
    text = (INCLUDE / "bnexport.h").read_text()
    values = {name: int(value) for name, value in re.findall(r"BNEXPORT_(\w+) = (\d+)", text)}
    described = {
        **{name.upper(): value for name, value in (capi.DTYPES | capi.LAYOUTS).items()},
        **{f"STATS_{name.upper()}": value for name, value in capi.STATS_MODES.items()},
        **{f"GRAD_{name.upper()}": value for name, value in capi.GRAD_REDUCTIONS.items()},
    }
    assert values == described


@pytest.mark.parametrize("struct", STRUCTS)
def test_the_library_knows_the_size(struct: str) -> None:
    """A library whose struct is longer refuses ours: it would read behind its end."""
    params = STRUCTS[struct](ctypes.sizeof(STRUCTS[struct]) - 1)
    with pytest.raises(
        UsageError, match=rf"params\.struct_size: got \d+, expected {ctypes.sizeof(STRUCTS[struct])} or"
    ):
        capi.run(struct.removeprefix("bnexport_"), params)


def test_a_name_that_is_no_field_is_refused() -> None:
    with pytest.raises(AttributeError):
        capi.ForwardParams().size = 3
