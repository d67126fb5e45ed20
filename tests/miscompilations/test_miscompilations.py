"""Known mistakes of real tools: each is wrong in ONNX Runtime, never passes, and its right counterpart does."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bnexport import verify
from bnexport.errors import ModelError
from bnexport.folding import fold
from bnexport.verification.verdict import Verification
from tests.miscompilations import page
from tests.miscompilations.catalogue import MISTAKES
from tests.miscompilations.mistake import OURS, Mistake, Triple
from tests.miscompilations.quark import QUARK
from tests.miscompilations.refuted import REFUTED
from tests.support.onnx_text import make_inputs, run
from tests.support.recorded import Recorded

METHODS = ("both", "local", "whole")
TRIPLES: list[Triple] = [*MISTAKES, *REFUTED]
BY_NAME = {each.name: each for each in TRIPLES}
VERDICTS = Recorded(Path(__file__).with_name("verdicts.txt"))


@functools.cache
def verification(name: str, which: Any, method: Any = "both") -> Verification | None:
    """Return the verdict, None where the model is refused."""
    each = BY_NAME[name]
    try:
        return verify(each.model("original"), each.model(which), method=method)
    except ModelError:
        return None


def check_record(name: str, which: str, method: str) -> None:
    """Compare where the models differ, on which sizes, and how each output and fold was judged with what is recorded."""
    found = verification(name, which, method)
    if found is None:
        return VERDICTS.check(f"{name} {which}", "refused")
    sizes = [" ".join("x".join(map(str, shape)) for shape in feed) for feed in found.sizes]
    outputs = [f"{each.name} {each.bound} {'passed' if each.passed else each.decided}" for each in found.outputs]
    place = re.sub(r": largest \S+,|, most in .*", "", found.place)
    parts = [
        found.status,
        found.method,
        found.reference,
        f"{found.input_scale:.3g}",
        ", ".join(sizes),
        ", ".join(outputs),
    ]
    VERDICTS.check(f"{name} {which}", " | ".join([*parts, ", ".join(proof.method for proof in found.sites), place]))


def verdict(name: str, which: Any, method: Any = "both") -> str:
    found = verification(name, which, method)
    return found.status if found is not None else "refused"


def outputs(each: Triple, which: Any) -> list[np.ndarray]:
    return run(each.model(which), each.inputs or make_inputs(each.model("original"), each.sizes))


def close(one: np.ndarray, two: np.ndarray) -> bool:
    """Equal but for the rounding of float32."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return (
        np.allclose(one, two, rtol=1e-5, atol=1e-4, equal_nan=True)
        if one.dtype.kind == "f"
        else bool((one == two).all())
    )


def alike(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    return len(first) == len(second) and all(map(close, first, second))


def attempts() -> Iterator[Any]:
    """Each triple with each method; those that pass today fail as expected."""
    for each in TRIPLES:
        for method in METHODS:
            known = each.known is not None and method in each.known.methods
            marks = [pytest.mark.xfail(strict=True, reason=each.known.why)] if known else []  # type: ignore[union-attr]
            yield pytest.param(each, method, marks=marks, id=f"{each.name}-{method}")


def right_ones() -> Iterator[Any]:
    for each in TRIPLES:
        marks = [pytest.mark.xfail(strict=True, reason=each.known_right)] if each.known_right else []
        yield pytest.param(each, marks=marks, id=each.name)


@pytest.mark.parametrize("each", [each for each in TRIPLES if each.runs is not None], ids=lambda each: each.name)
def test_it_is_wrong(each: Triple) -> None:
    """ONNX Runtime, without optimisations, says so; and that the right counterpart is right."""
    expected = outputs(each, "original")
    assert alike(expected, outputs(each, "right"))
    if each.runs:
        assert not alike(expected, outputs(each, "wrong"))
    else:
        with pytest.raises(Exception, match=r"\[ONNXRuntimeError\]"):
            outputs(each, "wrong")


@pytest.mark.parametrize(("each", "method"), attempts())
def test_it_never_passes(each: Triple, method: str) -> None:
    assert verdict(each.name, "wrong", method) != "passed"
    if method == "both":
        check_record(each.name, "wrong", method)


@pytest.mark.parametrize("each", MISTAKES, ids=lambda each: each.name)
def test_the_page_tells_its_verdict(each: Mistake) -> None:
    expected = "passed" if each.known is not None and "both" in each.known.methods else each.verdict
    assert verdict(each.name, "wrong") == expected


@pytest.mark.parametrize("each", right_ones())
def test_its_right_counterpart_passes(each: Triple) -> None:
    assert verdict(each.name, "right", each.method) == "passed"
    check_record(each.name, "right", each.method)


@pytest.mark.parametrize("each", [each for each in TRIPLES if each.runs is not None], ids=lambda each: each.name)
def test_a_fold_does_not_make_it(each: Triple) -> None:
    """What the folder makes of the original, every option on, computes the same and is not called wrong."""
    original = each.model("original")
    folded = fold(original, verify=False, leftover="arithmetic", simplify=True).model
    feeds = each.inputs or make_inputs(original, each.sizes)
    assert alike(run(original, feeds), run(folded, feeds))
    assert verify(original, folded).status != "failed"


def test_every_mistake_has_a_name_and_a_source() -> None:
    names = [each.name for each in MISTAKES]
    assert len(set(names)) == len(names)
    public = {each.source for each in MISTAKES if each.source not in (OURS, QUARK)}
    assert len(public) >= 60
    for source in public:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source), source


def test_the_page_is_the_catalogue() -> None:
    text = Path(page.PAGE).read_text()
    assert page.BLOCK.findall(text) == [page.render()], "run python -m tests.miscompilations.page"
