"""Compares an exported graph in ONNX Runtime with the caller's own module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from bnexport import schema
from bnexport.errors import LibraryError, VerificationError
from bnexport.exporting.comparison import Array, OutputError, compare, to_array
from bnexport.exporting.reference import Reference
from bnexport.folding import smaller_inputs
from bnexport.runtime import injection

Tensors = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Verification:
    """passed is None when nothing could be compared, or decided; `reason` says why.

    outputs: for each output and engine the comparison nearest to its bound. reference: "original", the caller's
    module, or "converted": its copy with our or torch's batch norms, where the module itself cannot run here;
    `reason` says why. input_scale: what the float inputs were multiplied by; below 1 where the outputs for the
    example itself decide nothing.
    """

    passed: bool | None
    engine: str
    outputs: tuple[OutputError, ...]
    reason: str = ""
    reference: str = "original"
    input_scale: float = 1.0

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
        if self.input_scale != 1.0:
            text += f", on inputs times {self.input_scale:.3g}"
        if self.reference == "converted":
            text += f"; compared with the converted model, since the model itself cannot run here: {self.reason}"
        return text

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def check(model: ir.Model, reference: Reference, inputs: Tensors) -> Verification:
    """Runs both on `inputs`, and once more on a doubled batch where the first dimensions are dynamic.

    Statistics compare like outputs. A model that draws random numbers (Dropout in train mode) is not compared.
    """
    if any(tensor.dtype == torch.bfloat16 for tensor in inputs):
        return Verification.skipped("onnxruntime's Python interface takes no bfloat16 arrays")
    try:
        import onnxruntime  # noqa: F401 - whether it is there
    except ImportError:
        return Verification.skipped("onnxruntime is not installed")
    expected = reference(inputs)
    if reference.is_random(inputs):
        return Verification.skipped("the model draws random numbers")
    engines, reason = _engines(model)
    if not engines:
        return Verification.skipped(reason)
    engine = " and ".join(name for name, _ in engines)
    runs = [_runner(model, name, options) for name, options in engines]

    def compared(feed: Tensors, rows: Sequence[Array]) -> list[OutputError]:
        return [error for run in runs for error in run(feed, rows, reference)]

    def judged(feed: Tensors, expected: Tensors) -> tuple[list[OutputError], float]:
        return judge(feed, expected, reference, lambda scale, rows: compared(scaled(feed, scale), rows))

    errors, scale = judged(inputs, expected)
    if inputs and all(_has_dynamic_batch(value) for value in model.graph.inputs):
        doubled = tuple(torch.cat([tensor, tensor]) for tensor in inputs)
        errors += judged(doubled, reference(doubled))[0]
    return Verification.of(nearest(errors), engine, reference.cause, scale)


def judge(
    inputs: Tensors,
    expected: Tensors,
    reference: Reference,
    compared: Callable[[float, Sequence[Array]], list[OutputError]],
) -> tuple[list[OutputError], float]:
    """The comparison on these inputs, or on smaller ones where these decide nothing, and the factor to them.

    expected: what the reference makes of these inputs. compared: runs the exported model on the inputs times a factor
    and compares it with what the reference makes of them.
    """

    def run(scale: float) -> list[list[Any]] | None:
        if scale == 1.0:
            return [[to_array(value) for value in expected]]
        try:
            return [[to_array(value) for value in reference(scaled(inputs, scale))]]
        except Exception:  # what the model's code raises on other values
            return None

    first: list[OutputError] = []
    scalable = any(value.is_floating_point() for value in inputs)
    for attempt in smaller_inputs.attempts(run, scalable=scalable):
        (rows,) = attempt.expected
        errors = compared(attempt.scale, rows)
        if attempt.halved is not None:
            errors = _without_hidden(errors, rows, attempt.halved[0])
        if any(error.failed for error in errors) or all(error.decided for error in errors):
            return errors, attempt.scale
        first = first or errors
    if scalable:
        first = [
            error if error.decided else dataclasses.replace(error, reason=smaller_inputs.with_smaller(error.reason))
            for error in first
        ]
    return first, 1.0


def scaled(inputs: Tensors, scale: float) -> Tensors:
    """Those of float types times `scale`."""
    if scale == 1.0:
        return inputs
    return tuple(value * scale if value.is_floating_point() else value for value in inputs)


def _without_hidden(errors: list[OutputError], expected: list[Any], halved: list[Any]) -> list[OutputError]:
    """Passes are undecided where the bound hides what the inputs change. Engines follow one another in `errors`."""
    results = []
    for index, error in enumerate(errors):
        one, two = (rows[index % len(expected)] for rows in (expected, halved))
        shown = not smaller_inputs.is_float(one) or one.shape != two.shape
        if not shown:
            shown = smaller_inputs.is_small(error.bound, [(one.astype(np.float64), two.astype(np.float64))])
        hidden = error.passed and not shown
        results.append(dataclasses.replace(error, decided=False, reason=smaller_inputs.HIDDEN) if hidden else error)
    return results


def _runner(
    model: ir.Model, engine: str, options: Any
) -> Callable[[Tensors, Sequence[Array], Reference], list[OutputError]]:
    """Runs the graph in one session and compares."""
    inputs, outputs = ([str(value.name) for value in values] for values in (model.graph.inputs, model.graph.outputs))

    def failed(error: Exception) -> VerificationError:  # ONNX Runtime raises one class for each status code
        return VerificationError(f"{engine} cannot run the exported model: {str(error).strip()}")

    try:
        session = injection.open_model(model, options)
    except Exception as error:
        raise failed(error) from error

    def run(feed: Tensors, expected: Sequence[Array], reference: Reference) -> list[OutputError]:
        if len(expected) != len(outputs):
            raise VerificationError(f"the exported model returns {len(outputs)} tensors, torch {len(expected)}")
        try:
            got = session.run(None, dict(zip(inputs, map(to_array, feed))))
        except Exception as error:
            raise failed(error) from error
        return compare(outputs, [np.asarray(value) for value in got], expected, lambda: exact(reference, feed), engine)

    return run


def exact(reference: Reference, feed: Tensors) -> list[Array] | None:
    """The reference in float64; None where its code has a type of its own."""
    try:
        return [to_array(value) for value in reference.in_float64(feed)]
    except (RuntimeError, TypeError):
        return None


def _engines(model: ir.Model) -> tuple[list[tuple[str, Any]], str]:
    """Every way in which the model is meant to run here: with the library, by its portable body."""
    import onnxruntime

    from bnexport.runtime import library

    def options() -> Any:
        made = onnxruntime.SessionOptions()
        made.log_severity_level = 4
        return made

    name = f"onnxruntime {onnxruntime.__version__}"
    nodes = [node for node in model.graph.all_nodes() if node.op_type == schema.SYNC_BATCH_NORM.name]
    if not nodes:
        return [(name, options())], ""
    engines, reason = [], ""
    try:
        registered = options()
        library.register(registered)
        engines.append((f"{name} with the custom-op library", registered))
    except LibraryError as error:
        reason = str(error)
    if all(node.op_identifier() in model.functions for node in nodes):
        engines.append((f"{name} with the portable body", options()))
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


def _has_dynamic_batch(value: ir.Value) -> bool:
    return value.shape is not None and value.shape.rank() >= 2 and not isinstance(value.shape[0], int)
