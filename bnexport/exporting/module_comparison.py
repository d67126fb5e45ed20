"""A torch module against a file that any exporter wrote.

The module is exported as it stands, with no fold, by the tracer that wrote the file, and that export is verified against torch.
Then two ONNX files are compared as ever. A module that cannot be exported, and a file of torch's own formats, are compared by
values alone: the module runs in torch on the example inputs, the file in a process of its own.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from bnexport import tolerances
from bnexport.errors import BnexportError, UsageError, first_line
from bnexport.exporting import api, arguments
from bnexport.exporting.job import verdict as verdict_of_values
from bnexport.exporting.other_sizes import OtherSizes
from bnexport.exporting.torch_target import FreshProcess
from bnexport.model_io import load
from bnexport.model_io.read import Source, open_source
from bnexport.modules.copies import copy_model
from bnexport.modules.tensors import to_array
from bnexport.runtime.engine import Engine
from bnexport.torch_versions import pytree
from bnexport.verification.api import computing_type, given_inputs, spec_of, verify_models
from bnexport.verification.file_engine import FileEngine
from bnexport.verification.inputs import FREE_SIZES, Draw, draw
from bnexport.verification.reference import Reference
from bnexport.verification.verdict import Method, Terms, Verification

Tensors = tuple[torch.Tensor, ...]
_TORCH_FILES = {".pt": "torchscript", ".pt2": "pt2"}


@dataclasses.dataclass(frozen=True)
class Example:
    """What forward takes, the names that inputs get, None for forward's own, and further sets of arrays of the caller's."""

    args: Any
    names: list[str] | None = None
    others: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, inputs: Any) -> Example:
        """Read the argument `inputs`: a tensor, a tuple of what forward takes, or arrays by name, one set or a list of them."""
        if isinstance(inputs, torch.Tensor):
            return cls((inputs,))
        sets = inputs if isinstance(inputs, list) and inputs and isinstance(inputs[0], Mapping) else [inputs]
        if not isinstance(sets[0], Mapping):
            return cls(tuple(inputs))
        return cls(tuple(map(torch.as_tensor, sets[0].values())), list(sets[0]), tuple(sets[1:]))

    @classmethod
    def drawn(cls, module: nn.Module, model: ir.Model, seed: int) -> Example:
        """Draw what a file takes, of the first sizes that the module runs at. Raises UsageError where there are none."""
        specs = [spec_of(value, model) for value in given_inputs(model)]
        for first, other in FREE_SIZES:
            arrays = draw(specs, Draw(seed, first, (other,)), {spec.name: spec.ranges[-1] for spec in specs})
            found = cls(tuple(map(torch.from_numpy, arrays.values())))
            reference = Reference(module, evaluate=True)
            reference.run_first(found.args)
            if not reference.cause:
                return found
        raise UsageError("inputs: missing, and the module runs at none of the sizes that were tried; give them")


def compare(
    reference: Any, candidate: Source, inputs: Any, terms: Terms, method: Method, names: Mapping[str, str] | None
) -> Verification:
    """Return the verdict of `bnexport.verify` on a module or a program, and a file."""
    program = arguments.program_of(reference)
    module = reference if program is None else program.module()
    kind = _TORCH_FILES.get(Path(candidate).suffix) if isinstance(candidate, (str, os.PathLike)) else None
    if kind is not None and inputs is None:
        raise UsageError(f"inputs: missing, expected example inputs: {candidate} does not state them")
    model = None if kind is not None else open_source(candidate).model
    example = Example.of(inputs) if inputs is not None or model is None else Example.drawn(module, model, terms.seed)
    if model is None:
        own = arguments.read(module, example.args, {})
        with FreshProcess(Path(cast("str", candidate)), str(kind)) as engine:
            return _by_values(own.model, engine, own.inputs, "")
    if computing_type(model) != "float16" or program is not None:
        return _against(reference, module, example, model, terms, method, names)
    half = copy_model(module).half()
    halved = dataclasses.replace(example, args=pytree.tree_map_only(torch.Tensor, _halved, example.args))
    reference = Reference(half, evaluate=True)
    reference.run_first(arguments.read(half, halved.args, {}).inputs)
    if not reference.cause and all(map(_is_finite, reference(arguments.read(half, halved.args, {}).inputs))):
        return _with_note(
            _against(half, half, halved, model, terms, method, names), "compared with the module in float16"
        )
    # What overflows in the module in float16, too, shows next to the module as it is.
    outputs = Reference(module, evaluate=True)(arguments.read(module, example.args, {}).inputs)
    bounds = [tolerances.model("float16", to_array(value)).atol for value in outputs if value.is_floating_point()]
    terms = dataclasses.replace(terms, atol=min(bounds, default=0.0))
    verdict = _against(module, module, example, model, terms, method, names)
    return _with_note(verdict, "compared with the module as it is, by the bound of float16")


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _with_note(verdict: Verification, note: str) -> Verification:
    return dataclasses.replace(verdict, reason="; ".join(filter(None, (verdict.reason, note))))


def _against(
    reference: Any,
    module: nn.Module,
    example: Example,
    model: ir.Model,
    terms: Terms,
    method: Method,
    names: Mapping[str, str] | None,
) -> Verification:
    """Compare the export of a module or a program with a file, on the example and, but in float16, random inputs as well."""
    own = arguments.read(module, example.args, {})
    if example.names is None:
        example = dataclasses.replace(example, names=list(own.names))
    with tempfile.TemporaryDirectory() as folder:
        exported, why = _exported(reference, example, model, Path(folder, "module.onnx"))
        if exported is None:
            return _by_values(own.model, _File(model, terms), own.inputs, why)
        graph = load(exported.path)
        _adapt(graph, model, names or {})
        types = {str(value.name): value.dtype.numpy() for value in graph.graph.inputs if value.dtype is not None}
        arrays = dict(zip(exported.inputs, map(to_array, own.inputs)))
        sets = [
            {name: np.asarray(each).astype(types[name]) for name, each in one.items()}
            for one in (arrays, *example.others)
        ]
        # Random inputs, some of them large, leave the range of float16.
        beside = computing_type(model) != "float16"
        terms = dataclasses.replace(terms, inputs=sets, beside=beside)
        verdict = verify_models(graph, model, terms, method, names or {})
        return _with_truth(verdict, own.model, model, sets[0], exported.inputs, terms)


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def _exported(reference: Any, example: Example, model: ir.Model, path: Path) -> tuple[api.ExportResult | None, str]:
    """Export the module by the tracer that wrote the file, else by the other, verified; None, and why, where neither can."""
    free = any(not isinstance(size, int) for value in model.graph.inputs for size in value.shape or ())
    # torch's older exporter writes no metadata; ours names its graphs.
    traced = model.graph.name == "main_graph" and not any(node.metadata_props for node in model.graph)
    why = ""
    for tracer in ("torchscript", None) if traced else (None, "torchscript"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                options: Any = {"exporter": tracer, "input_names": example.names, "dynamic": free}
                found = api.export(reference, example.args, path, fold=False, overwrite=True, **options)
            if found.verification.passed:
                return found, ""
            why = why or f"its export is not verified: {found.verification.reason}"
        except UsageError:
            raise
        except Exception as error:  # torch's exporters raise many types
            why = why or f"it cannot be exported: {first_line(error)}"
    return None, why


def _adapt(own: ir.Model, model: ir.Model, names: Mapping[str, str]) -> None:
    """Give inputs the sizes that a file fixes, and inputs and outputs its float types, in place."""
    for values, others in ((own.graph.inputs, given_inputs(model)), (own.graph.outputs, model.graph.outputs)):
        by_name = {str(value.name): value for value in others}
        for place, value in enumerate(list(values)):
            name = str(value.name)
            position = others[place] if len(others) == len(values) else None
            other = by_name.get(names.get(name, name), position)
            if other is None or other.dtype is None or value.dtype is None:
                continue
            if values is own.graph.inputs and value.shape and other.shape and len(value.shape) == len(other.shape):
                sizes = zip(value.shape, other.shape)
                value.shape = ir.Shape(
                    [two if isinstance(two, int) and not isinstance(one, int) else one for one, two in sizes]
                )
            if value.dtype != other.dtype and value.dtype.is_floating_point() and other.dtype.is_floating_point():
                _cast(own.graph, place, other.dtype, is_input=values is own.graph.inputs)


def _cast(graph: ir.Graph, place: int, dtype: ir.DataType, *, is_input: bool) -> None:
    """Put a Cast behind an input, or in front of an output, which has the other type then."""
    value = (graph.inputs if is_input else graph.outputs)[place]
    name, inner = str(value.name), f"{value.name}.uncast"
    outer = ir.val(name, dtype, value.shape)
    value.name = inner
    if is_input:
        cast = ir.node("Cast", [outer], {"to": value.dtype})
        cast.outputs[0].name, cast.outputs[0].type, cast.outputs[0].shape = f"{name}.cast", value.type, value.shape
        graph.inputs[place] = outer
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        graph.insert_before(graph[0], cast)
    else:
        cast = ir.node("Cast", [value], {"to": dtype}, outputs=[outer])
        graph.append(cast)
        graph.outputs[place] = outer


class _File:
    """An ONNX file as an engine that takes the tensors of a module by position."""

    def __init__(self, model: ir.Model, terms: Terms) -> None:
        self._engine = FileEngine(model, terms.providers, terms.timeout)
        self._inputs = [str(value.name) for value in given_inputs(model)]
        self._outputs = [str(value.name) for value in model.graph.outputs]
        self.name = "onnxruntime"

    def run(self, feeds: Mapping[str, torch.Tensor], outputs: Sequence[str]) -> list[Any]:
        return self._engine.run(dict(zip(self._inputs, map(to_array, feeds.values()))), self._outputs)


def _by_values(module: nn.Module, engine: Engine, inputs: Tensors, why: str) -> Verification:
    """Run the module and the file on the example inputs and compare the outputs."""
    reference = Reference(module, evaluate=True)
    count = len(reference(inputs))
    names = ["output"] if count == 1 else [f"output_{index}" for index in range(count)]
    try:
        verdict = verdict_of_values([engine], names, reference, inputs, OtherSizes(inputs, reference)).verification
    except BnexportError as error:
        return Verification("failed", str(error))
    reason = f"by values at the example's sizes alone{f': {why}' if why else ''}"
    return dataclasses.replace(verdict, reason=reason) if verdict.passed else verdict


def _with_truth(
    verdict: Verification,
    module: nn.Module,
    model: ir.Model,
    example: Mapping[str, Any],
    names: Sequence[str],
    terms: Terms,
) -> Verification:
    """Add how far the file and the module are from the module in float64, on inputs of the verdict."""
    if not verdict.outputs:
        return verdict
    inputs = verdict.witness or example
    own = next((each.dtype for each in module.parameters()), torch.float32)
    feeds = {name: torch.from_numpy(np.asarray(inputs[name])) for name in names}
    feeds = {name: value.to(own) if value.is_floating_point() else value for name, value in feeds.items()}
    reference = Reference(module, evaluate=True)
    try:
        rows = _File(model, terms).run(feeds, ()), reference.run(feeds, ())
        exact = reference.exact([feeds], ())[0]
    except BnexportError:
        return verdict
    if len(rows[0]) != len(exact):
        return verdict
    worst = [
        max(float(np.abs(one.astype(np.float64) - true).max(initial=0.0)) for one, true in zip(row, exact))
        for row in rows
    ]
    if verdict.status == "failed" and own == torch.float16 and worst[0] <= tolerances.OWN_ERROR * worst[1]:
        text = f"in float16 the module differs from its numbers in float64 by {worst[1]:.3g} itself, the file by {worst[0]:.3g}"
        return dataclasses.replace(verdict, status="not_verified", reason=text, place="")
    if "from the model in float64" in verdict.reason:
        return verdict
    where = "the inputs that show it" if verdict.status == "failed" else "the first inputs"
    text = f"on {where} from the module in float64 the file differs by {worst[0]:.3g}, the module by {worst[1]:.3g}"
    return _with_note(verdict, text)
