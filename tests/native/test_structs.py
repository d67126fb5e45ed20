"""The structs of the C API: Python's description is the compiler's, field by field."""

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
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_offsets_are_those_of_the_compiler(tmp_path: Path) -> None:
    fields = [(struct, name) for struct, described in STRUCTS.items() for name, _ in described._fields_]
    lines = [
        f'printf("%zu %zu\\n", offsetof({struct}, {name}), sizeof((({struct}*)0)->{name}));' for struct, name in fields
    ]
    lines += [f'printf("%zu\\n", sizeof({struct}));' for struct in STRUCTS]
    source = tmp_path / "offsets.c"
    source.write_text(
        '#include <stdio.h>\n#include "bnexport.h"\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0; }\n"
    )
    subprocess.run([str(COMPILER), f"-I{INCLUDE}", source, "-o", tmp_path / "offsets"], check=True)
    printed = subprocess.run([tmp_path / "offsets"], check=True, capture_output=True, text=True).stdout.splitlines()
    described = [getattr(STRUCTS[struct], name) for struct, name in fields]
    expected = [f"{field.offset} {field.size}" for field in described]
    assert printed == expected + [f"{ctypes.sizeof(described)}" for described in STRUCTS.values()]


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
    with pytest.raises(UsageError, match=r"forward: got \['size'\]"):
        capi.forward_params(size=3)
