"""The verdict as data: what counts as passed, its one line, its JSON, the warning about kept files."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest

from bnexport.errors import NotVerifiedWarning
from bnexport.verification.verdict import OutputComparison, Verification

GOOD = OutputComparison("y", "float32", 4, 1e-7, 1e-7, 1e-6, 0.0, True)
BAD = dataclasses.replace(GOOD, name="z", max_abs_diff=0.5, passed=False, reason="differs by 0.5, allowed 1e-06")
OPEN = dataclasses.replace(GOOD, name="w", passed=False, decided=False, reason="the reference has no finite value")


@pytest.mark.parametrize(
    ("outputs", "status", "reason"),
    [
        ((GOOD,), "passed", ""),
        ((GOOD, OPEN), "not_verified", "output 'w': the reference has no finite value"),
        ((OPEN, BAD), "failed", "output 'z': differs by 0.5, allowed 1e-06"),
    ],
)
def test_one_output_decides(outputs: tuple[OutputComparison, ...], status: str, reason: str) -> None:
    verdict = Verification.of(outputs, engine="engine")
    assert (verdict.status, verdict.reason, verdict.engine) == (status, reason, "engine")
    assert bool(verdict) is verdict.passed is (status == "passed")


def test_nothing_compared_is_not_passed() -> None:
    verdict = Verification.skipped("no engine")
    assert not verdict
    assert verdict.summary() == "not verified: no engine"


def test_summary_names_the_output_nearest_to_its_bound() -> None:
    near = dataclasses.replace(GOOD, name="near", max_abs_diff=9e-7, engine="an engine")
    verdict = Verification.of([GOOD, near], sizes=(((1, 2),), ((3, 2),)), input_scale=0.125)
    assert verdict.summary() == (
        "output 'near' in an engine: differs by 9e-07, allowed 1e-06, at 2 sizes: 1x2, 3x2, on inputs times 0.125"
    )
    assert Verification.of([GOOD, near, BAD]).summary() == "output 'z': differs by 0.5, allowed 1e-06"


def test_a_reason_of_the_reference_survives_a_pass() -> None:
    verdict = Verification.of([GOOD], reason="needs a GPU", reference="converted")
    assert verdict
    assert verdict.summary().endswith(
        "; compared with the converted model, since the model itself cannot run here: needs a GPU"
    )


def test_json_has_one_shape() -> None:
    keys = {
        *("schema_version", "passed", "status", "reason", "outputs", "engine", "reference", "samples", "seed"),
        *("input_scale", "sizes", "method", "sites"),
    }
    for verdict in (Verification.skipped("no engine"), Verification.of([GOOD, BAD])):
        data = json.loads(json.dumps(verdict.to_dict()))
        assert set(data) == keys
        assert data["passed"] is False
    names = {field.name for field in dataclasses.fields(OutputComparison)}
    assert [set(output) for output in data["outputs"]] == [names, names]


def test_only_what_nothing_verified_is_warned_about() -> None:
    with pytest.warns(NotVerifiedWarning, match="net.onnx is kept and not verified: no engine"):
        Verification.skipped("no engine").warn("net.onnx", stacklevel=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Verification.of([GOOD]).warn("net.onnx", stacklevel=1)
        Verification.of([BAD]).warn("net.onnx", stacklevel=1)
