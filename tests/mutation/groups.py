"""Name the sources that are mutated and the tests that should notice."""

from __future__ import annotations

import dataclasses
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Group:
    """Sources and tests. Of `tests` those are run that reach a changed line.

    far: tests in processes of their own, for lines that no test reaches in this one.
    """

    files: tuple[str, ...]  # globs
    tests: tuple[str, ...]
    far: tuple[str, ...] = ()

    def sources(self) -> list[str]:
        found = {str(path.relative_to(ROOT)) for glob in self.files for path in ROOT.glob(glob)}
        return sorted(path for path in found if not path.endswith("__init__.py"))


def _named(pattern: str, names: str) -> tuple[str, ...]:
    return tuple(pattern.format(name) for name in names.split())


GROUPS = {
    "folding": Group(
        (
            *_named("bnexport/folding/{}/*.py", "rules placing"),
            *_named("bnexport/folding/reading/{}.py", "site elementwise batch_norm"),
            *_named("bnexport/folding/editing/{}.py", "plan edits parameters"),
            *_named("bnexport/folding/{}.py", "affine context"),
        ),
        (
            *_named("tests/folding/rules/test_{}.py", "forward backward resize"),
            *_named("tests/folding/editing/test_{}.py", "merge scaled_tensor"),
            *_named("tests/folding/reading/test_{}.py", "decomposed contradictions"),
            "tests/folding/converting/test_sync_bn.py",
            *_named("tests/folding/test_{}.py", "affine traps opsets scopes api random_graphs refusals folder"),
        ),
    ),
    "sync_bn": Group(
        ("bnexport/sync_bn/*.py",),
        _named(
            "tests/sync_bn/test_{}.py",
            "reference rows autograd derivatives operands convert recognition module operators distributed copies module_copies",
        ),
        ("tests/sync_bn/test_distributed.py",),
    ),
    "model_io": Group(
        ("bnexport/model_io/*.py",),
        (
            *_named("tests/model_io/test_{}.py", "model_io parts validate wire"),
            *_named("tests/malicious/test_{}.py", "attempts limits wire races memory output"),
            *("tests/folding/test_api.py", "tests/folding/test_scopes.py"),
        ),
    ),
    # One file, one test: for the tests of this tool.
    "names": Group(("bnexport/graph/nodes.py",), ("tests/mutation/example.py",)),
}
