"""Two models, the same inputs, the outputs side by side.

Both run in a process of their own (`process`), so that a model which crashes its engine, or fills
the memory, costs a verification and nothing else. The bounds are those of `comparison`. A value that is
finite in the reference must be finite in the candidate. Outputs of other types must be equal. Where no
engine runs the models, or where the reference's outputs decide nothing, on smaller inputs neither
(`smaller_inputs`), the result says so; it never says "passed".

Training graphs. When the reference still has MMCVSyncBatchNorm nodes in training and the candidate has
none, the two do not mean the same. The reference is then converted first (running statistics, nothing
folded), and the result says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from bnexport import interface, schema
from bnexport.errors import BnexportError, ModelError
from bnexport.graph.conversion import convert
from bnexport.graph.functions import inline_calls
from bnexport.graph.nodes import has_sync_batch_norm, is_standard, is_sync_batch_norm, trains
from bnexport.graph.shapes import Shapes
from bnexport.graph.simplify import insert_casts
from bnexport.model_io import Parts, to_parts, walk
from bnexport.native import library
from bnexport.verification.comparison import FLOATS
from bnexport.verification.inputs import (
    InputSpec,
    find_bounds,
    find_further,
    find_operand_sizes,
    find_ranges,
    find_texts,
)
from bnexport.verification.probing import Parted, Probe, find_parted, find_probes
from bnexport.verification.process import PROCESS, ProcessFailure, Shipment
from bnexport.verification.verdict import OutputComparison, Terms, Verification


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two models that one verdict is about; both are only read. inlined: a fold inlined calls of functions that stay."""

    reference: ir.Model
    candidate: ir.Model
    inlined: bool = False

    @functools.cached_property
    def converts(self) -> bool:
        """Whether the reference has sync batch norms and the candidate none, as after a fold."""
        return has_sync_batch_norm(self.reference) and not has_sync_batch_norm(self.candidate)

    @functools.cached_property
    def unfolded(self) -> ir.Model:
        """What a fold of the reference starts from: sync batch norms converted, functions that the candidate lacks inlined."""
        functions = self.reference.functions.keys()
        inlines = not functions <= self.candidate.functions.keys() or (self.inlined and bool(functions))
        if not (self.converts or inlines):
            return self.reference
        model = self.reference.clone()
        if inlines:
            inline_calls(model)
        if self.converts and convert(model):
            insert_casts(model)
        return model


def compare_pair(pair: Pair, terms: Terms) -> Verification:
    """`compare`, with the converted reference where the original trains, or where nothing runs its nodes."""
    if not (pair.converts and trains(pair.reference)):
        result = compare(pair.reference, pair.candidate, terms)
        if result.status != "not_verified" or not pair.converts:
            return result
    converted = compare(pair.unfolded, pair.candidate, terms)
    if converted.status == "not_verified" and not trains(pair.reference):
        return result
    return dataclasses.replace(converted, reference="converted")


def compare(reference: ir.Model, candidate: ir.Model, terms: Terms) -> Verification:
    """Compare models that are open already."""
    difference = _interface(reference, candidate)
    if difference:
        return Verification("failed", difference, seed=terms.seed)
    answer = _ask(reference, candidate, terms)
    fixed = _fixed_inputs(reference, candidate)
    if fixed and answer["status"] == "passed":
        text = f"the candidate has no input {fixed[0]!r}, which a caller of the reference may give: compared at its default alone"
        text += " (fixed_initializers=True, --fixed-initializers where nobody does)"
        answer |= {"status": "not_verified", "reason": text}
    outputs = tuple(OutputComparison(**output) for output in answer.pop("outputs", ()))
    narrower = FLOATS[_coarsest(candidate)] if _coarsest(candidate) < _coarsest(reference) else ""
    if narrower and answer["status"] == "passed" and any(output.bound == "float64" for output in outputs):
        text = (
            f"the candidate computes in {narrower}, and the reference's own rounding errors may hide what that changes"
        )
        answer |= {"status": "not_verified", "reason": text}
    sizes = tuple(tuple(map(tuple, feed)) for feed in answer.pop("sizes", ()))
    return Verification(outputs=outputs, sizes=sizes, seed=terms.seed, **answer)


def _ask(reference: ir.Model, candidate: ir.Model, terms: Terms) -> dict[str, Any]:
    """Return the fields of the verdict, from the process that runs the models."""
    probes, parted = find_probes(reference, candidate), find_parted(reference)
    of_reference = [value for probe in probes for value in probe.of_reference]
    of_reference += [value for each in parted for value in each.values]
    given = [terms.inputs] if isinstance(terms.inputs, Mapping) else terms.inputs
    try:
        with Shipment() as shipment:
            request = {
                "reference": _shipped(reference, of_reference, shipment),
                "candidate": _shipped(candidate, [value for probe in probes for value in probe.of_candidate], shipment),
                "outputs": [str(value.name) for value in reference.graph.outputs],
                "probes": list(map(_plain, probes)),
                "parted": list(map(_plain, parted)),
                "inputs": [dataclasses.asdict(_spec(value, reference)) for value in _inputs(reference)],
                "further": [dataclasses.asdict(each) for each in find_further(reference)],
                "bounds": find_bounds(reference, candidate),
                "operands": find_operand_sizes(reference),
                "empty": _is_empty(reference),
                "given": None
                if given is None
                else [[shipment.array(name, value) for name, value in sample.items()] for sample in given],
                # A type that only one of them has is no excuse for the other: a rounding that is gone, or new, is a difference.
                "working": FLOATS[max(map(_coarsest, (reference, candidate)))],
                **{"seed": terms.seed, "count": terms.samples, "atol": terms.atol, "rtol": terms.rtol},
                "patience": terms.patience,
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


def _plain(found: Probe | Parted) -> dict[str, Any]:
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
