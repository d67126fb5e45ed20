"""Compares an exported graph in ONNX Runtime with the caller's own module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from bnexport import schema, tolerances
from bnexport.errors import LibraryError, VerificationError
from bnexport.exporting.reference import Reference
from bnexport.runtime import injection


@dataclasses.dataclass(frozen=True)
class OutputError:
    """One output compared: its largest absolute difference and the bound it was held to."""

    name: str
    max_abs_error: float
    bound: float
    engine: str = ""

    @property
    def passed(self) -> bool:
        return self.max_abs_error <= self.bound


@dataclasses.dataclass(frozen=True)
class Verification:
    """passed is None when nothing could be compared; `reason` says why.

    reference: "original", the caller's module, or "converted": its copy with our or torch's batch norms, where the
    module itself cannot run here; `reason` says why.
    """

    passed: bool | None
    engine: str
    outputs: tuple[OutputError, ...]
    reason: str = ""
    reference: str = "original"

    @classmethod
    def skipped(cls, reason: str) -> Verification:
        return cls(None, "", (), reason)

    def summary(self) -> str:
        if self.passed is None:
            return f"not verified: {self.reason}"
        # The one nearest to its bound, or furthest beyond it; a bound of 0 is that of integers.
        worst = max(
            self.outputs, key=lambda o: o.max_abs_error / o.bound if o.bound else (math.inf if o.max_abs_error else 0.0)
        )
        text = f"output {worst.name!r} differs by {worst.max_abs_error:.3g}, bound {worst.bound:.3g} ({worst.engine})"
        if self.reference == "converted":
            text += f"; compared with the converted model, since the model itself cannot run here: {self.reason}"
        return text

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def check(model: ir.Model, reference: Reference, inputs: tuple[torch.Tensor, ...]) -> Verification:
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

    batches = [(inputs, expected)]
    if inputs and all(_has_dynamic_batch(value) for value in model.graph.inputs):
        doubled = tuple(torch.cat([tensor, tensor]) for tensor in inputs)
        batches.append((doubled, reference(doubled)))
    errors: list[OutputError] = []
    engines, reason = _engines(model)
    for engine, options in engines:
        try:
            session = injection.open_model(model, options)
            results = [session.run(None, _named(model.graph.inputs, feeds)) for feeds, _ in batches]
        except Exception as error:  # ONNX Runtime raises one class for each status code
            raise VerificationError(f"{engine} cannot run the exported model: {str(error).strip()}") from error
        for (feeds, references), got in zip(batches, results):
            errors += _compare_all(model, got, references, reference, feeds, engine)
    if not engines:
        return Verification.skipped(reason)
    return Verification(
        passed=all(error.passed for error in errors),
        engine=" and ".join(name for name, _ in engines),
        outputs=tuple(errors),
        reason=reference.cause,
        reference=reference.source,
    )


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


def _named(values: Sequence[ir.Value], tensors: tuple[torch.Tensor, ...]) -> dict[str, np.ndarray]:
    return {str(value.name): _array(tensor) for value, tensor in zip(values, tensors)}


def _compare_all(
    model: ir.Model,
    results: list[Any],
    expected: tuple[torch.Tensor, ...],
    reference: Reference,
    feeds: tuple[torch.Tensor, ...],
    engine: str,
) -> list[OutputError]:
    if len(expected) != len(results):
        raise VerificationError(f"the exported model returns {len(results)} tensors, torch {len(expected)}")
    references = _named(model.graph.outputs, expected)
    got = {name: np.asarray(value) for name, value in zip(references, results)}
    compared = [_compare(name, got[name], references[name], _scale(name, references)) for name in references]
    if not all(error.passed for error in compared):
        compared = _allow_for_rounding(compared, got, references, reference, feeds)
    return [dataclasses.replace(error, engine=engine) for error in compared]


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _scale(name: str, references: dict[str, np.ndarray]) -> float:
    """A running mean may be 0 by cancellation: its rounding errors are those of data of size std."""
    stem = name.removesuffix("running_mean.new")
    variance = references.get(f"{stem}running_var.new")
    if stem == name or variance is None:
        return 0.0
    return float(np.sqrt(np.abs(variance).max(initial=0.0)))


def _allow_for_rounding(
    compared: list[OutputError],
    got: dict[str, np.ndarray],
    references: dict[str, np.ndarray],
    reference: Reference,
    feeds: tuple[torch.Tensor, ...],
) -> list[OutputError]:
    """Ill-conditioned models: the error is held against torch's own, both measured from float64.

    An output that cancels loses the digits its largest value suggests, in torch as in the exported
    model. The bound then is four times torch's own distance from the model computed in float64.
    """
    try:
        exact = reference.in_float64(feeds)
    except (RuntimeError, TypeError):
        return compared
    results = []
    for error, tensor in zip(compared, exact):
        if error.passed or got[error.name].shape != tuple(tensor.shape):
            results.append(error)
            continue
        truth = tensor.detach().cpu().numpy()
        own = _largest_difference(references[error.name], truth)
        results.append(
            OutputError(error.name, _largest_difference(got[error.name], truth), max(error.bound, 4.0 * own))
        )
    return results


def _has_dynamic_batch(value: ir.Value) -> bool:
    return value.shape is not None and value.shape.rank() >= 2 and not isinstance(value.shape[0], int)


def _compare(name: str, actual: np.ndarray, reference: np.ndarray, scale: float) -> OutputError:
    if actual.shape != reference.shape:
        return OutputError(name, float("inf"), 0.0)
    bound = 0.0
    if np.issubdtype(reference.dtype, np.floating):
        values = np.append(reference, scale)
        bound = tolerances.model(reference.dtype.name, values).atol
        if reference.dtype == np.float64:
            # eps and momentum are float32 attributes in ONNX; torch holds them in float64.
            bound += tolerances.UNIT_ROUNDOFF["float32"] * float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
    return OutputError(name, _largest_difference(actual, reference), bound)


def _largest_difference(one: np.ndarray, two: np.ndarray) -> float:
    """Largest absolute difference; equal infinities and NaN beside NaN count as equal."""
    one, two = one.astype(np.float64), two.astype(np.float64)
    same = (one == two) | (np.isnan(one) & np.isnan(two))
    with np.errstate(invalid="ignore"):
        difference = np.abs(np.where(same, 0.0, one - two))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))
