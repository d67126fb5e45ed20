"""A new folding rule is its file, its lemma and its forms: with these three the lists, tables and tests know it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from bnexport.native import library

ROOT = Path(__file__).parents[2]
RULE = '''"""Abs keeps a positive scale.

    x -> Abs -> k y    =    x -> k x -> Abs        k > 0

A toy.
"""

from bnexport.folding.placing import Rule
from bnexport.graph.nodes import input_at, only_attributes
from bnexport.graph.nodes import Refused


def backward(node, axis, affine, search):
    only_attributes(node, ())
    if not affine.is_scaling or not (affine.scale > 0).all():
        raise Refused("order", "Abs passes positive scales only, and no shift")
    search.backward(input_at(node, 0), axis, affine)


RULE = Rule("toy", ("Abs",), backward, into="toys", forms="Abs", behind="passes a scaling with k > 0")
'''
LEMMA = (
    "bnexport/verification/proof/lemmas.py",
    '("Relu", "LeakyRelu", "PRelu")',
    '("Relu", "LeakyRelu", "PRelu", "Abs")',
)
FORMS = ("tests/forms/recipes/__init__.py", '"Neg", "Relu")', '"Neg", "Relu", "Abs")')
TESTS = (
    *("tests/folding/test_docs.py", "tests/forms/test_forms.py::test_every_named_operator_has_forms"),
    *("tests/forms/test_forms.py::test_a_sample_of_the_forms[Abs]",),
    "tests/verification/proof/test_mutants.py::test_some_wrong_folds_of_each_rule_are_refuted[toy]",
)


def run(folder: Path, *arguments: str) -> str:
    # Without site (-S): an editable installation would import this checkout instead of the copy.
    path = os.pathsep.join((str(folder), sysconfig.get_path("purelib")))
    variables = {**os.environ, library.ENVIRONMENT_VARIABLE: str(library.get_library_path()), "PYTHONPATH": path}
    command = [sys.executable, "-S", "-m", *arguments]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)
    return f"{done.returncode}\n{done.stdout}\n{done.stderr}"


def test_a_toy_rule(tmp_path: Path) -> None:
    for each in ("bnexport", "tests", "docs", "benchmarks"):
        shutil.copytree(ROOT / each, tmp_path / each, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tmp_path.joinpath("bnexport/folding/rules/toy.py").write_text(RULE)
    for place, before, after in (LEMMA, FORMS):
        text = tmp_path.joinpath(place).read_text()
        assert text.count(before) == 1
        tmp_path.joinpath(place).write_text(text.replace(before, after))
    assert run(tmp_path, "docs.write_rules").startswith("0\n")
    assert "| `toy` | Abs | passes a scaling with k > 0 |" in tmp_path.joinpath("docs/folding.md").read_text()
    said = run(tmp_path, "pytest", "-q", "-n", "0", "--noconftest", "-p", "no:cacheprovider", *TESTS)
    assert said.startswith("0\n"), said[-3000:]
