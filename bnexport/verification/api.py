"""Function verify: compare two models, with MMCVSyncBatchNorm converted if no library implements it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from bnexport import interface, schema
from bnexport.errors import BnexportError, ModelError, UsageError, first_line
from bnexport.graph.conversion import convert, insert_casts
from bnexport.graph.functions import inline_calls
from bnexport.graph.nodes import has_sync_batch_norm, is_standard, is_sync_batch_norm, label, trains
from bnexport.graph.shapes import Shapes
from bnexport.graph.standard_ops import has_foreign, standardise
from bnexport.model_io import Parts, to_parts, walk
from bnexport.model_io.read import Source, open_source
from bnexport.model_io.validate import printable
from bnexport.native import library
from bnexport.runtime.sessions import check_providers
from bnexport.verification.certificate import KEY, changes, decode
from bnexport.verification.comparison import FLOATS
from bnexport.verification.input_demands import (
    find_bounds,
    find_further,
    find_operand_sizes,
    find_ranges,
    find_texts,
)
from bnexport.verification.inputs import InputSpec
from bnexport.verification.probing import Meeting, Parted, Probe, find_meetings, find_parted, find_probes
from bnexport.verification.process import PROCESS, ProcessFailure, Shipment
from bnexport.verification.proof.search import prove
from bnexport.verification.verdict import (
    Claim,
    Inputs,
    Method,
    OutputComparison,
    Terms,
    Verification,
    WindowEnd,
)

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


def prove_fold(
    unfolded: ir.Model, folded: ir.Model, claims: Sequence[Claim], seconds: float | None = None
) -> Verification:
    """Prove each claim where it stands. unfolded: the source, converted and with its calls inlined. seconds: as in `prove`."""
    casts = _casts(unfolded)
    around = ([cast for node in claim.nodes for cast in casts.get(node, ())] for claim in claims)
    wider = [
        dataclasses.replace(claim, nodes=(*claim.nodes, *more)) for claim, more in zip(claims, around, strict=True)
    ]
    return prove(unfolded, folded, wider, seconds)


def prove_between(pair: Pair) -> Verification:
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


def prove_certified(pair: Pair) -> Verification | None:
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
        verdict = prove_fold(pair.unfolded, pair.candidate, [site.claim for site in sites], pair.proof_seconds)
    except (BnexportError, MemoryError) as error:
        return Verification.skipped(first_line(error))
    return dataclasses.replace(verdict, reference="converted") if pair.converts else verdict


def prove_unaided(pair: Pair) -> Verification:
    """Find the folds between two models and prove them."""
    verdict = prove(pair.unfolded, pair.candidate, seconds=pair.proof_seconds)
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
    proof_seconds: float | None = None,
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
        proof_seconds: of processor time for the proof, behind which what is left is "compared only"; None for two, and one
            more for each 500 nodes and for each 100 MB of weights in other files.
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
    given = tuple(check_providers(providers))
    terms = Terms(inputs, seed, samples, atol, rtol, timeout, providers=given, proof_seconds=proof_seconds)
    verdict = _verdict(first, second, terms, method)
    return dataclasses.replace(verdict, reason=matched) if matched and verdict.passed else verdict


def _verdict(first: ir.Model, second: ir.Model, terms: Terms, method: Method) -> Verification:
    # Bounds of the caller's are for models that differ by more than a fold.
    whole = method == "whole" or (method == "both" and (terms.atol is not None or terms.rtol is not None))
    pair = Pair(first, second, proof_seconds=terms.proof_seconds)
    proof = None if whole else prove_between(pair)
    if proof is not None and method == "local":
        return proof
    result = compare_pair(pair, terms, proof.ends if proof is not None else ())
    # Where nothing was folded the proof is about nothing.
    if proof is None or not (proof.sites or proof.another):
        return dataclasses.replace(result, certificate="" if proof is None else proof.certificate)
    return proof.joined(result)


# Two models, the same inputs, the outputs side by side.
#
# Both run in a process of their own (`process`), so that a model which crashes its engine, or fills
# the memory, costs a verification and nothing else. The bounds are those of `comparison`. A value that is
# finite in the reference must be finite in the candidate. Outputs of other types must be equal. Where no
# engine runs the models, or where the reference's outputs decide nothing, on smaller inputs neither
# (`smaller_inputs`), the result says so; it never says "passed".
#
# Training graphs. When the reference still has MMCVSyncBatchNorm nodes in training and the candidate has
# none, the two do not mean the same. The reference is then converted first (running statistics, nothing
# folded), and the result says so.


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two models that one verdict is about; both are only read.

    inlined: a fold inlined calls of functions that stay. proof_seconds: as in `Terms`.
    """

    reference: ir.Model
    candidate: ir.Model
    inlined: bool = False
    proof_seconds: float | None = None

    @functools.cached_property
    def converts(self) -> bool:
        """Whether the reference has sync batch norms and the candidate none, as after a fold."""
        return has_sync_batch_norm(self.reference) and not has_sync_batch_norm(self.candidate)

    @functools.cached_property
    def standardises(self) -> bool:
        """Whether the reference has operators of MMCV or MMDeploy and the candidate none."""
        return _is_standardised(self.reference, self.candidate)

    @functools.cached_property
    def unfolded(self) -> ir.Model:
        """What a fold of the reference starts from: operators of MMCV as standard ones, sync batch norms converted, functions
        that the candidate lacks inlined.
        """
        functions = self.reference.functions.keys()
        inlines = not functions <= self.candidate.functions.keys() or (self.inlined and bool(functions))
        if not (self.converts or inlines or self.standardises):
            return self.reference
        model = self.reference.clone()
        if self.standardises:
            standardise(model)
        if inlines:
            inline_calls(model)
        if self.converts and convert(model):
            insert_casts(model)
        return model


