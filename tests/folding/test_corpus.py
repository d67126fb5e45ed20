"""Each case of the corpus folds as it says, or stays for its reason; a fold with another number is not proved."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

import bnexport
from bnexport import verify
from bnexport.errors import BnexportError
from bnexport.folding import FoldResult, fold
from bnexport.model_io import to_proto
from bnexport.verification.verdict import Verification
from tests.folding.corpus import CORPUS, FOLDED, TABLES
from tests.folding.corpus.case import Case
from tests.support.claims import prove_claims
from tests.support.onnx_text import assert_refused, fold_and_check, operators
from tests.support.recorded import Recorded
from tests.verification.changes import differs, several

REPORTS = Recorded(Path(__file__).with_name("reports.txt"))
SIZES = {"H": 7, "W": 7, "D": 5, "L": 4}


def folded(case: Case) -> tuple[onnx.ModelProto, FoldResult]:
    proto = case.model()
    if case.judge == "proof":
        result = fold(proto, verify="local", **case.options)
        return to_proto(result.model), result
    left = sum(name in ("BatchNormalization", "norm2d") for name in case.left.split())  # a function with one
    return fold_and_check(proto, left=left, sizes={**SIZES, **case.sizes}, oracle=case.judge == "exact", **case.options)


def everywhere(proto: onnx.ModelProto) -> list[str]:
    """Operator types, those of bodies and functions as well."""
    return re.findall(r'op_type: "(\w+)"', str(proto))


@pytest.mark.parametrize("name", FOLDED)
def test_it_folds(name: str) -> None:
    case = FOLDED[name]
    proto, result = folded(case)
    assert operators(proto) == case.left.split(), [(site.nodes, site.reason) for site in result.report.sites]
    assert result.report.changed == (everywhere(proto) != everywhere(case.model()))
    assert all(site.reason for site in result.report.kept)
    names = [node.name for node in proto.graph.node if node.name]
    assert len(set(names)) == len(names)
    assert all(name for site in result.report.sites for name in (*site.nodes, *site.targets))
    codes = {refusal.code for site in result.report.sites for refusal in site.refusals}
    assert not case.refused or case.refused in codes
    if result.report.folded and "verify" not in case.options:
        assert {proof.method for proof in result.report.verification.sites} == {case.method}
    if result.report.changed:
        read = {name for node in proto.graph.node for name in node.input} | {value.name for value in proto.graph.output}
        bodies = any(attribute.HasField("g") for node in proto.graph.node for attribute in node.attribute)
        assert bodies or {tensor.name for tensor in proto.graph.initializer} <= read
    again = fold(proto, **{**case.options, "verify": False})
    assert not again.report.changed


@pytest.mark.parametrize("name", [name for name, case in CORPUS.items() if not case.left])
def test_it_stays_for_its_reason(name: str) -> None:
    case = CORPUS[name]
    assert_refused(case.model(), case.refused, sizes=SIZES, **case.options)


@pytest.mark.parametrize("name", CORPUS)
def test_a_report_tells_what_became_of_each_site(name: str) -> None:
    """Its rules, targets and refusals; the batch norms that `inspect` sees; and the nodes that are left."""
    case = CORPUS[name]
    proto = case.model()
    result = fold(proto, **{**case.options, "verify": False})
    after, seen, sites = to_proto(result.model), bnexport.inspect(proto).to_dict(), []
    for site in result.report.sites:
        refusals = [f"{each.rule} {each.code} {each.node}" for each in site.refusals]
        parts = [site.outcome, str(site.channels), "+".join(site.nodes), "+".join(site.targets), "+".join(site.rules)]
        sites.append("/".join([*parts, "+".join(site.region), "+".join(refusals)]))
    norms = [
        f"{norm['node']} {norm['channels']} {norm['input_shape']} {norm['outputs_used']}"
        for norm in seen["batch_norms"]
    ]
    nodes = [" ".join((node.op_type, *node.input, ">", *node.output)) for node in after.graph.node]
    sizes = [f"{tensor.name}{list(tensor.dims)}" for tensor in after.graph.initializer]
    REPORTS.check(name, " | ".join(map("; ".join, (sites, norms, nodes, sizes))))


def passes(judge: Callable[..., Verification], *arguments: Any, **options: Any) -> bool:
    try:
        return judge(*arguments, **options).passed
    except BnexportError:  # a refused file is no pass
        return False


@pytest.mark.parametrize("name", FOLDED)
def test_a_wrong_fold_is_not_proved(name: str) -> None:
    """Up to six changes of one place each."""
    case = FOLDED[name]
    source = case.model()
    result = fold(source, **{**case.options, "verify": False})
    if not result.report.changed:
        return
    good = to_proto(result.model)
    assert verify(source, good, method="local").status != "failed"
    for kind, what, wrong in several(good, np.random.default_rng(zlib.crc32(name.encode())), 6):
        assert not passes(prove_claims, source, wrong, result.report) or not differs(good, wrong), what
        # Four units in the last place are within what another tool's arithmetic in float32 may round.
        if kind != "nudged":
            assert not passes(verify, source, wrong, method="local") or not differs(good, wrong), what


@pytest.mark.parametrize("name", ["taker-deform-mask-bias-19", "taker-instance", "taker-layer"])
def test_a_bias_of_another_rank_is_no_fold(name: str) -> None:
    source = CORPUS[name].model()
    result = fold(source, verify=False)
    proto = to_proto(result.model)
    for tensor in proto.graph.initializer:
        if list(tensor.dims) == [8]:
            tensor.dims.insert(0, 1)
    assert not prove_claims(source, proto, result.report).passed


def test_a_site_that_is_undecided_for_the_sake_of_another_node_says_so() -> None:
    source = CORPUS["scope-scan"].model()
    result = fold(source, verify=False)
    wrong = to_proto(result.model)
    narrow = [onnx.helper.make_node("Cast", [one], [two], to=to) for one, two, to in (("x", "n", 3), ("n", "m", 1))]
    nodes = [*narrow, *wrong.graph.node]
    nodes[2].input[1] = "m"
    del wrong.graph.node[:]
    wrong.graph.node.extend(nodes)
    verdict = prove_claims(source, wrong, result.report)
    assert (verdict.status, [proof.method for proof in verdict.sites]) == ("not_verified", ["not_run"])
    assert verdict.sites[0].reason == verdict.reason != ""


def check_other_numbers(name: str, seed: int) -> None:
    """Fold with parameters of other magnitudes, signs of a third of them turned where the fold takes any sign."""
    case = CORPUS[name]
    source, generator = case.model(seed), np.random.default_rng(seed)
    for tensor in source.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and not tensor.name.endswith(("_v", "t")):
            signs = np.where(generator.random(values.shape) < 0.3, -1, 1) * 10.0 ** generator.uniform(-2, 2)
            tensor.CopyFrom(onnx.numpy_helper.from_array((values * signs).astype(np.float32), tensor.name))
    result = fold(source, verify="local", **case.options)
    assert operators(to_proto(result.model)) == case.left.split()
    assert all(proof.method == "proved" for proof in result.report.proofs.values()), result.report.verification


SCALED = [f"{table}-{name}" for table in ("taker", "padded") for name in TABLES[table]]


@pytest.mark.parametrize("name", SCALED)
def test_other_numbers_fold_as_well(name: str) -> None:
    check_other_numbers(name, zlib.crc32(name.encode()))


@pytest.mark.slow
def test_other_numbers_fold_as_well_many_times() -> None:
    for seed in range(1000, 1600):
        check_other_numbers(SCALED[seed % len(SCALED)], seed)


def test_how_sites_are_reported() -> None:
    """A lone constant that leaves, what stays in another form, and maps in a row."""
    for name, case in {**TABLES["lone"], **TABLES["leftover"], **TABLES["merged"]}.items():
        result = fold(case.model(), verify=False, **case.options)
        outcomes = [(site.outcome, site.lone) for site in result.report.sites]
        if name in TABLES["leftover"]:
            assert outcomes == [("folded" if name == "padded-arithmetic" else "restated", False)], name
        elif name in TABLES["merged"]:
            assert (outcomes, len(result.model.graph.initializer)) == ([("merged", False)], 4), name
        elif "Norm" not in case.nodes:
            assert bool(outcomes) == (not name.startswith("stays")), name
            assert name != "conv-add" or outcomes == [("folded", True)]
    assert all(len(fold(case.model(), verify=False).report.sites) == 1 for case in TABLES["unmerged"].values())
    assert fold(CORPUS["lone-conv-add"].model()).report.summary() == "no batch norms; 1 other scale or shift folded"


@pytest.mark.parametrize(("leftover", "left"), [("batch-norm", "BatchNormalization Conv"), ("conv", "Conv Conv")])
def test_an_add_in_place_of_a_batch_norm_is_only_made_on_request(leftover: str, left: str) -> None:
    result = fold(CORPUS["padded-input"].model(), verify=False, leftover=leftover)  # type: ignore[arg-type]
    assert operators(to_proto(result.model)) == left.split()
    for name in ("padded-behind-sum", "padded-behind-difference"):
        case = CORPUS[name]
        assert operators(to_proto(fold(case.model(), verify=False, leftover=leftover).model)) == case.left.split()
