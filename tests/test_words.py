"""Words of the source: a function's docstring begins with its verb, and a class name means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.test_architecture import PACKAGE, modules, path_of

# First words that begin a noun phrase or a riddle. "Whether" begins the docstring of a predicate.
NO_VERBS = frozenset(
    [
        "A",
        "All",
        "An",
        "And",
        "Any",
        "As",
        "At",
        "Bytes",
        "Each",
        "Every",
        "For",
        "From",
        "How",
        "If",
        "In",
        "It",
        "Names",
        "None",
        "No",
        "Number",
        "One",
        "Only",
        "Or",
        "That",
        "The",
        "Their",
        "These",
        "They",
        "This",
        "Those",
        "To",
        "What",
        "When",
        "Where",
        "Which",
        "Who",
        "Whose",
        "Why",
        "With",
    ]
)
# An argument of a torch operator and one of the command line; a custom operator and a linear one of a graph.
TWINS = {"Argument", "Operator"}


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield functions and methods; properties are nouns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not any("property" in ast.unparse(d) for d in node.decorator_list):
            yield node


def complaint(function: ast.FunctionDef) -> str:
    """Return what is wrong with the first word of a docstring, or nothing."""
    words = (ast.get_docstring(function) or "").split()
    if not words:
        return ""
    returned = "" if function.returns is None else ast.unparse(function.returns)
    first = words[0].rstrip(",;:")
    if first == "Whether":
        return "" if "bool" in returned else f"{function.name}: 'Whether' is for functions that return bool"
    return f"{function.name}: {first!r} is no verb" if first in NO_VERBS else ""


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found = []
    for module, path in modules(PACKAGE).items():
        functions = _functions(ast.parse(path.read_text()))
        found += [f"{path_of(module)}:{one.lineno} {text}" for one in functions if (text := complaint(one))]
    assert not found, "\n".join(found)


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for module, path in modules(PACKAGE).items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path_of(module)}:{node.lineno}")
    twins = {name: found for name, found in places.items() if len(found) > 1 and name not in TWINS}
    assert not twins, twins


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ('def f() -> int:\n    """Return the size."""', False),
        ('def f() -> bool:\n    """Whether it is empty."""', False),
        ('def f() -> int:\n    """Whether it is empty."""', True),
        ('def f() -> int:\n    """The size."""', True),
        ('def f() -> None:\n    """What is left."""', True),
        ('@property\ndef f() -> int:\n    """The size."""', False),
        ("def f() -> int: ...", False),
    ],
)
def test_of_the_first_word(source: str, wrong: bool) -> None:
    found = [complaint(function) for function in _functions(ast.parse(source))]
    assert any(found) == wrong
