"""bnexport.verify: a file or a torch module against a file, checked by running both and by proof."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import onnx
import onnx_ir as ir

from bnexport.errors import UsageError
from bnexport.model_io.read import Source, open_source
from bnexport.runtime.sessions import check_providers
from bnexport.verification.api import verify_models
from bnexport.verification.verdict import Inputs, Method, Terms, Verification

if TYPE_CHECKING:
    import torch
    from torch import nn


def verify(
    reference: Source | nn.Module | torch.export.ExportedProgram,
    candidate: Source,
    *,
    inputs: Inputs | torch.Tensor | Sequence[Any] | None = None,
    seed: int = 0,
    samples: int = 2,
    atol: float | None = None,
    rtol: float | None = None,
    timeout: float | None = None,
    proof_seconds: float | None = None,
    method: Method = "both",
    providers: Sequence[str] = (),
    fixed_initializers: bool = False,
    names: Mapping[str, str] | None = None,
    save_inputs: str | os.PathLike[str] | None = None,
) -> Verification:
    """Run both models on the same inputs and compare every output; prove the folds that tell them apart.

    What cannot be run, crashes or takes too long is a result, not an error. Where the candidate fails, `place` names the
    first module, or node, behind which it differs, and `witness` has the inputs that show it.

    Args:
        reference: a path, ModelProto or onnx_ir.Model; or a torch module, compared in eval mode, or a
            torch.export.ExportedProgram or the name of a .pt2 file with one.
        candidate: the model to check, with the same inputs and outputs; those of other names are matched by position where
            their types and shapes agree, and the verdict's `reason` says so. For a module also a .pt or .pt2 file. A module is
            compared in float16 where the candidate computes in float16.
        inputs: arrays by the names of the inputs, one set or several; None makes random ones, of several scales and
            sizes of dynamic dimensions. For a module also a tensor, or a tuple of what forward takes: random ones are
            compared as well, at other sizes of the dimensions that the candidate declares dynamic.
        seed: of the first random set; the others count on.
        samples: number of random sets at the first sizes; one of them has another scale.
        atol: absolute bound instead of the table's (`bnexport/tolerances.py`).
        rtol: bound relative to each value of the reference; what is not given of the two is 0 then.
        timeout: seconds for both models together; None for no limit.
        proof_seconds: of processor time for the proof, behind which what is left is "compared only"; None for two, and one
            more for each 500 nodes and for each 100 MB of weights in other files.
        method: "local" finds where the candidate folds batch norms of the reference, whatever tool did it, and proves or
            refutes each fold in float64; nothing is run. The certificate that `fold` wrote into the candidate says where
            to look; it is not trusted. "whole" runs both models. "both" does both, or "whole" where
            atol or rtol is given.
        providers: execution providers of ONNX Runtime that run the candidate; the reference runs on the CPU.
        fixed_initializers: no caller overrides initializers that are inputs as well; either model may lack those inputs.
        names: the candidate's names of inputs and outputs by the reference's, where positions do not tell; outputs that only
            one of them has are left out then, and the verdict's `reason` says which.
        save_inputs: a folder for the inputs that show the verdict and the outputs of both models (.npz), and a table of the
            reference's modules (layers.csv). Nothing is written where nothing ran.

    Raises:
        ModelError: a file is refused.
        UsageError: a provider is none of this ONNX Runtime's, a name is none of a model's, or an argument is wrong.
    """
    if method not in ("local", "whole", "both"):
        raise UsageError(f'method: got {method!r}, expected "local", "whole" or "both"')
    for name, bound in (("atol", atol), ("rtol", rtol)):
        if bound is not None and not 0 <= bound < math.inf:
            raise UsageError(f"{name}: got {bound}, expected a number that is not negative and not infinite")
    given, folder = tuple(check_providers(providers)), os.fspath(save_inputs or "")
    terms = Terms(
        None, seed, samples, atol, rtol, timeout, providers=given, proof_seconds=proof_seconds, save_inputs=folder
    )
    if not _is_onnx(reference):
        from bnexport.exporting.module_comparison import compare

        return compare(reference, candidate, inputs, terms, method, names)
    first, second = (open_source(each, fixed_initializers=fixed_initializers).model for each in (reference, candidate))
    terms = dataclasses.replace(terms, inputs=cast("Inputs | None", inputs))
    return verify_models(first, second, terms, method, names)


def _is_onnx(reference: Any) -> TypeGuard[Source]:
    if isinstance(reference, (str, os.PathLike)):
        return not os.fspath(reference).endswith(".pt2")
    return isinstance(reference, (onnx.ModelProto, ir.Model))
