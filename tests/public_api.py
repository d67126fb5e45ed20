"""The public surface as text: names, signatures and members, and the commands with their options.

    python -m tests.public_api        # writes tests/public_api.txt anew

test_public_api.py compares, so that a change of the surface is a change of that file, and is seen in review.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("public_api.txt")
# What is promised; everything else may change without notice, also where a document names it.
MODULES = ("bnexport", "bnexport.errors", "bnexport.folding", "bnexport.schema", "bnexport.tolerances")


class Raw(str):
    """An annotation as it is written, so that versions of Python print the same."""

    __repr__ = str.__str__


def annotation(value: Any) -> Any:
    return (
        value
        if value is inspect.Parameter.empty
        else Raw(value if isinstance(value, str) else getattr(value, "__name__", value))
    )


def signature(function: Any, *, bound: bool = False) -> str:
    """`bound`: without self."""
    found = inspect.signature(function)
    parameters = [it.replace(annotation=annotation(it.annotation)) for it in found.parameters.values()][bound:]
    return str(found.replace(parameters=parameters, return_annotation=annotation(found.return_annotation)))


def constant(value: Any) -> str:
    plain = isinstance(value, (int, float, str)) or (
        isinstance(value, tuple) and all(isinstance(it, str) for it in value)
    )
    return f" = {value!r}" if plain else f": {type(value).__name__}"


def public(names: Any) -> list[str]:
    return sorted(name for name in names if not name.startswith("_"))


def members(cls: type) -> Iterator[tuple[str, Any, str]]:
    """Name, object and text of what this class and its bases of ours define; fields are in the constructor."""
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    ours = [base for base in cls.__mro__ if base.__module__.startswith("bnexport")]
    found = {name: value for base in reversed(ours) for name, value in vars(base).items()}
    for name in public({*found} - fields):
        value = found[name]
        if isinstance(value, property):
            yield name, value, f": {annotation(inspect.signature(value.fget).return_annotation)}"
        elif isinstance(value, (staticmethod, classmethod, types.FunctionType)):
            yield name, value, signature(getattr(cls, name), bound=isinstance(value, types.FunctionType))
        else:
            yield name, None, constant(value.value if isinstance(value, enum.Enum) else value)


def names_of(module: types.ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = {
        name: value
        for name, value in vars(module).items()
        if not isinstance(value, types.ModuleType) and getattr(value, "__module__", module.__name__) == module.__name__
    }
    return public(name for name in own if name not in ("TYPE_CHECKING", "annotations"))


def objects() -> Iterator[tuple[str, Any]]:
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in names_of(module):
            yield f"{module_name}.{name}", getattr(module, name)


def lines_of(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        constructor = "" if issubclass(value, (Exception, enum.Enum)) else signature(value).removesuffix(" -> None")
        yield f"class {name}{constructor}{f': {bases}' if bases else ''}"
        for member, _, text in members(value):
            yield f"    .{member}{text}"
    elif callable(value):
        yield f"{name}{signature(value)}"
    else:
        yield name + constant(value)


def commands() -> Iterator[str]:
    import typer.main

    from bnexport.cli.application import app

    program = typer.main.get_command(app)
    for name, command in sorted(program.commands.items()):  # type: ignore[attr-defined]
        shown = []
        for it in command.params:
            text = it.name.upper() if it.param_type_name == "argument" else "|".join([*it.opts, *it.secondary_opts])
            shown.append(f"{text}..." if it.nargs == -1 or it.multiple else text)
        yield f"$ bnexport {name} {' '.join(shown)}"


def listing() -> str:
    lines: list[str] = []
    known: dict[int, str] = {}
    for name, value in objects():
        first = known.setdefault(id(value), name) if callable(value) else name
        lines += lines_of(name, value) if first == name else [f"{name} is {first}"]
    return "\n".join([*lines, *commands()]) + "\n"


if __name__ == "__main__":
    FILE.write_text(listing())
    print(f"wrote {FILE}")
