"""The way of a value through the calls of the package, to see that it goes in one direction."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import bnexport

_PACKAGE = f"{Path(bnexport.__file__).parent}/"


def walk(function: Callable[[], object], carries: Callable[[object], bool]) -> list[str]:
    """Return the files of the package whose functions are entered with an argument that `carries`, in their order and without
    the same one twice in a row. `function` runs once before, so that everything is imported.
    """
    way: list[str] = []

    def enter(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            file = code.co_filename.removeprefix(_PACKAGE)
            if way[-1:] != [file] and any(
                map(carries, map(frame.f_locals.get, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]))
            ):
                way.append(file)

    function()
    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        function()
    finally:
        sys.setprofile(before)
    return way


def returns(way: list[str]) -> int:
    """How often it comes back to a file that it has left."""
    return len(way) - len(set(way))


def packages(way: list[str]) -> list[str]:
    """Return the way from package to package."""
    found: list[str] = []
    for file in way:
        package = file.rpartition("/")[0]
        if found[-1:] != [package]:
            found.append(package)
    return found
