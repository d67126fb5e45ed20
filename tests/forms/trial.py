"""One trial: a batch norm next to a form is folded, and result and proof are compared with what an engine computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx

from bnexport import tolerances, verify
from bnexport.errors import BnexportError
from bnexport.folding import fold
from bnexport.folding.report import FoldReport
from bnexport.tolerances import UNIT_ROUNDOFF
from bnexport.verification.verdict import Verification
from tests.forms.case import Shape
from tests.forms.engine import Engine, Refused
from tests.forms.placements import feeds
from tests.support.claims import prove_claims

# Scales of the inputs: rounding at zero crossings and at integers shows at some, saturation at others.
SCALES = (1.0, 8.0)
BATCHES = (1, 3)


@dataclasses.dataclass(frozen=True)
class Finding:
    """kind: wrong (the result differs), crash, refused (of a model that ONNX Runtime runs), invalid (to onnx.checker),
    unsound (a wrong fold is proved), exchanged (so is the fold of another form) or rejected (a right fold is refuted)."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """status: folded or kept; proofs: what the local proof said by the claims of the fold and by a search."""

    status: str
    findings: tuple[Finding, ...] = ()
    proofs: tuple[str, ...] = ()


def difference(expected: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> str | None:
    """Return how two lists of outputs differ by more than the table allows."""
    for index, (one, two) in enumerate(zip(map(np.asarray, expected), map(np.asarray, got), strict=True)):
        if one.shape != two.shape or one.dtype != two.dtype:
            return f"output {index} is {two.dtype}{list(two.shape)}, expected {one.dtype}{list(one.shape)}"
        if str(one.dtype) not in UNIT_ROUNDOFF:
            if not np.array_equal(one, two):
                return f"{int((one != two).sum())} of {one.size} values of output {index} differ"
            continue
        wide, near = one.astype(np.float64), two.astype(np.float64)
        finite = np.isfinite(wide)
        if not np.array_equal(wide[~finite], near[~finite], equal_nan=True) or not np.isfinite(near[finite]).all():
            return f"output {index} has other NaN or infinite values"
        bound = tolerances.model(str(one.dtype), wide).atol
        worst = float(np.abs(wide[finite] - near[finite]).max(initial=0.0))
        if worst > bound:
            return f"output {index} differs by {worst:.3g}, allowed {bound:.3g}"
    return None


def samples(proto: onnx.ModelProto, shape: Shape) -> Iterator[dict[str, np.ndarray]]:
    """Yield inputs of two scales, and of other batches where the batch is free."""
    for seed, scale in enumerate(SCALES):
        yield feeds(proto, shape, seed, scale)
    x = proto.graph.input[0].type.tensor_type.shape
    # A constant that has no rows takes no other batch.
    if shape and shape[0] and x.dim[0].dim_param:
        for batch in BATCHES:
            yield feeds(proto, (batch, *shape[1:]), batch)


def compare(before: onnx.ModelProto, after: onnx.ModelProto, shape: Shape) -> str | None:
    """Return how the models differ. Raises Refused where no engine runs the first."""
    one = Engine(before)
    try:
        two = Engine(after)
    except Refused as error:
        return f"the folded model does not load: {error}"
    found = None
    for index, inputs in enumerate(samples(before, shape)):
        try:
            expected = one.run(inputs)
        except Refused:
            if not index:
                raise
            continue
        try:
            found = found or difference(expected, two.run(inputs))
        except Refused as error:
            return f"the folded model does not run: {error}"
    return found


WAYS: dict[str, Callable[[onnx.ModelProto, onnx.ModelProto, FoldReport], Verification]] = {
    "by its claims": prove_claims,
    "by a search": lambda proto, folded, _: verify(proto, folded, method="local"),
}


def attempt(proto: onnx.ModelProto, shape: Shape) -> Outcome:
    """Fold, compare and prove. Raises Refused where no engine runs the model."""
    Engine(proto).run(feeds(proto, shape, 0))
    try:
        result = fold(proto, verify=False)
    except BnexportError as error:
        return Outcome("kept", (Finding("refused", f"{type(error).__name__}: {error}"),))
    except Exception as error:
        return Outcome("kept", (Finding("crash", f"fold: {type(error).__name__}: {error}"),))
    status = "folded" if result.report.changed else "kept"
    findings = []
    wrong = compare(proto, result.model, shape)
    if wrong is not None:
        findings.append(Finding("wrong", wrong))
    findings += [Finding("invalid", text) for text in [_invalid(proto, result.model)] if text]
    proofs = []
    for name, judged in WAYS.items() if result.report.changed else ():
        try:
            verdict = judged(proto, result.model, result.report)
        except Exception as error:
            findings.append(Finding("crash", f"verify {name}: {type(error).__name__}: {error}"))
            continue
        proofs.append(verdict.status)
        if verdict.status == "passed" and wrong is not None:
            findings.append(Finding("unsound", f"proved {name}; {wrong}"))
        if verdict.status == "failed" and wrong is None:
            findings.append(Finding("rejected", f"{name}: {verdict.reason}"))
    return Outcome(status, tuple(findings), tuple(proofs))


def exchange(proto: onnx.ModelProto, other: onnx.ModelProto, shape: Shape) -> Iterator[Finding]:
    """Prove the fold of another form as if it were this one's. Raises Refused where no engine runs both."""
    result, candidate = fold(proto, verify=False), fold(other, verify=False).model
    Engine(other).run(feeds(other, shape, 0))
    wrong = compare(proto, other, shape)
    for name, judged in WAYS.items():
        verdict = judged(proto, candidate, result.report)
        if verdict.status == "passed" and wrong is not None:
            yield Finding("exchanged", f"proved {name}; {wrong}")
        # By claims everything else has to be equal as it is written; at sizes that are free they may differ.
        fixed = not any(dim.dim_param for dim in proto.graph.input[0].type.tensor_type.shape.dim)
        if verdict.status == "failed" and wrong is None and name == "by a search" and fixed:
            yield Finding("rejected", f"{name}: {verdict.reason}")


def _invalid(before: onnx.ModelProto, after: onnx.ModelProto) -> str | None:
    """Return why the checker refuses the folded model, where it accepts the source."""
    for proto in (before, after):
        try:
            onnx.checker.check_model(proto, full_check=True)
        except Exception as error:  # checker and shape inference have a class each
            return str(error).strip().splitlines()[-1] if proto is after else None
    return None
