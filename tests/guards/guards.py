"""The guards of a module, each of which some test should see: that it is there, and how far it reaches.

gone    if test: ... raise        the test is False: what it kept out comes in
term    if a or b: ... raise      one of the terms is dropped; of `a and b`, too, and then more is refused
        return a and b            the same of a predicate
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Guard:
    """A change of one condition of one file."""

    file: str
    line: int
    last: int  # line of the condition
    name: str  # the change without its line, so that it is the same one after other lines have moved
    text: str  # of the changed file; lines that are not changed keep their numbers

    def order(self) -> bytes:
        """A place in the sequence of guards that does not depend on other files."""
        return hashlib.sha256(self.name.encode()).digest()


def guards(root: Path, file: str) -> list[Guard]:
    """All changes of root/file."""
    source = (root / file).read_text()
    result, seen = [], Counter[str]()
    for kind, old, new in _changes(ast.parse(source)):
        name = f"{file} {kind}: `{_text(old)}` -> `{_text(new)}`"
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name} ({seen[name]})"
        assert old.end_lineno is not None
        result.append(Guard(file, old.lineno, old.end_lineno, name, _spliced(source, old, new)))
    return result


def _changes(tree: ast.Module) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise):
            yield "gone", node.test, ast.Constant(False)
            yield from _without_terms(node.test)
        elif isinstance(node, ast.Return) and node.value is not None:
            yield from _without_terms(node.value)


def _without_terms(condition: ast.expr) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    if isinstance(condition, ast.BoolOp):
        for i in range(len(condition.values)):
            rest = [value for j, value in enumerate(condition.values) if j != i]
            yield "term", condition, rest[0] if len(rest) == 1 else ast.BoolOp(condition.op, rest)


def _spliced(source: str, old: ast.expr, new: ast.expr) -> str:
    lines = source.encode().splitlines(keepends=True)
    assert old.end_lineno is not None and old.end_col_offset is not None
    first, last = old.lineno - 1, old.end_lineno - 1
    middle = f"({ast.unparse(ast.fix_missing_locations(new))}{chr(10) * (last - first)})"
    head, tail = lines[first][: old.col_offset], lines[last][old.end_col_offset :]
    return b"".join([*lines[:first], head, middle.encode(), tail, *lines[last + 1 :]]).decode()


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(ast.fix_missing_locations(node)).split())
    return text if len(text) <= 120 else text[:117] + "..."
