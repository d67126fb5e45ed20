"""Compares an exported graph in ONNX Runtime with the caller's own module."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from bnexport import schema
from bnexport.errors import LibraryError, VerificationError
from bnexport.exporting.dimensions.other_sizes import Fault, OtherSizes
from bnexport.exporting.dimensions.sizes import Shapes, is_constant, resized, shapes
from bnexport.runtime import injection
from bnexport.verification.judging import Engine, Outcome, judge
from bnexport.verification.reference import Reference
from bnexport.verification.torch_outputs import Array, OutputError, to_array

Tensors = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Verification:
    """passed is None when nothing could be compared, or decided; `reason` says why.

    outputs: for each output and engine the comparison nearest to its bound. reference: "original", the caller's
    module, or "converted": its copy with our or torch's batch norms, where the module itself cannot run here;
    `reason` says why. input_scale: what the float inputs were multiplied by; below 1 where the outputs for the
    example itself decide nothing. sizes: the shapes of the inputs of each comparison, the example's first.
    """

    passed: bool | None
    engine: str
    outputs: tuple[OutputError, ...]
    reason: str = ""
    reference: str = "original"
    input_scale: float = 1.0
    sizes: tuple[Shapes, ...] = ()

    @classmethod
    def skipped(cls, reason: str) -> Verification:
        return cls(None, "", (), reason)

    @classmethod
    def of(cls, errors: Sequence[OutputError], engine: str, cause: str = "", scale: float = 1.0) -> Verification:
        """The verdict on all outputs. cause: why the caller's module cannot run here, if it cannot."""
        undecided = next((error for error in errors if not error.decided and not error.failed), None)
        passed: bool | None = not any(error.failed for error in errors)
        reason = cause
        if passed and undecided is not None:
            passed, reason = None, f"output {undecided.name!r}: {undecided.reason}"
        return cls(passed, engine, tuple(errors), reason, "converted" if cause else "original", scale)

    def summary(self) -> str:
        if self.passed is None:
            return f"not verified: {self.reason}"
        text = max(self.outputs, key=_nearness).summary()
        if len(self.sizes) > 1:
            text += f", at {len(self.sizes)} sizes: {', '.join(map(_size, self.sizes))}"
        if self.input_scale != 1.0:
            text += f", on inputs times {self.input_scale:.3g}"
        if self.reference == "converted":
            text += f"; compared with the converted model, since the model itself cannot run here: {self.reason}"
        return text

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A verdict, and the dynamic dimensions in which the model is not right; nothing is decided while there are any."""

    verification: Verification
    faults: tuple[Fault, ...] = ()


def check(model: ir.Model, reference: Reference, inputs: Tensors, others: OtherSizes) -> Checked:
    """Runs both on `inputs` and at other sizes of the dynamic dimensions.

    Statistics compare like outputs. A model that draws random numbers (Dropout in train mode) is not compared.

    Raises VerificationError where the exported model does not run on `inputs`.
    """
    if any(tensor.dtype == torch.bfloat16 for tensor in inputs):
        return Checked(Verification.skipped("onnxruntime's Python interface takes no bfloat16 arrays"))
    try:
        import onnxruntime  # noqa: F401 - whether it is there
    except ImportError:
        return Checked(Verification.skipped("onnxruntime is not installed"))
    engines, reason = _engines(model)
    if not engines:
        return Checked(Verification.skipped(reason))
    return verdict(engines, [str(value.name) for value in model.graph.outputs], reference, inputs, others)


def verdict(
    engines: Sequence[Engine], names: Sequence[str], reference: Reference, inputs: Tensors, others: OtherSizes
) -> Checked:
    """The verdict on an exported model for the example inputs and other sizes.

    names: of the outputs. Raises VerificationError where the exported model does not run on `inputs`.
    """
    expected = reference(inputs)
    if reference.is_random(inputs):
        return Checked(Verification.skipped("the model draws random numbers"))

    def judged(feeds: list[Tensors], expected: list[Tensors]) -> list[Outcome]:
        return judge(engines, names, reference, feeds, expected)

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
    failure = next((outcome.failure for outcome in held if outcome.failure), "")
    if failure:
        raise VerificationError(f"the exported model cannot run: {failure}")
    faults, tried = [], [shapes(inputs, {})]
    if all(outcome.passed for outcome in held):
        faults = others.faults(elsewhere, judged)
        held += [outcome for outcome in elsewhere if outcome.passed]
        tried += [others.shapes(run) for run, outcome in zip(others.runs, elsewhere) if outcome.passed]
    errors = nearest([error for outcome in held for error in outcome.errors])
    engine = " and ".join(each.name for each in engines)
    verification = Verification.of(errors, engine, reference.cause, outcomes[0].scale)
    return Checked(dataclasses.replace(verification, sizes=tuple(tried)), tuple(faults))


class _Session:
    """One session of ONNX Runtime."""

    def __init__(self, model: ir.Model, name: str, options: Any) -> None:
        self.name = name
        self._inputs = [str(value.name) for value in model.graph.inputs]
        try:
            self._session = injection.open_model(model, options)
        except Exception as error:  # ONNX Runtime raises one class for each status code
            raise VerificationError(f"{name} cannot load the exported model: {str(error).strip()}") from error

    def run(self, feeds: Sequence[Tensors]) -> list[list[Array] | str]:
        results: list[list[Array] | str] = []
        for feed in feeds:
            try:
                got = self._session.run(None, dict(zip(self._inputs, map(to_array, feed))))
                results.append([np.asarray(value) for value in got])
            except Exception as error:  # ONNX Runtime raises one class for each status code
                results.append(str(error).strip())
        return results


def _engines(model: ir.Model) -> tuple[list[Engine], str]:
    """Every way in which the model is meant to run here: with the library, by its portable body."""
    import onnxruntime

    from bnexport.native import library

    def options() -> Any:
        made = onnxruntime.SessionOptions()
        made.log_severity_level = 4
        return made

    name = f"onnxruntime {onnxruntime.__version__}"
    nodes = [node for node in model.graph.all_nodes() if node.op_type == schema.SYNC_BATCH_NORM.name]
    if not nodes:
        return [_Session(model, name, options())], ""
    engines: list[Engine] = []
    reason = ""
    try:
        registered = options()
        library.register(registered)
        engines.append(_Session(model, f"{name} with the custom-op library", registered))
    except LibraryError as error:
        reason = str(error)
    if all(node.op_identifier() in model.functions for node in nodes):
        engines.append(_Session(model, f"{name} with the portable body", options()))
    return engines, reason


def nearest(errors: Sequence[OutputError]) -> list[OutputError]:
    """Of each output in each engine the comparison nearest to its bound."""
    found: dict[tuple[str, str], OutputError] = {}
    for error in errors:
        key = (error.name, error.engine)
        if key not in found or _nearness(error) > _nearness(found[key]):
            found[key] = error
    return list(found.values())


def _nearness(error: OutputError) -> tuple[bool, bool, float]:
    """Failures first, then what is undecided, then by the share of the bound; a bound of 0 is that of integers."""
    share = error.max_abs_error / error.bound if error.bound else (math.inf if error.max_abs_error else 0.0)
    return error.failed, not error.decided, share


def _size(shapes: Shapes) -> str:
    return " + ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)
