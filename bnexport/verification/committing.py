"""The end of every change of a file: verify what was staged, then move it into place."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from bnexport.errors import VerificationError
from bnexport.model_io import Staged, load
from bnexport.verification.verdict import Verification


def commit(
    model: ir.Model,
    staged: Staged | None,
    source: str | None,
    judge: Callable[[ir.Model], Verification] | None,
    what: str,
) -> tuple[ir.Model, Verification | None]:
    """Verify the staged file, or `model` where nothing is staged, and commit it; return the model and the verdict.

    Args:
        source: the file that `model` was read from.
        judge: compares with the original; None for no verification.
        what: how an error calls the model.

    Warns:
        NotVerifiedWarning: the file was written, and nothing could verify it.

    Raises:
        VerificationError: the outputs differ; nothing was written.
    """
    verdict = None
    try:
        if judge is not None:
            # What is verified is what was written.
            verdict = judge(model if staged is None else load(staged.path))
            if verdict.status == "failed":
                raise VerificationError(
                    f"the {what} model differs from the original: {verdict.reason}; nothing was written"
                )
        if staged is not None:
            staged.commit()
            if staged.target == source:
                # Lazy weights refer to the file that has just been replaced.
                model = load(staged.target)
            if verdict is not None:
                verdict.warn(staged.target, stacklevel=3)
    finally:
        if staged is not None:
            staged.discard()
    return model, verdict