def compare_pair(pair: Pair, terms: Terms, ends: Sequence[WindowEnd] = ()) -> Verification:
    """`compare`, with the converted reference where the original trains, or where nothing runs its nodes."""
    if not (pair.converts and trains(pair.reference)):
        result = compare(pair.reference, pair.candidate, terms, ends)
        if result.status != "not_verified" or not (pair.converts or pair.standardises):
            return result
    converted = compare(pair.unfolded, pair.candidate, terms, ends)
    if converted.status == "not_verified" and not trains(pair.reference):
        return result
    return dataclasses.replace(converted, reference="converted")


def _is_standardised(reference: ir.Model, candidate: ir.Model) -> bool:
    imports = (reference.graph.opset_imports, *(each.opset_imports for each in reference.functions.values()))
    # Hardly any model imports them, and no other has such a node.
    if not any(domain in each for each in imports for domain in schema.MMCV_DOMAINS):
        return False
    return has_foreign(reference) and not has_foreign(candidate)


def compare(reference: ir.Model, candidate: ir.Model, terms: Terms, ends: Sequence[WindowEnd] = ()) -> Verification:
    """Compare models that are open already. ends: of what a proof left open: values that are compared, too."""
    difference = _interface(reference, candidate)
    if difference:
        return Verification("failed", difference, seed=terms.seed)
    theirs, own = _coarsest(reference), _coarsest(candidate)
    answer = _ask(reference, candidate, terms, FLOATS[max(theirs, own)], ends)
    fixed = _fixed_inputs(reference, candidate)
    if fixed and answer["status"] == "passed":
        text = f"the candidate has no input {fixed[0]!r}, which a caller of the reference may give: compared at its default alone"
        text += " (fixed_initializers=True, --fixed-initializers where nobody does)"
        answer |= {"status": "not_verified", "reason": text}
    outputs = tuple(OutputComparison(**output) for output in answer.pop("outputs", ()))
    narrower = FLOATS[own] if own < theirs else ""
    if narrower and answer["status"] == "passed" and any(output.bound == "float64" for output in outputs):
        text = (
            f"the candidate computes in {narrower}, and the reference's own rounding errors may hide what that changes"
        )
        answer |= {"status": "not_verified", "reason": text}
    sizes = tuple(tuple(map(tuple, feed)) for feed in answer.pop("sizes", ()))
    return Verification(outputs=outputs, sizes=sizes, seed=terms.seed, **answer)


