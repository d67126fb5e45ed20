"""The verdict as data: what counts as passed, its one line, its JSON, the warning about kept files."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest

from bnexport.errors import NotVerifiedWarning
from bnexport.verification.verdict import Method, OutputComparison, SiteProof, Status, Verification

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


def test_without_an_output() -> None:
    failed, skipped = Verification("failed", "the inputs differ"), Verification.skipped("no engine")
    assert (failed.ran, skipped.ran, Verification.of([BAD]).ran) == (False, True, True)
    assert failed.summary(folds=False) == "the inputs differ"
    assert Verification.of([]).summary(folds=False) == "there is nothing to compare"


def test_a_summary_names_the_output_nearest_to_its_bound() -> None:
    near = dataclasses.replace(GOOD, name="near", max_abs_diff=9e-7, engine="an engine")
    verdict = Verification.of([GOOD, near], sizes=(((1, 2),), ((3, 2),)), input_scale=0.125)
    assert verdict.summary() == (
        "output 'near' in an engine: differs by 9e-07, allowed 1e-06, at 2 sizes: 1x2, 3x2, on inputs times 0.125"
        "; 0 folds proved, 0 compared only"
    )
    assert Verification.of([GOOD, near, BAD]).summary(folds=False) == "output 'z': differs by 0.5, allowed 1e-06"
    # What has no engine is not passed.
    assert not Verification.skipped("no engine")
    assert Verification.skipped("no engine").summary() == "not verified: no engine; 0 folds proved, 0 compared only"
    # A value beyond the table is nearer than one within it.
    beyond = dataclasses.replace(GOOD, name="beyond", bound="float64", max_abs_diff=1e-8)
    assert "'beyond'" in Verification.of([GOOD, beyond]).summary()


def test_a_reason_of_the_reference_survives_a_pass() -> None:
    verdict = Verification.of([GOOD], reason="needs a GPU", reference="converted")
    assert verdict
    assert verdict.summary(folds=False).endswith(
        "; compared with the converted model, since the model itself cannot run here: needs a GPU"
    )


def test_repr_is_one_line() -> None:
    verdict = dataclasses.replace(Verification.of([GOOD, BAD]), sites=(PROVED, LEFT))
    counts = "1 fold proved, 0 compared only, 1 not checked, errors within 1e-07 of the largest weight"
    assert repr(verdict) == f"Verification(failed: output 'z': differs by 0.5, allowed 1e-06; 2 outputs, {counts})"
    assert repr(Verification.of([GOOD])) == "Verification(passed; 1 output, 0 folds proved, 0 compared only)"
    assert len(repr(Verification.skipped("no engine " * 100))) < 250


def test_json_has_one_shape() -> None:
    keys = {
        *("schema_version", "passed", "status", "reason", "outputs", "engine", "reference", "samples", "seed"),
        *("input_scale", "sizes", "method", "sites", "certificate", "another", "place"),
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


PROVED, COMPARED, LEFT, WRONG = (
    SiteProof("bn", mark, bound=bound)
    for mark, bound in (("proved", 1e-7), ("compared", 1e-6), ("not_run", 0.0), ("failed", 0.0))
)


COUNTS = [
    ("passed", "whole", (), "0 folds proved, 0 compared only"),
    ("passed", "whole", (LEFT, LEFT), "0 folds proved, 2 compared only"),
    ("passed", "both", (PROVED, LEFT), "1 fold proved, 1 compared only, errors within 1e-07 of the largest weight"),
    ("passed", "local", (PROVED,) * 2, "2 folds proved, 0 compared only, errors within 1e-07 of the largest weight"),
    ("passed", "local", (COMPARED,), "0 folds proved, 1 compared only, errors within 1e-06 of the largest weight"),
    ("not_verified", "both", (LEFT,), "0 folds proved, 0 compared only, 1 not checked"),
    ("failed", "both", (WRONG,), "0 folds proved, 0 compared only, 1 refuted"),
]


@pytest.mark.parametrize(("status", "method", "sites", "text"), COUNTS)
def test_the_line_counts_folds_that_were_proved_and_compared(
    status: Status, method: Method, sites: tuple[SiteProof, ...], text: str
) -> None:
    verdict = Verification(status, "" if status == "passed" else "reason", (GOOD,), method=method, sites=sites)
    assert verdict.summary().endswith(text)


def local(*sites: SiteProof, status: Status = "passed") -> Verification:
    return Verification(status, "" if status == "passed" else "reason", sites=sites, method="local")


# A local proof, with a run of the whole models: the status of both. Where no region differs, nothing has to be proved.
JOINED = [
    (local(PROVED, PROVED), Verification.skipped("no engine"), "passed"),
    (local(PROVED, COMPARED), Verification.skipped("no engine"), "not_verified"),
    (local(), Verification.skipped("no engine"), "passed"),
    (local(PROVED), Verification.of([BAD]), "failed"),
    (local(WRONG, status="failed"), Verification.of([GOOD]), "failed"),
    (local(LEFT, status="not_verified"), Verification.of([GOOD]), "passed"),
]


@pytest.mark.parametrize(("proof", "run", "status"), JOINED)
def test_a_proof_joined_with_a_run(proof: Verification, run: Verification, status: Status) -> None:
    joined = proof.joined(run)
    assert (joined.status, joined.sites, joined.outputs) == (status, proof.sites, run.outputs)
    if run.outputs and status != "failed":
        assert joined.method == "both"
    if run.outputs == (BAD,):
        assert joined.reason == f"output 'z': {BAD.reason}"
