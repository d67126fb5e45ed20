"""A folded module against the original, both in torch, on the caller's inputs."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn

from bnexport import tolerances
from bnexport.sync_bn.convert import replace, to_plain
from bnexport.torch_versions import pytree
from bnexport.verification.comparison import compare_output, compare_with_truth
from bnexport.verification.inputs.smaller_inputs import Attempt, as_hidden, attempts, shows_inputs, with_smaller
from bnexport.verification.verdict import OutputComparison, Verification


def compare(original: nn.Module, folded: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Verification:
    """Runs both, which are in eval mode and may change by it, and compares every output tensor.

    The bound is that of `bnexport.tolerances.model`. Where it is missed, the error is held against
    torch's own, both measured from the original in float64 (`bnexport.verification.comparison`). An original
    that cannot run here is replaced by its copy with torch's batch norms, unfolded. Where its outputs are not
    finite, or no better than rounding error, the float inputs are made smaller (`smaller_inputs`).
    """
    engine = f"torch {torch.__version__}"
    reference = "original"
    try:
        expected, names = _run(original, inputs)
    except Exception:  # some packages' batch norms run on GPUs only
        reference, original = "converted", replace(original, to_plain)
        expected, names = _run(original, inputs)
    if not _equal(expected, _run(original, inputs)[0]):
        return Verification.skipped("the model draws random numbers")

    def run(scale: float) -> list[list[Any]] | None:
        if scale == 1.0:
            return [list(expected)]
        try:
            rows, others = _run(original, _scaled(inputs, scale))
        except Exception:  # what the model's code raises on other values
            return None
        return [list(rows)] if others == names else None

    result: Verification | None = None
    scalable = any(value.is_floating_point() for value in inputs)
    for attempt in attempts(run, scalable=scalable):
        again = _compare(original, folded, _scaled(inputs, attempt.scale), names, attempt)
        again = dataclasses.replace(again, reference=reference, engine=engine, input_scale=attempt.scale)
        if again.status == "failed" or (again.passed and not attempt.partial):
            return again
        result = result or again
    assert result is not None
    if result.passed or not scalable:
        return result
    return dataclasses.replace(result, reason=with_smaller(result.reason))


def _compare(
    original: nn.Module, folded: nn.Module, inputs: tuple[torch.Tensor, ...], names: list[str], attempt: Attempt
) -> Verification:
    try:
        got, other = _run(folded, inputs)
    except Exception as error:  # what the model's code raises, when it misses its batch norms
        return Verification("failed", f"the folded module fails: {error}")
    if names != other:
        return Verification("failed", f"the outputs differ: {names[:8]} and {other[:8]}")
    (expected,) = attempt.expected
    working = _working_type(original, inputs)
    outputs = [compare_output(name, [one], [two], working) for name, one, two in zip(names, expected, got)]
    if any(output.failed for output in outputs):
        outputs = _hold_against_truth(outputs, original, inputs, expected, got)
    if attempt.halved is not None:
        outputs = [
            output if shows_inputs(output, [one], [half]) else as_hidden(output)
            for output, one, half in zip(outputs, expected, attempt.halved[0])
        ]
    sizes = (tuple(tuple(value.shape) for value in inputs),)
    return Verification.of(outputs, samples=1, engine=f"torch {torch.__version__}", sizes=sizes)


def _scaled(inputs: tuple[torch.Tensor, ...], scale: float) -> tuple[torch.Tensor, ...]:
    return tuple(value * scale if value.is_floating_point() and scale != 1.0 else value for value in inputs)


def _run(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[list[np.ndarray], list[str]]:
    """Run the module; return the output tensors and their places in the output."""
    with torch.no_grad():
        # Code that works in place may change its inputs.
        leaves = pytree.tree_flatten_with_path(model(*(value.clone() for value in inputs)))[0]
    tensors = [(path, value) for path, value in leaves if isinstance(value, torch.Tensor)]
    names = [f"output{pytree.keystr(path)}" for path, _ in tensors]
    return [_array(value) for _, value in tensors], names


def _array(value: torch.Tensor) -> np.ndarray:
    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def _equal(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(one.tobytes() == two.tobytes() for one, two in zip(first, second))


def _working_type(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> str:
    """Return the coarsest float type of any parameter or input."""
    used: list[Any] = [tensor.dtype for tensor in (*model.parameters(), *inputs) if tensor.is_floating_point()]
    names = {str(dtype).removeprefix("torch.") for dtype in used} & set(tolerances.UNIT_ROUNDOFF)
    return max(names, key=lambda name: tolerances.UNIT_ROUNDOFF[name], default="float32")


def _hold_against_truth(
    outputs: list[OutputComparison],
    original: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    expected: list[np.ndarray],
    got: list[np.ndarray],
) -> list[OutputComparison]:
    feeds = tuple(value.double() if value.is_floating_point() else value for value in inputs)
    try:
        truth, _ = _run(copy.deepcopy(original).double(), feeds)
    except (RuntimeError, TypeError):  # code with a type of its own
        return outputs
    return [
        compare_with_truth(output, [one], [two], [exact]) if output.failed else output
        for output, one, two, exact in zip(outputs, expected, got, truth)
    ]