def _ask(
    reference: ir.Model, candidate: ir.Model, terms: Terms, working: str, ends: Sequence[WindowEnd]
) -> dict[str, Any]:
    """Return the fields of the verdict, from the process that runs the models. working: the type that both compute in."""
    probes, parted = find_probes(reference, candidate), find_parted(reference)
    meetings = find_meetings(reference, candidate, ends)
    of_reference = [value for probe in probes for value in probe.of_reference]
    of_reference += [meeting.reference for meeting in meetings]
    of_reference += [value for each in parted for value in each.values]
    of_candidate = [value for probe in probes for value in probe.of_candidate]
    of_candidate += [meeting.candidate for meeting in meetings]
    given = [terms.inputs] if isinstance(terms.inputs, Mapping) else terms.inputs
    try:
        with Shipment() as shipment:
            request = {
                "reference": _shipped(reference, of_reference, shipment),
                "candidate": _shipped(candidate, of_candidate, shipment),
                "outputs": [str(value.name) for value in reference.graph.outputs],
                "probes": list(map(_plain, probes)),
                "parted": list(map(_plain, parted)),
                "meetings": list(map(_plain, meetings)),
                "inputs": [dataclasses.asdict(_spec(value, reference)) for value in _inputs(reference)],
                "further": [dataclasses.asdict(each) for each in find_further(reference)],
                "bounds": find_bounds(reference, candidate),
                "operands": find_operand_sizes(reference),
                "empty": _is_empty(reference),
                "given": None
                if given is None
                else [[shipment.array(name, value) for name, value in sample.items()] for sample in given],
                # A type that only one of them has is no excuse for the other: a rounding that is gone, or new, is a difference.
                "working": working,
                **{"seed": terms.seed, "count": terms.samples, "atol": terms.atol, "rtol": terms.rtol},
                "patience": terms.patience,
                "standardised": _is_standardised(reference, candidate),
                "providers": list(terms.providers),
            }
            interface.report("verifying in ONNX Runtime")
            return PROCESS.ask(request, shipment.ready(), terms.timeout)
    except ProcessFailure as failure:
        return _failure(failure)
    except ModelError as error:
        # It cannot be written for an engine: no one can run it.
        return {"status": "not_verified", "reason": str(error)}


def _failure(failure: ProcessFailure) -> dict[str, Any]:
    """Read the verdict from the end of the verifying process: a candidate that crashes an engine differs."""
    where = f" while it ran the {failure.stage} in {failure.engine}" if failure.stage else ""
    status = "failed" if failure.crashed and failure.stage == "candidate" else "not_verified"
    return {"status": status, "reason": f"the verifying process: {failure}{where}", "engine": failure.engine}


def _shipped(model: ir.Model, probes: Sequence[ir.Value], shipment: Shipment) -> dict[str, Any]:
    path = no_library = None
    if _needs_library(model):
        try:
            path = library.get_library_path()
        except BnexportError as error:
            no_library = str(error)
    with _also_outputs(model, probes):
        parts: Parts = to_parts(model)
    return shipment.model(parts, path, no_library, schema.TRAINING_DOMAIN in model.opset_imports)


def _plain(found: Probe | Parted | Meeting) -> dict[str, Any]:
    """Return the fields, values by their names."""
    return {field.name: _named(getattr(found, field.name)) for field in dataclasses.fields(found)}


