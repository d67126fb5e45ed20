"""Function verify: compare two models, with MMCVSyncBatchNorm converted if no library implements it."""

from __future__ import annotations

from bnexport.folding.folder import convert_model
from bnexport.model_io.read import Source, open_source
from bnexport.verification import models
from bnexport.verification.models import Inputs, Terms
from bnexport.verification.verdict import Verification


def verify(
    reference: Source,
    candidate: Source,
    *,
    inputs: Inputs | None = None,
    seed: int = 0,
    samples: int = 2,
    atol: float | None = None,
    rtol: float | None = None,
    timeout: float | None = None,
) -> Verification:
    """Run both models on the same inputs and compares every output.

    What cannot be run, crashes or takes too long is a result, not an error.

    Args:
        reference: a path, ModelProto or onnx_ir.Model.
        candidate: the model to check, with the same inputs and outputs.
        inputs: arrays by the names of the inputs, one set or several; None makes random ones.
        seed: of the first random set; the others count on.
        samples: number of random sets.
        atol: absolute bound instead of the table's (`bnexport/tolerances.py`).
        rtol: bound relative to each value of the reference; what is not given of the two is 0 then.
        timeout: seconds for both models together; None for no limit.

    Raises:
        ModelError: a file is refused.
    """
    first, second = open_source(reference).model, open_source(candidate).model
    terms = Terms(inputs, seed, samples, atol, rtol, timeout)
    return models.compare_or_convert(first, second, terms, convert_model)
