"""Small changes of a module's source, each of which some test should notice.

comparison   <  becomes  <=, ==  becomes  !=, in  becomes  not in, ...
arithmetic   +  becomes  -, *  becomes  /, //  becomes  *, ...
constant     a number grows or shrinks by one, True becomes False
condition    the test of an if, while, conditional expression or comprehension is negated
boolean      and  becomes  or,  not x  becomes  x
statement    a call, an assignment to an attribute or item, an augmented assignment, a raise, continue or break is dropped
return       return x  becomes  return None
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}  # fmt: skip
_NO_CODE = ("annotation", "returns", "type_comment", "decorator_list")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    line: int
    last: int  # line of the statement, or of a compound statement's head
    name: str  # the change without its line, so that it is the same one after other lines have moved
    text: str  # of the changed file; lines that are not changed keep their numbers
    in_function: bool  # the code runs when something is called, not when the module is imported

    def order(self, seed: int) -> bytes:
        """A place in the sequence of mutants that does not depend on other files."""
        return hashlib.sha256(f"{seed} {self.name}".encode()).digest()


@dataclasses.dataclass
class _Change:
    kind: str
    old: ast.expr | ast.stmt
    new: ast.expr | ast.stmt


def mutants(root: Path, file: str) -> list[Mutant]:
    """All changes of root/file."""
    source = (root / file).read_text()
    tree = ast.parse(source)
    _mark(tree, False, (1, 1))
    result, seen, texts = [], Counter[str](), set()
    for change in _changes(tree):
        text = _spliced(source, change)
        if text in texts:  # `if not x` is negated, and its `not` dropped
            continue
        texts.add(text)
        name = f"{file} {change.kind}: `{_text(change.old)}` -> `{_text(change.new)}`"
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name} ({seen[name]})"
        span = change.old.span  # type: ignore[union-attr]
        in_function = change.old.in_function  # type: ignore[union-attr]
        result.append(Mutant(file, change.old.lineno, span[1], name, text, in_function))
    return result


def _mark(node: ast.AST, in_function: bool, span: tuple[int, int]) -> None:
    for field, value in ast.iter_fields(node):
        inside = in_function or (isinstance(node, _FUNCTIONS) and field == "body")
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            lines = span
            if isinstance(child, ast.stmt):
                body = getattr(child, "body", None)
                lines = child.lineno, max(child.lineno, body[0].lineno - 1) if body else child.end_lineno or 0
            child.in_function, child.span = inside, lines  # type: ignore[attr-defined]
            _mark(child, inside, lines)


def _spliced(source: str, change: _Change) -> str:
    lines = source.encode().splitlines(keepends=True)
    old = change.old
    assert old.end_lineno is not None and old.end_col_offset is not None
    first, last = old.lineno - 1, old.end_lineno - 1
    new, gap = ast.unparse(ast.fix_missing_locations(change.new)), "\n" * (last - first)
    middle = new + gap if isinstance(old, ast.stmt) else f"({new}{gap})"
    head, tail = lines[first][: old.col_offset], lines[last][old.end_col_offset :]
    return b"".join([*lines[:first], head, middle.encode(), tail, *lines[last + 1 :]]).decode()


def _changes(tree: ast.Module) -> Iterator[_Change]:
    for node in _code(tree):
        yield from _of_expression(node)
        if isinstance(node, ast.stmt):
            yield from _of_statement(node)


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run: no annotations, decorators, imports, messages or signals."""
    for field, value in ast.iter_fields(tree):
        if field in _NO_CODE:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_skipped(child):
                continue
            yield child
            if not isinstance(child, ast.JoinedStr):
                yield from _code(child)


def _is_skipped(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets)
    if isinstance(node, ast.Call):  # a changed signal or process number would hit bystanders
        return ast.unparse(node.func) in ("os.kill", "os.killpg")
    return isinstance(node, (ast.Import, ast.ImportFrom))


def _of_expression(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Compare):
        for position, operator in enumerate(node.ops):
            if type(operator) in _COMPARISONS:
                new = copy.deepcopy(node)
                new.ops[position] = _COMPARISONS[type(operator)]()
                yield _Change("comparison", node, new)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
        yield _Change("arithmetic", node, ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _Change("boolean", node, ast.BoolOp(other, node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _Change("boolean", node, node.operand)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield _Change("constant", node, ast.Constant(not node.value))
        elif isinstance(node.value, (int, float)):
            yield _Change("constant", node, ast.Constant(node.value + 1))
            if node.value:
                yield _Change("constant", node, ast.Constant(node.value - 1))
    conditions = [node.test] if isinstance(node, (ast.If, ast.While, ast.IfExp)) else []
    for test in node.ifs if isinstance(node, ast.comprehension) else conditions:
        yield _Change("condition", test, _negated(test))


def _of_statement(node: ast.stmt) -> Iterator[_Change]:
    dropped = isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break))
    dropped |= isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await, ast.YieldFrom))
    dropped |= isinstance(node, ast.Assign) and all(
        isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets
    )
    if dropped:
        yield _Change("statement", node, ast.Pass())
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield _Change("return", node, ast.Return(ast.Constant(None)))


def _negated(test: ast.expr) -> ast.expr:
    return (
        test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else ast.UnaryOp(ast.Not(), test)
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.BinOp) -> bool:
    """Strings are joined with +, and types with |."""
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(ast.fix_missing_locations(node)).split())
    return text if len(text) <= 90 else text[:87] + "..."
