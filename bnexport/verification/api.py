"""Function verify: compare two models, with MMCVSyncBatchNorm converted if no library implements it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport import interface, schema
from bnexport.errors import BnexportError, ModelError, UsageError, first_line
from bnexport.graph.conversion import convert, insert_casts
from bnexport.graph.functions import inline_calls
from bnexport.graph.nodes import Names, has_sync_batch_norm, is_standard, label, trains
from bnexport.graph.shapes import Shapes, described, fits, shown, sizes_of
from bnexport.graph.standard_ops import has_foreign, standardise
from bnexport.model_io import walk
from bnexport.model_io.validate import printable
from bnexport.verification import witness
from bnexport.verification.certificate import KEY, changes, decode
from bnexport.verification.comparison import FLOATS
from bnexport.verification.file_engine import shipped
from bnexport.verification.first_difference import find_place
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
from bnexport.verification.proof.sides import cast_target
from bnexport.verification.verdict import (
    Claim,
    Method,
    OutputComparison,
    Terms,
    Verification,
    WindowEnd,
)

# Files of other exporters: inputs and outputs that have other names, and are the same by their positions.


def match(
    reference: ir.Model, candidate: ir.Model, names: Mapping[str, str] | None = None
) -> tuple[ir.Model, ir.Model, str]:
    """Return both models with the same names of inputs and outputs, and what was matched, in words.

    names: the candidate's names of inputs and outputs by the reference's; with any, what has one name is one value in any
    order, and outputs that only one model has are left out. The rest is matched by position, where types, shapes and numbers
    agree. Raises UsageError for a name that is none.
    """
    said = ""
    if names is not None:
        reference, candidate, said = _by_name(reference, candidate, names)
    pairs = _pairs(reference, candidate)
    if pairs:
        candidate = candidate.clone()
        for one, two in _given(reference, candidate):
            two.name = one.name
        said += f"matched by position: {', '.join(f'{theirs} as {mine}' for mine, theirs in pairs)}"
    return reference, candidate, said


def _by_name(reference: ir.Model, candidate: ir.Model, names: Mapping[str, str]) -> tuple[ir.Model, ir.Model, str]:
    models = reference.clone(), candidate.clone()
    for model, wanted in ((models[0], list(names)), (models[1], list(names.values()))):
        known = [str(value.name) for value in (*given_inputs(model), *model.graph.outputs)]
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise UsageError(f"names: got {unknown[0]!r}, expected among {', '.join(known)}")
    by_theirs = {theirs: mine for mine, theirs in names.items()}
    fresh, found = Names(models[1]), {str(value.name): value for value in _values(models[1])}
    for mine in names.keys() & found.keys() - by_theirs.keys():
        found[mine].name = fresh.fresh(mine)
    for theirs, mine in by_theirs.items():
        found[theirs].name = mine
    own, other = ([str(value.name) for value in model.graph.outputs] for model in models)
    # What nobody names is matched by position.
    kept = [name for name in own if name in other] if set(own) == set(other) or set(own) & names.keys() else own
    for model in models if kept is not own else ():
        values = {str(value.name): value for value in model.graph.outputs}
        model.graph.outputs[:] = [values[name] for name in kept]
    given = {str(value.name): value for value in models[1].graph.inputs}
    if set(given) == {str(value.name) for value in models[0].graph.inputs}:
        models[1].graph.inputs[:] = [given[str(value.name)] for value in models[0].graph.inputs]
    left = [name for name in own + other if kept is not own and name not in kept]
    return *models, f"not compared: {', '.join(left)}; " * bool(left)


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
    return {str(value.name) for value in _values(model)}


def _values(model: ir.Model) -> dict[ir.Value, None]:
    values = (
        itertools.chain(
            graph.inputs, graph.initializers.values(), (output for node in graph for output in node.outputs)
        )
        for graph in walk.graphs(model)
    )
    return dict.fromkeys(itertools.chain.from_iterable(values))


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


def verify_models(
    reference: ir.Model, candidate: ir.Model, terms: Terms, method: Method, names: Mapping[str, str] | None = None
) -> Verification:
    """Return the verdict on two models, and where a difference starts. names: as in `match`. Raises UsageError."""
    first, second, matched = match(reference, candidate, names)
    verdict = _verdict(first, second, terms, method)
    if verdict.status == "failed" and verdict.witness:
        verdict = dataclasses.replace(verdict, place=find_place(first, second, verdict, terms))
    if terms.save_inputs and verdict.witness:
        witness.save(Path(terms.save_inputs), first, second, verdict.witness, terms)
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
    shown = dict(zip(answer.pop("witness", ()), answer.pop("arrays", ()), strict=True))
    return Verification(outputs=outputs, sizes=sizes, witness=shown, seed=terms.seed, **answer)


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
    for sample in given or ():
        _require_fitting(sample, reference)
    try:
        with Shipment() as shipment:
            request = {
                "reference": shipped(reference, of_reference, shipment),
                "candidate": shipped(candidate, of_candidate, shipment),
                "outputs": [str(value.name) for value in reference.graph.outputs],
                "probes": list(map(_plain, probes)),
                "parted": list(map(_plain, parted)),
                "meetings": list(map(_plain, meetings)),
                "inputs": [dataclasses.asdict(spec_of(value, reference)) for value in given_inputs(reference)],
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
                "beside": terms.beside,
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


def _require_fitting(sample: Mapping[str, Any], model: ir.Model) -> None:
    """Raise UsageError for inputs that the model does not take as it is declared: an engine that runs them all the same is no judge."""
    known = [str(value.name) for value in model.graph.inputs]
    if unknown := [name for name in sample if name not in known]:
        raise UsageError(f"inputs: got {unknown[0]!r}, expected among {', '.join(known)}")
    for value in given_inputs(model):
        if value.name not in sample:
            raise UsageError(f"inputs: {value.name!r} is missing")
        array, dtype = np.asarray(sample[str(value.name)]), value.dtype
        is_of_type = not dtype or dtype is ir.DataType.STRING or array.dtype == dtype.numpy()
        if isinstance(value.type, ir.TensorType) and not (is_of_type and fits(array.shape, value)):
            got = "string" if array.dtype.kind in "USO" else array.dtype.name
            raise UsageError(f"inputs: got {got} {shown(array.shape)}, expected {described(value)}")


def _failure(failure: ProcessFailure) -> dict[str, Any]:
    """Read the verdict from the end of the verifying process: a candidate that crashes an engine differs."""
    where = f" while it ran the {failure.stage} in {failure.engine}" if failure.stage else ""
    status = "failed" if failure.crashed and failure.stage == "candidate" else "not_verified"
    return {"status": status, "reason": f"the verifying process: {failure}{where}", "engine": failure.engine}


def _plain(found: Probe | Parted | Meeting) -> dict[str, Any]:
    """Return the fields, values by their names."""
    return {field.name: _named(getattr(found, field.name)) for field in dataclasses.fields(found)}


def _named(field: Any) -> Any:
    if isinstance(field, tuple):
        return list(map(_named, field))
    return str(field.name) if isinstance(field, ir.Value) else field


def given_inputs(model: ir.Model) -> list[ir.Value]:
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


def spec_of(value: ir.Value, model: ir.Model) -> InputSpec:
    """Return what random values of an input have to be like."""
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
    texts = find_texts(model) if kind == "string" else ()
    return InputSpec(name, kind, dtype.numpy().name, sizes_of(value.shape), *find_ranges(value, model), texts)


def computing_type(model: ir.Model) -> str:
    """Return the coarsest float type that a model computes in."""
    return FLOATS[_coarsest(model)]


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
        types |= {cast_target(node) for node in graph if node.op_type == "Cast"}
        names = {dtype.numpy().name for dtype in types if dtype is not None and dtype.is_floating_point()}
        found = min([found, *(FLOATS.index(name) for name in names if name in FLOATS)])
    return found


def _interface(reference: ir.Model, candidate: ir.Model) -> str | None:
    kinds = [
        ("inputs", given_inputs(reference), given_inputs(candidate)),
        ("outputs", list(reference.graph.outputs), list(candidate.graph.outputs)),
    ]
    # Another number of them is why positions do not tell, either.
    for what, first, second in sorted(kinds, key=lambda kind: len(kind[1]) == len(kind[2])):
        if [value.name for value in first] != [value.name for value in second]:
            way_out = "names={mine: theirs}, --map mine=theirs, says which are the same"
            return f"the {what} differ: {_described(first)} and {_described(second)}; {way_out}"
    return None


def _described(values: Sequence[ir.Value]) -> str:
    """Return names, types and shapes, of eight values at most."""
    known = (f"{value.name}: {value.dtype or '?'}{'' if value.shape is None else value.shape}" for value in values[:8])
    return f"({printable(', '.join(known))})"
