"""Each pair of models gets its verdict; a model and itself pass by the same method."""

from __future__ import annotations

import pytest

from bnexport import verify
from tests.verification.pairs import PAIRS


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_gets_its_verdict(name: str) -> None:
    pair = PAIRS[name]
    first, second = pair.models()
    for method, status in pair.says.items():
        for source, other in ((first, second), (second, first))[: 1 + pair.turned]:
            verdict = verify(source, other, method=method)  # type: ignore[arg-type]
            assert "proved" not in {proof.method for proof in verdict.sites}
            if status == "another":
                assert verdict.status != "passed"
                assert verify(source, other, method="local").another
            else:
                assert verdict.status == status, verdict
    method = next(iter(pair.says))
    assert verify(first, first, method=method).passed  # type: ignore[arg-type]
