"""Forged fold reports: refused or "failed", never "proved"."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from bnexport.errors import UsageError
from bnexport.folding import fold, verify
from bnexport.model_io import to_proto
from bnexport.verification.verdict import Verification
from tests.support.onnx_text import batch_norm, model
from tests.support.work import counted

BODY = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {
    a = Conv <pads=[1,1,1,1]> (x, u)
    r = Relu (a)
    z = Conv (r, w)
    n = BatchNormalization (z, p_s, p_b, p_m, p_v)
    s = Sigmoid (n)
    y = Conv (s, v)
}"""
SHAPES = {"u": (6, 6, 3, 3), "w": (8, 6, 3, 3), "v": (8, 8, 1, 1), **batch_norm("p", 8)}
# As a report names them: by the operator and its first output.
NAMES = ["Conv -> a", "Relu -> r", "Conv -> z", "BatchNormalization -> n", "Sigmoid -> s", "Conv -> y"]

Folded = tuple[onnx.ModelProto, onnx.ModelProto, dict[str, Any]]


@pytest.fixture
def folded() -> Folded:
    source = model(BODY, SHAPES)
    result = fold(source, verify=False)
    report = json.loads(json.dumps(result.to_dict()))
    assert verify(source, to_proto(result.model), report=report).passed
    return source, to_proto(result.model), report


def changed(proto: onnx.ModelProto, name: str, by: float = 1e-3) -> onnx.ModelProto:
    """One number of one initializer."""
    wrong = copy.deepcopy(proto)
    tensor = next(each for each in wrong.graph.initializer if each.name == name)
    array = onnx.numpy_helper.to_array(tensor).copy()
    array.reshape(-1)[0] += np.float32(by)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))
    return wrong


def names_of(report: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The report with another region of its only site."""
    forged = copy.deepcopy(report)
    (site,) = forged["sites"]
    site["region"] = names
    return forged


def proves(verdict: Verification) -> bool:
    """The verdict, or a mark, says more than it may of a wrong model."""
    return verdict.passed or any(proof.method == "proved" for proof in verdict.sites)


class TestRegion:
    def test_too_small(self, folded: Folded) -> None:
        source, result, report = folded
        for names in ([], NAMES[2:3], NAMES[3:4], NAMES[:1], NAMES[5:]):
            verdict = verify(source, result, report=names_of(report, names))
            # Without a region the nodes of the site stand for it.
            assert verdict.status == ("passed" if set(NAMES[2:4]) <= set(names) else "failed"), names

    @pytest.mark.parametrize("names", [NAMES, NAMES[:4], NAMES[2:]], ids=len)
    @pytest.mark.parametrize("tensor", ["u", "v"])
    def test_too_large_hides_nothing(self, folded: Folded, names: list[str], tensor: str) -> None:
        """A weight outside the fold, which the forged region takes in."""
        source, result, report = folded
        assert not proves(verify(source, changed(result, tensor), report=names_of(report, names)))

    def test_a_whole_network_as_one_region(self, folded: Folded) -> None:
        """Even a right fold is not proved where no lemma covers the region."""
        source, result, report = folded
        assert not proves(verify(source, result, report=names_of(report, NAMES)))

    def test_a_region_that_is_too_large_to_prove(self) -> None:
        """Eight random directions are no proof, and the mark says so."""
        shapes = {"u": (64, 64, 3, 3), "w": (64, 64, 3, 3), **batch_norm("p", 64)}
        body = """g (float[N,64,H,W] x) => (float[N,64,A,B] y) {
            a = Conv (x, u)
            z = Conv (a, w)
            y = BatchNormalization (z, p_s, p_b, p_m, p_v) }"""
        source = model(body, shapes)
        result = fold(source, verify=False)
        report = json.loads(json.dumps(result.to_dict()))
        (site,) = report["sites"]
        site["region"] = ["Conv -> a", *site["region"]]
        made = to_proto(result.model)
        assert [proof.method for proof in verify(source, made, report=report).sites] == ["proved"]
        # A scale that one layer has and the next one takes back: no value inside the region is equal.
        for tensor in made.graph.initializer:
            if tensor.name in ("u", "w"):
                array = onnx.numpy_helper.to_array(tensor) * np.float32(2.0 if tensor.name == "u" else 0.5)
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        verdict = verify(source, made, report=report)
        assert [proof.method for proof in verdict.sites] == ["compared"]
        assert not verify(source, changed(made, "u", 1.0), report=report).passed

    def test_regions_that_overlap(self, folded: Folded) -> None:
        source, result, report = folded
        forged = copy.deepcopy(report)
        forged["sites"] = [*(names_of(report, NAMES[i : i + 3])["sites"][0] for i in range(4))]
        assert not proves(verify(source, changed(result, "u"), report=forged))
        assert not proves(verify(source, changed(result, "v"), report=forged))

    @pytest.mark.parametrize("graph", ["function f", "main", "", "node If -> y then_branch"])
    def test_another_graph(self, folded: Folded, graph: str) -> None:
        source, result, report = folded
        report["sites"][0]["graph"] = graph
        verdict = verify(source, result, report=report)
        assert verdict.status == "failed"
        assert "which is no node of the original's" in verdict.reason

    @pytest.mark.parametrize("name", ["no such node", "", "\x1b]0;owned\x07", "x" * 100_000, "Conv -> Z"])
    def test_missing_nodes(self, folded: Folded, name: str) -> None:
        source, result, report = folded
        verdict = verify(source, result, report=names_of(report, [*NAMES[2:4], name]))
        assert not proves(verdict)
        assert "\x1b" not in verdict.reason
        assert len(verdict.reason) < 1000


class TestSite:
    @pytest.mark.parametrize("outcome", ["kept", "converted", "proved", ""])
    def test_another_outcome(self, folded: Folded, outcome: str) -> None:
        """What is not claimed to be folded must be the same."""
        source, result, report = folded
        report["sites"][0]["outcome"] = outcome
        assert verify(source, result, report=report).status == "failed"

    def test_no_sites(self, folded: Folded) -> None:
        source, result, report = folded
        assert verify(source, result, report={**report, "sites": []}).status == "failed"

    def test_marks_in_the_report_are_not_believed(self, folded: Folded) -> None:
        source, result, report = folded
        done = verify(source, result, report=report)
        forged = {**report, "verification": json.loads(json.dumps(done.to_dict()))}
        assert not proves(verify(source, changed(result, "v"), report=forged))

    def test_training_that_is_claimed(self) -> None:
        """A training batch norm that became inference is held against the converted model, and the verdict says so."""
        body = BODY.replace("BatchNormalization (z", "BatchNormalization <training_mode=1> (z")
        source = model(body, SHAPES)
        result = fold(source, verify=False, training_to_inference=True)
        report = json.loads(json.dumps(result.to_dict()))
        verdict = verify(source, result.model, report=report)
        assert (verdict.status, verdict.reference) == ("passed", "converted")
        for site in report["sites"]:
            site["training"] = False
        assert verify(source, result.model, report=report).status == "failed"


class TestFiles:
    def test_another_source(self, folded: Folded) -> None:
        source, result, report = folded
        for name in ("u", "w", "p_s", "p_v", "v"):
            assert verify(changed(source, name), result, report=report).status == "failed", name

    def test_a_report_of_another_model(self, folded: Folded) -> None:
        source, _, report = folded
        other = model("g (float[N,4] x) => (float[N,4] y) { y = Relu (x) }")
        assert not proves(verify(source, other, report=report))
        assert not proves(verify(other, other, report=report))

    def test_files_in_the_wrong_order(self, folded: Folded) -> None:
        source, result, report = folded
        assert not proves(verify(result, source, report=report))

    def test_a_tensor_that_nothing_reads(self, folded: Folded) -> None:
        """It changes no output, and is not the original's."""
        source, result, report = folded
        source.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "idle"))
        for value in (1.0, 2.0):
            other = copy.deepcopy(result)
            other.graph.initializer.append(onnx.numpy_helper.from_array(np.full(3, value, np.float32), "idle"))
            assert verify(source, other, report=report).passed == (value == 1.0)
        result.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "more"))
        assert verify(source, result, report=report).status == "failed"

    def test_an_input_more(self, folded: Folded) -> None:
        source, result, report = folded
        result.graph.input.append(onnx.helper.make_tensor_value_info("more", 1, [1]))
        assert verify(source, result, report=report).status == "failed"