def _named(field: Any) -> Any:
    if isinstance(field, tuple):
        return list(map(_named, field))
    return str(field.name) if isinstance(field, ir.Value) else field


@contextlib.contextmanager
def _also_outputs(model: ir.Model, values: Sequence[ir.Value]) -> Iterator[None]:
    """More graph outputs, for the time of one serialisation."""
    added = [value for value in dict.fromkeys(values) if not value.is_graph_output()]
    model.graph.outputs.extend(added)
    try:
        yield
    finally:
        for value in added:
            model.graph.outputs.remove(value)


def _needs_library(model: ir.Model) -> bool:
    """Whether a node of ours has no portable body."""
    if schema.TRAINING_DOMAIN in model.opset_imports:
        return True
    return any(is_sync_batch_norm(node) and node.op_identifier() not in model.functions for node in walk.nodes(model))


def _inputs(model: ir.Model) -> list[ir.Value]:
    """Inputs that a caller has to give: those without an initializer."""
    return [value for value in model.graph.inputs if not value.is_initializer()]


def _fixed_inputs(reference: ir.Model, candidate: ir.Model) -> list[str]:
    """Return inputs with a default in the reference that the candidate lacks; before IR version 4 these are constants."""
    if reference.ir_version < 4:
        return []
    known = {value.name for value in candidate.graph.inputs}
    return [str(value.name) for value in reference.graph.inputs if value.name not in known]


def _is_empty(model: ir.Model) -> bool:
    """Whether an input or output has no elements by its declared or inferred shape: shapes are all that there is."""
    shapes = Shapes(model)
    return any(0 in (shapes.of(value) or ()) for value in (*model.graph.inputs, *model.graph.outputs))


def _spec(value: ir.Value, model: ir.Model) -> InputSpec:
    name = str(value.name)
    if not isinstance(value.type, ir.TensorType) or value.shape is None:
        return InputSpec(name)
    dtype = value.type.dtype
    kinds = (
        ("string", dtype is ir.DataType.STRING),
        ("bool", dtype is ir.DataType.BOOL),
        ("float", dtype.is_floating_point()),
        ("integer", dtype.is_integer()),
    )
    kind = next((kind for kind, holds in kinds if holds), None)
    shape = tuple(
        (size if size >= 0 else None) if isinstance(size, int) else (size.value or None) for size in value.shape
    )
    texts = find_texts(model) if kind == "string" else ()
    return InputSpec(name, kind, dtype.numpy().name, shape, *find_ranges(value, model), texts)


def _coarsest(model: ir.Model) -> int:
    """Return the place among FLOATS of the coarsest type of any input, output, parameter that is read, or Cast.

    Nothing is computed in the type of an initializer that only a Cast reads.
    """
    found = len(FLOATS) - 1
    for graph in walk.graphs(model):
        used = (
            value
            for value in graph.initializers.values()
            if value.is_graph_output() or not all(is_standard(use.node, "Cast") for use in value.uses())
        )
        made = (output for node in graph for output in node.outputs)
        types = {value.dtype for value in (*graph.inputs, *used, *made)}
        types |= {_target(node) for node in graph if node.op_type == "Cast"}
        names = {dtype.numpy().name for dtype in types if dtype is not None and dtype.is_floating_point()}
        found = min([found, *(FLOATS.index(name) for name in names if name in FLOATS)])
    return found


def _target(cast: ir.Node) -> ir.DataType | None:
    to = cast.attributes.get("to")
    return None if to is None or to.is_ref() else ir.DataType(to.as_int())


def _interface(reference: ir.Model, candidate: ir.Model) -> str | None:
    for what, first, second in (
        ("inputs", _inputs(reference), _inputs(candidate)),
        ("outputs", reference.graph.outputs, candidate.graph.outputs),
    ):
        names, others = [value.name for value in first], [value.name for value in second]
        if names != others:
            return f"the {what} differ: {names[:8]} and {others[:8]}"
    return None
