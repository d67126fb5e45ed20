"""Function verify: compare two models, with MMCVSyncBatchNorm converted if no library implements it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import onnx_ir as ir

from bnexport.errors import BnexportError, UsageError, first_line
from bnexport.graph.nodes import is_standard, label
from bnexport.model_io import walk
from bnexport.model_io.read import Source, open_source
from bnexport.model_io.validate import printable
from bnexport.runtime.sessions import check_providers
from bnexport.verification import models
from bnexport.verification.certificate import KEY, changes, decode
from bnexport.verification.proof.search import prove
from bnexport.verification.verdict import Claim, Inputs, Method, Terms, Verification

# Files of other exporters: inputs and outputs that have other names, and are the same by their positions.


def match_by_position(reference: ir.Model, candidate: ir.Model) -> tuple[ir.Model, str]:
    """Return the candidate with the reference's names of inputs and outputs, and which were matched, in words.

    The candidate itself, and an empty text, where the names are the same, or where types, shapes or numbers differ.
    """
    pairs = _pairs(reference, candidate)
    if not pairs:
        return candidate, ""
    changed = candidate.clone()
    for one, two in _given(reference, changed):
        two.name = one.name
    return changed, f"matched by position: {', '.join(f'{theirs} as {mine}' for mine, theirs in pairs)}"


def _given(reference: ir.Model, candidate: ir.Model) -> list[tuple[ir.Value, ir.Value]]:
    """Return the inputs that a caller has to give, and the outputs, in pairs."""
    inputs = ([value for value in model.graph.inputs if not value.is_initializer()] for model in (reference, candidate))
    return [*zip(*inputs, strict=False), *zip(reference.graph.outputs, candidate.graph.outputs, strict=False)]


def _pairs(reference: ir.Model, candidate: ir.Model) -> list[tuple[str, str]]:
    """Return the names that differ; none where the values of other names are no match."""
    found = _given(reference, candidate)
    counts = (
        [sum(not value.is_initializer() for value in model.graph.inputs), len(model.graph.outputs)]
        for model in (reference, candidate)
    )
    if len({tuple(each) for each in counts}) != 1 or not all(_fits(one, two) for one, two in found):
        return []
    differing = [(str(one.name), str(two.name)) for one, two in found if one.name != two.name]
    mine, theirs = {str(one.name) for one, _ in found}, {str(two.name) for _, two in found}
    # A name that both have at other places means another order.
    taken = theirs | _inner_names(candidate)
    if any(one in taken or two in mine for one, two in differing) or len(dict(differing)) != len(
        {two for _, two in differing}
    ):
        return []
    return [(printable(one), printable(two)) for one, two in dict(differing).items()]


def _fits(one: ir.Value, two: ir.Value) -> bool:
    if one.dtype != two.dtype or type(one.type) is not type(two.type):
        return False
    if one.shape is None or two.shape is None:
        return True
    sizes = zip(one.shape, two.shape, strict=False)
    return len(one.shape) == len(two.shape) and all(
        first == second or not (isinstance(first, int) and isinstance(second, int)) for first, second in sizes
    )


def _inner_names(model: ir.Model) -> set[str]:
    values = (
        itertools.chain(
            graph.inputs, graph.initializers.values(), (output for node in graph for output in node.outputs)
        )
        for graph in walk.graphs(model)
    )
    return {str(value.name) for each in values for value in each}


# Prove the folds that a fold, a certificate or a search tells of.


def prove_fold(unfolded: ir.Model, folded: ir.Model, claims: Sequence[Claim]) -> Verification:
    """Prove each claim where it stands. unfolded: the source, converted and with its calls inlined."""
    casts = _casts(unfolded)
    around = ([cast for node in claim.nodes for cast in casts.get(node, ())] for claim in claims)
    wider = [
        dataclasses.replace(claim, nodes=(*claim.nodes, *more)) for claim, more in zip(claims, around, strict=True)
    ]
    return prove(unfolded, folded, wider)


def prove_between(pair: models.Pair) -> Verification:
    """Prove the folds between two models, where the candidate's certificate says that they are.

    Unless it proves every fold, the folds are searched for as well, and the verdict is the search's: regions that are
    only compared, at points, may have been chosen to hide something. The marks are those that leave less unproved.
    """
    claimed = prove_certified(pair)
    if claimed is None:
        return prove_unaided(pair)
    if claimed.passed and not _unproved(claimed):
        return dataclasses.replace(claimed, certificate="used")
    found = prove_unaided(pair)
    if not claimed.passed or found.status == "failed":
        return dataclasses.replace(found, certificate=f"not used: {claimed.reason or 'a fold is wrong'}")
    if not found.passed:
        reason = f"not every fold is proved, and without the certificate: {found.reason}"
        return dataclasses.replace(claimed, status="not_verified", reason=reason, certificate="used")
    if _unproved(found) < _unproved(claimed):
        return dataclasses.replace(found, certificate="not used: more is proved without it")
    return dataclasses.replace(claimed, certificate="used")


def _unproved(verdict: Verification) -> int:
    return sum(proof.method != "proved" for proof in verdict.sites)


def prove_certified(pair: models.Pair) -> Verification | None:
    """Prove the folds of the candidate's certificate; None where it has none."""
    text = pair.candidate.metadata_props.get(KEY)
    if text is None:
        return None
    try:
        certificate = decode(text)
        if certificate.inlined:
            pair = dataclasses.replace(pair, inlined=True)
        sites = changes(certificate, pair.unfolded, pair.candidate)
        if not sites:
            return Verification.skipped("every node that it names is still there")
        verdict = prove_fold(pair.unfolded, pair.candidate, [site.claim for site in sites])
    except (BnexportError, MemoryError) as error:
        return Verification.skipped(first_line(error))
    return dataclasses.replace(verdict, reference="converted") if pair.converts else verdict


