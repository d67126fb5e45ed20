"""Forms that are no longer ones: an operand or an attribute is absent, too many, too short, of another rank or value.

A fold or a proof of such a node may refuse it, but not end in an error of its own, and a proof does not refute the fold. Nothing
runs them: engines end the process at some.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx

from bnexport import verify
from bnexport.errors import BnexportError
from bnexport.folding import fold
from tests.forms import placements
from tests.forms.case import Case
from tests.forms.engine import Refused
from tests.forms.placements import Impossible
from tests.forms.session import computed, of_operator


def malformed(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield the case with one thing wrong, and what."""
    operands = list(case.operands)

    def given(index: int, *operand: Any) -> Case:
        return dataclasses.replace(case, operands=[*operands[:index], *operand, *operands[index + 1 :]])

    yield "one operand more", given(len(operands), np.ones(1, np.float32))
    yield "the last operand missing", given(len(operands) - 1)
    for index, operand in enumerate(operands):
        yield f"operand {index} absent", given(index, None)
        if isinstance(operand, np.ndarray):
            yield f"operand {index} of a rank more", given(index, operand[None])
            yield (
                f"operand {index} a scalar",
                given(index, operand.reshape(-1)[0:1].reshape(()) if operand.size else operand),
            )
            yield f"operand {index} shorter", given(index, operand[..., :-1] if operand.ndim else operand)
            longer = np.concatenate([operand, operand], -1) if operand.ndim else operand
            yield f"operand {index} longer", given(index, longer)
    for name, value in case.attributes.items():
        rest = {key: each for key, each in case.attributes.items() if key != name}
        yield f"no {name}", dataclasses.replace(case, attributes=rest)
        for other in _others(value):
            yield f"{name} = {other}", dataclasses.replace(case, attributes={**rest, name: other})


def _others(value: Any) -> list[Any]:
    if isinstance(value, list):
        negated = [-each for each in value] if value and not isinstance(value[0], str) else []
        return [[*value, *value[-1:]], value[:-1], negated]
    if isinstance(value, str):
        return ["unknown"]
    return [value + 1, -value - 1] if isinstance(value, int) else [-value, float("nan")]


def findings(op_type: str, step: int) -> list[str]:
    """Fold and prove every `step`th malformed form of one operator."""
    found, number = [], 0
    for one in of_operator(op_type, 1, 1):
        everything = list(malformed(one.case))
        chosen = everything[-number % step :: step]
        number += len(everything)
        try:
            result = computed(one, one.case)
        except Refused:
            continue
        for (what, case), place in itertools.product(chosen, one.places):
            # What is around it fits the output that the form has when nothing is wrong.
            try:
                proto = placements.build(one.op_type, case, place, one.shape, result, one.opset, one.seed)
            except (Impossible, ValueError, TypeError, onnx.shape_inference.InferenceError):
                continue
            problem = _problem(proto)
            found += [f"{one.describe()}, {place}, {what}: {problem}"] if problem else []
    return found


def _problem(proto: onnx.ModelProto) -> str | None:
    try:
        folded = fold(proto, verify=False).model
        verdict = verify(proto, folded, method="local")
    except BnexportError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return verdict.reason if verdict.status == "failed" else None
