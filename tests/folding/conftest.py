"""Every fold of these tests that is verified is proved where it stands, or the report says why it is not."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from bnexport.folding import proving
from bnexport.verification.verdict import Verification

_MARKS: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _no_fold_is_left_without_a_proof(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test whose folds were not all proved and whose report does not say why."""
    made: list[Verification] = []

    def record(module: Any, name: str) -> None:
        real = getattr(module, name)

        def recorded(*arguments: Any) -> Verification:
            verdict: Verification = real(*arguments)
            made.append(verdict)
            return verdict

        monkeypatch.setattr(module, name, recorded)

    record(proving, "prove_fold")
    if "bnexport.folding.module.api" in sys.modules:
        record(sys.modules["bnexport.folding.module.api"], "prove_module")
    yield
    for verdict in made:
        _MARKS.update(proof.method for proof in verdict.sites)
        unexplained = [proof for proof in verdict.sites if proof.method != "proved" and not proof.reason]
        assert not unexplained
        assert verdict.passed or verdict.reason


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many folds were proved, in this process."""
    if _MARKS:
        counts = ", ".join(f"{count:,} {mark}" for mark, count in sorted(_MARKS.items()))
        terminalreporter.write_line(f"folds of tests/folding, by the proof where they stand: {counts}")
