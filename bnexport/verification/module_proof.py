"""Verify folds of a torch module: both modules run on the caller's inputs, and each fold is proved where it stands.

The proof reads the graph of each module (`modules.module_graph`), as that of a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bnexport import tolerances
from bnexport.errors import first_line
from bnexport.modules.module_graph import ModuleGraph
from bnexport.modules.module_trace import Trace
from bnexport.modules.tensors import to_array
from bnexport.sync_bn.convert import replace, to_plain
from bnexport.verification.inputs import FeedGroup
from bnexport.verification.judge import Rules, judge
from bnexport.verification.proof.search import ENGINE, prove
from bnexport.verification.reference import Reference
from bnexport.verification.verdict import Claim, Verification

# A folded module against the original, both in torch, on the caller's inputs.


def compare(original: nn.Module, folded: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Verification:
    """Runs both, as they are, and compares every output tensor.

    The bound is that of `bnexport.tolerances.model`, in the coarsest float type of any parameter or input. An original
    that cannot run here is replaced by its copy with torch's batch norms, unfolded.
    """
    reference, candidate = (Reference(module, evaluate=False) for module in (original, folded))
    for engine in (reference, candidate):
        engine.run_first(inputs)
    if reference.cause:  # some packages' batch norms run on GPUs only
        reference.complete(replace(original, to_plain))
    if candidate.cause:  # where it misses its batch norms
        return Verification("failed", f"the folded module fails: {candidate.cause}")
    expected = [to_array(value) for value in reference(inputs)]
    if reference.is_random(inputs):
        return Verification.skipped("the model draws random numbers")
    names = ["output"] if len(expected) == 1 else [f"output {index}" for index in range(len(expected))]
    feeds = FeedGroup([{str(index): value for index, value in enumerate(inputs)}], [expected])
    verdict = judge(reference, candidate, [feeds], Rules(names, _working_type(original, inputs)))
    label = "converted" if reference.cause else "original"
    return dataclasses.replace(verdict, reference=label, engine=f"torch {torch.__version__}")


def _working_type(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> str:
    """Return the coarsest float type of any parameter or input."""
    used: list[Any] = [tensor.dtype for tensor in (*model.parameters(), *inputs) if tensor.is_floating_point()]
    names = {str(dtype).removeprefix("torch.") for dtype in used} & set(tolerances.UNIT_ROUNDOFF)
    return max(names, key=lambda name: tolerances.UNIT_ROUNDOFF[name], default="float32")


def prove_module(
    original: ModuleGraph, folded: Trace, examples: Mapping[str, torch.Tensor], claims: Sequence[Claim]
) -> Verification:
    """Prove each fold, and that everything else is the same. claims: of nodes of the original's graph.

    examples: tensors like the values, by name, as far as they are known; without them what changes a value of any rank may not be provable.
    """
    try:
        return prove(original.model, ModuleGraph(folded, examples).model, claims)
    except Exception as error:  # whatever a module's classes make of their tensors
        reason = f"the module cannot be written as a graph: {type(error).__name__}: {first_line(error)[:200]}"
        return Verification("not_verified", reason, engine=ENGINE, method="local")
