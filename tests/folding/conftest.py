"""Every fold of these tests that is verified is proved where it stands, or the report says why it is not.

Every folded model passes ONNX's full check, with the shapes that it declares, if its source does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from bnexport.folding import api
from bnexport.graph.shapes import expanded_sizes
from bnexport.model_io import ModelSource
from bnexport.model_io.encode import encode
from bnexport.model_io.write import tensor_total
from bnexport.verification import api as verification_api
from bnexport.verification.verdict import Verification
from tests.support.onnx_text import passes_full_check

# Larger models are not checked: the time would show.
_CHECKED_BYTES, _CHECKED_NODES = 1 << 16, 500


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

    record(verification_api, "prove_fold")
    if "bnexport.folding.torch_module" in sys.modules:
        record(sys.modules["bnexport.folding.torch_module"], "prove_module")
    yield
    for verdict in made:
        unexplained = [proof for proof in verdict.sites if proof.method != "proved" and not proof.reason]
        assert not unexplained
        assert verdict.passed or verdict.reason


@pytest.fixture(autouse=True)
def _every_fold_passes_the_full_check(monkeypatch: pytest.MonkeyPatch) -> None:
    real = api._transform

    def checked(opened: ModelSource, *arguments: Any, **options: Any) -> Any:
        nodes, of_functions = expanded_sizes(opened.model)
        small = nodes + sum(of_functions.values()) <= _CHECKED_NODES and tensor_total(opened.model) <= _CHECKED_BYTES
        valid = small and passes_full_check(_whole(opened.model))
        done = real(opened, *arguments, **options)
        if valid:
            onnx.checker.check_model(_whole(done.model), full_check=True)
        return done

    monkeypatch.setattr(api, "_transform", checked)


def _whole(model: ir.Model) -> onnx.ModelProto:
    """Like `to_proto`, whose limit a test may lower."""
    pieces = (piece if isinstance(piece, bytes) else piece.tobytes() for piece in encode(model).model)
    return onnx.ModelProto.FromString(b"".join(pieces))