def prove_unaided(pair: models.Pair) -> Verification:
    """Find the folds between two models and prove them."""
    verdict = prove(pair.unfolded, pair.candidate)
    return dataclasses.replace(verdict, reference="converted") if pair.converts else verdict


def _casts(model: ir.Model) -> dict[str, list[str]]:
    """Find the Casts around each batch norm, by its name: they are removed with it."""
    found: dict[str, list[str]] = {}
    for node in walk.nodes(model):
        if is_standard(node, "BatchNormalization") and node.inputs and node.inputs[0] is not None:
            around = [node.inputs[0].producer(), *(use.node for use in node.outputs[0].uses())]
            names = [label(each) for each in around if each is not None and each.op_type == "Cast"]
            if names:
                found.setdefault(label(node), []).extend(names)
    return found


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
    method: Method = "both",
    providers: Sequence[str] = (),
    fixed_initializers: bool = False,
) -> Verification:
    """Run both models on the same inputs and compare every output; prove the folds that tell them apart.

    What cannot be run, crashes or takes too long is a result, not an error.

    Args:
        reference: a path, ModelProto or onnx_ir.Model.
        candidate: the model to check, with the same inputs and outputs; those of other names are matched by position where
            their types and shapes agree, and the verdict's `reason` says so.
        inputs: arrays by the names of the inputs, one set or several; None makes random ones, of several scales and
            sizes of dynamic dimensions.
        seed: of the first random set; the others count on.
        samples: number of random sets at the first sizes; one of them has another scale.
        atol: absolute bound instead of the table's (`bnexport/tolerances.py`).
        rtol: bound relative to each value of the reference; what is not given of the two is 0 then.
        timeout: seconds for both models together; None for no limit.
        method: "local" finds where the candidate folds batch norms of the reference, whatever tool did it, and proves or
            refutes each fold in float64; nothing is run. The certificate that `fold` wrote into the candidate says where
            to look; it is not trusted. "whole" runs both models. "both" does both, or "whole" where
            atol or rtol is given.
        providers: execution providers of ONNX Runtime that run the candidate; the reference runs on the CPU.
        fixed_initializers: no caller overrides initializers that are inputs as well; either model may lack those inputs.

    Raises:
        ModelError: a file is refused.
        UsageError: a provider is none of this ONNX Runtime's.
    """
    if method not in ("local", "whole", "both"):
        raise UsageError(f'method: got {method!r}, expected "local", "whole" or "both"')
    for name, bound in (("atol", atol), ("rtol", rtol)):
        if bound is not None and not 0 <= bound < math.inf:
            raise UsageError(f"{name}: got {bound}, expected a number that is not negative and not infinite")
    first, second = (open_source(each, fixed_initializers=fixed_initializers).model for each in (reference, candidate))
    second, matched = match_by_position(first, second)
    terms = Terms(inputs, seed, samples, atol, rtol, timeout, providers=tuple(check_providers(providers)))
    verdict = _verdict(first, second, terms, method)
    return dataclasses.replace(verdict, reason=matched) if matched and verdict.passed else verdict


def _verdict(first: ir.Model, second: ir.Model, terms: Terms, method: Method) -> Verification:
    # Bounds of the caller's are for models that differ by more than a fold.
    whole = method == "whole" or (method == "both" and (terms.atol is not None or terms.rtol is not None))
    pair = models.Pair(first, second)
    proof = None if whole else prove_between(pair)
    if proof is not None and method == "local":
        return proof
    result = models.compare_pair(pair, terms)
    # Where nothing was folded the proof is about nothing.
    if proof is None or not (proof.sites or proof.another):
        return dataclasses.replace(result, certificate="" if proof is None else proof.certificate)
    return proof.joined(result)
