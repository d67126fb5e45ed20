"""Put changed code into the functions of a module that is imported."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator


def functions_of(path: str) -> list[types.FunctionType]:
    """All functions whose code is in the file, methods and those within others too."""
    return [it for it in gc.get_objects() if type(it) is types.FunctionType and it.__code__.co_filename == path]


def patch(functions: list[types.FunctionType], text: str, path: str) -> bool:
    """Give the functions their code in the changed text; false where that takes an import of the module.

    The text must have the lines of the original: functions are found by name and line.
    """
    codes: dict[tuple[str, int], types.CodeType | None] = {}
    for code in _codes(compile(text, path, "exec", dont_inherit=True)):
        key = code.co_name, code.co_firstlineno
        codes[key] = code if codes.get(key, code) == code else None
    for function in functions:
        new = codes.get((function.__code__.co_name, function.__code__.co_firstlineno))
        if new is None or new.co_freevars != function.__code__.co_freevars:
            return False
        function.__code__ = new
    return True


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)
