"""Comparison of an exported file with the caller's own module."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import torch

from bnexport.errors import LibraryError, VerificationError, first_line
from bnexport.exporting.dimensions.other_sizes import Fault, OtherSizes
from bnexport.exporting.dimensions.sizes import is_constant, resized, shapes
from bnexport.graph.nodes import is_standard
from bnexport.model_io import walk
from bnexport.model_io.write import tensor_total
from bnexport.runtime import engine
from bnexport.runtime.engine import Engine, EngineFailure
from bnexport.verification.inputs.feeds import FeedGroup
from bnexport.verification.judge import Rules, judge
from bnexport.verification.reference import Reference
from bnexport.verification.torch_outputs import Array, bound, to_array
from bnexport.verification.verdict import Verification, nearest

Tensors = tuple[torch.Tensor, ...]

_LARGEST_OPTIMISED = 1 << 28  # bytes of weights


@dataclasses.dataclass(frozen=True)
class Checked:
    """A verdict, and the dynamic dimensions with wrong results; while there are any, the verdict is open."""

    verification: Verification
    faults: tuple[Fault, ...] = ()


def verdict(
    engines: Sequence[Engine], names: Sequence[str], reference: Reference, inputs: Tensors, others: OtherSizes
) -> Checked:
    """Return the verdict on an exported model for the example inputs and other sizes.

    Statistics compare like outputs. A model that draws random numbers (Dropout in train mode) is not compared. names: of the
    outputs. Raises VerificationError where the exported model does not run on `inputs`.
    """
    expected = reference(inputs)
    if reference.is_random(inputs):
        return Checked(Verification.skipped("the model draws random numbers"))

    def judged(feeds: Sequence[Tensors], expected: Sequence[Tensors]) -> list[Verification]:
        return [_in_each(engines, names, reference, *pair) for pair in zip(feeds, expected, strict=True)]

    feeds, own = [inputs], [expected]
    if any(map(is_constant, inputs)):
        # Zeros hide most differences: random numbers of the same size as well.
        varied = resized(inputs, {})
        with contextlib.suppress(Exception):  # what the model's code raises on other values
            own.append(reference(varied))
            feeds.append(varied)
    count = len(feeds)
    outcomes = judged([*feeds, *(run.inputs for run in others.runs)], [*own, *(run.expected for run in others.runs)])
    held, elsewhere = outcomes[:count], outcomes[count:]
    refused = next((outcome for outcome in held if not outcome.ran), None)
    if refused is not None:
        raise VerificationError(f"the exported model cannot run: {refused.reason}")
    faults, tried = [], [shapes(inputs, {})]
    if all(outcome.passed for outcome in held):
        faults = others.faults(elsewhere, judged)
        held += [outcome for outcome in elsewhere if outcome.passed]
        tried += [others.shapes(run) for run, outcome in zip(others.runs, elsewhere) if outcome.passed]
    errors = nearest([output for outcome in held for output in outcome.outputs])
    verification = Verification.of(
        errors,
        engine=" and ".join(each.name for each in engines),
        reason=reference.cause,
        reference="converted" if reference.cause else "original",
        samples=len(held),
        input_scale=outcomes[0].input_scale,
        sizes=tuple(tried),
    )
    return Checked(verification, tuple(faults))


def _in_each(
    engines: Sequence[Engine], names: Sequence[str], reference: Reference, inputs: Tensors, expected: Tensors
) -> Verification:
    """Judge the exported model in each engine, for one set of inputs."""
    group = FeedGroup([{str(index): value for index, value in enumerate(inputs)}], [list(map(to_array, expected))])
    results, refused = [], []
    for each in engines:
        try:
            rules = Rules(names, bound=functools.partial(bound, rounds=isinstance(each, Session) and each.rounds))
            results.append(judge(reference, each, [group], rules))
        except EngineFailure as failure:
            refused.append(f"{each.name}: {failure.detail}")
    if refused:
        return Verification("failed", "; ".join(refused))
    outputs = [
        dataclasses.replace(output, engine=each.name)
        for each, result in zip(engines, results)
        for output in result.outputs
    ]
    return Verification.of(outputs, input_scale=min(result.input_scale for result in results))


def is_quantised(model: ir.Model) -> bool:
    """Whether values are rounded to integers and back."""
    return any(is_standard(node, "QuantizeLinear") for node in walk.nodes(model))


class Session:
    """One session of ONNX Runtime, which takes the tensors of an export in their order; weights stay in their file.

    rounds: whether numbers of its model are rounded to float32.
    """

    def __init__(self, model: ir.Model, name: str, training: bool | None = None) -> None:
        self.name, self.rounds = name, _rounds_numbers(model)
        wide = any(value.dtype == ir.DataType.DOUBLE for value in model.graph.inputs)
        # ONNX Runtime's optimisations change the layout of weights, in a copy of each: too much for a large model. Some
        # round the numbers of float64 arithmetic to float32, others make integer arithmetic of quantised values.
        optimised = not wide and not is_quantised(model) and tensor_total(model) <= _LARGEST_OPTIMISED
        options = engine.session_options(training, optimised=optimised)
        try:
            self._engine = engine.open(model, options=options, mapped=True)
        except EngineFailure as failure:
            if _has_bfloat16(model):
                raise LibraryError(f"{name} cannot run its bfloat16 operators: {first_line(failure)}") from failure
            way_out = "; it has few operators in float64: export model.float(), or with verify=False" if wide else ""
            raise VerificationError(f"{name} cannot load the exported model: {failure.detail}{way_out}") from failure

    def run(self, feeds: Mapping[str, torch.Tensor], outputs: Sequence[str]) -> list[Array]:
        arrays = dict(zip(self._engine.inputs, map(to_array, feeds.values())))
        return [np.asarray(value) for value in self._engine.run(arrays, outputs)]


def _rounds_numbers(model: ir.Model) -> bool:
    """Whether an operator has a number that float32 rounds, as eps of a batch norm: attributes are float32 in ONNX."""
    nodes = [*model.graph.all_nodes(), *(node for each in model.functions.values() for node in each.all_nodes())]
    numbers = (np.float32(number) for node in nodes for number in _numbers(model, node))
    return any(float(str(number)) != float(number) for number in numbers)


def _numbers(model: ir.Model, node: ir.Node) -> Iterator[float]:
    """Return a node's float attributes: its own, its operator's defaults, and those of the function that defines it."""
    for own in node.attributes.values():
        if own.type == ir.AttributeType.FLOAT and not own.is_ref():
            yield own.as_float()
    version = model.opset_imports.get(node.domain)
    if version is None or not onnx.defs.has(node.op_type, node.domain):
        return
    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.type == onnx.AttributeProto.FLOAT:
            yield attribute.default_value.f
    for inner in schema.function_body.node:
        yield from (each.f for each in inner.attribute if each.type == onnx.AttributeProto.FLOAT)


def _has_bfloat16(model: ir.Model) -> bool:
    values = (value for node in model.graph.all_nodes() for value in node.outputs)
    casts = (node.attributes["to"] for node in model.graph.all_nodes() if "to" in node.attributes)
    return ir.DataType.BFLOAT16 in {value.dtype for value in values} or ir.DataType.BFLOAT16 in {
        a.as_int() for a in casts
    }