def test_many_sites_take_no_time(folded: Folded) -> None:
    source, result, report = folded
    forged = {**report, "sites": [report["sites"][0]] * 50_000}
    work, _ = counted(lambda: verify(source, changed(result, "v"), report=forged))
    assert work < 100 * 50_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "nul",
        "{" * 100_000,
        "[" * 100_000,
        '{"sites": ' + "[" * 50_000,
        '{"sites": [NaN]}',
        "\xff\xfe",
        "\x00",
    ],
    ids=range(9),
)
def test_files_that_are_no_report(folded: Folded, text: str, tmp_path: Path) -> None:
    source, result, _ = folded
    (tmp_path / "fold.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="report"):
        verify(source, result, report=tmp_path / "fold.json")


def test_a_file_without_an_end(folded: Folded, tmp_path: Path) -> None:
    source, result, _ = folded
    with open(tmp_path / "fold.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(UsageError, match="more than"):
        verify(source, result, report=tmp_path / "fold.json")
    with pytest.raises(UsageError, match="report"):
        verify(source, result, report="/dev/zero")


@pytest.mark.parametrize(
    "huge",
    [
        "huge = ConstantOfShape (size)",
        "k = Constant <value_float = 1.0> ()\n huge = Expand (k, size)",
        "k = Constant <value_floats = [1.0, 2.0]> ()\n l = Unsqueeze (k, zero)\n huge = Tile (l, size)",
        "a = Constant <value_float = 0.0> ()\n b = Constant <value_float = 1e12> ()\n c = Constant <value_float = 1.0> ()\n"
        " huge = Range (a, b, c)",
    ],
    ids=["constant-of-shape", "expand", "tile", "range"],
)
def test_constants_that_are_too_large_to_evaluate(huge: str) -> None:
    """A terabyte is neither made nor needed: the two models cannot be compared."""
    body = f"""g (float[N,4,H,W] x) => (float[N,4,H,W] y) {{
        size = Constant <value_ints = [1048576, 1048576]> ()
        zero = Constant <value_ints = [0]> ()
        {huge}
        one = ReduceMax <keepdims = 0> (huge)
        y = Mul (x, one) }}"""
    source = model(body)
    other = model("g (float[N,4,H,W] x) => (float[N,4,H,W] y) { k = Constant <value_float = 1.0> ()\n y = Mul (x, k) }")
    verdict = verify(source, other, method="local")
    assert verdict.status == "not_verified"
    assert verify(source, source, method="local").passed
