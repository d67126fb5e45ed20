"""MMCVSyncBatchNorm in every form it is found in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from bnexport import verify
from bnexport.folding import fold, inspect
from bnexport.model_io import load, to_proto
from tests.support.onnx_text import assert_near, batch_norm, exact, make_inputs, model, operators_of, parameters, run

X4, Y, Y3 = "float[N,6,H,W] x", "float[N,8,A,B] y", "float[N,8,A,B] y, float[8] a, float[8] b"
CONV, INPUTS = "z = Conv (x, w)", "(z, p_m, p_v, p_s, p_b)"
VALUES = parameters({"w": (8, 6, 3, 3), "w2": (8, 8, 3, 3), **batch_norm("p", 8)})
NEUTRAL = {"p_m": np.zeros(8, np.float32), "p_v": np.ones(8, np.float32)}


def build(
    nodes: str, outs: str = Y, domain: str = "", opset: int = 17, kind: str = "float", **values: Any
) -> onnx.ModelProto:
    """MMCV stands for the operator's name with its domain."""
    text = f"g ({X4.replace('float', kind)}) => ({outs.replace('float[N', f'{kind}[N')}) {{ {nodes} }}"
    given = {name: value for name, value in {**VALUES, **values}.items() if f"{name}," in nodes or f"{name})" in nodes}
    imports = f', "{domain}": 1' if domain else ""
    name = f"{domain}.MMCVSyncBatchNorm" if domain else "MMCVSyncBatchNorm"
    return model(
        text.replace("MMCV", name), values=given, header=f'<ir_version: 8, opset_import: ["": {opset}{imports}]>'
    )


def sync(nodes: str, outs: str = Y, domain: str = "mmcv", before: str = CONV, **options: Any) -> onnx.ModelProto:
    return build(f"{before}\n {nodes}", outs, domain, **options)


NORM = "BatchNormalization <epsilon=0.001>"
PLAIN = f"{CONV}\n y = {NORM} (z, p_s, p_b, p_m, p_v)"
TWICE = "z = Conv (x, w)\n t{0} = {1}\n r = Relu (t)\n u = Conv <pads=[1,1,1,1]> (r, w2)\n y{2} = {3}"
ONES, ZEROS = {"p_s": np.ones(8, np.float32)}, {"p_b": np.zeros(8, np.float32)}
# (nodes, the same with batch norms, outputs, values, domain)
FOLDED: dict[str, tuple[str, str, str, dict[str, np.ndarray], str]] = {
    **{f"mode-{mode}-{domain}": (f"y = MMCV <eps=0.001, training_mode={mode}> {INPUTS}", PLAIN, Y, {}, domain)
        for mode in (0, 1) for domain in ("mmcv", "", "custom.ops")},
    "a-group": (f'y = MMCV <eps=0.001, group="pod7", group_size=8, stats_mode="N", momentum=0.3> {INPUTS}', PLAIN, Y, {}, "mmcv"),
    "a-group-that-is-an-int": (f"y = MMCV <eps=0.001, group=7, group_size=8> {INPUTS}", PLAIN, Y, {}, "mmcv"),
    "no-weight": ("y = MMCV <eps=0.001> (z, p_m, p_v, , p_b)", PLAIN, Y, ONES, "mmcv"),
    "no-bias": ("y = MMCV <eps=0.001> (z, p_m, p_v, p_s)", PLAIN, Y, ZEROS, "mmcv"),
    "neither": ("y = MMCV <eps=0.001> (z, p_m, p_v)", PLAIN, Y, ONES | ZEROS, "mmcv"),
    "empty-names": ("y = MMCV <eps=0.001> (z, p_m, p_v, , )", PLAIN, Y, ONES | ZEROS, "mmcv"),
    # Updated statistics are the old ones.
    "updated": (f"y, a, b = MMCV <eps=0.001> {INPUTS}", f"{PLAIN} a = Identity (p_m) b = Identity (p_v)", Y3, {}, "mmcv"),
    # Neutral statistics are those of a module without any, unless something updates them or nothing trains.
    "neutral-and-updated": (f"y, a, b = MMCV <eps=0.001> {INPUTS}", f"{PLAIN} a = Identity (p_m) b = Identity (p_v)", Y3, NEUTRAL,
        "mmcv"),
    "neutral-in-inference": (f"y = MMCV <eps=0.001, training_mode=0> {INPUTS}", PLAIN, Y, NEUTRAL, "mmcv"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDED)
def test_folded(name: str) -> None:
    nodes, plain, outs, values, domain = FOLDED[name]
    proto, reference = sync(nodes, outs, domain, **values), build(plain, outs, **values)
    result = fold(proto)
    folded = to_proto(result.model)
    onnx.checker.check_model(folded)
    assert [each for each in operators_of(result) if each != "Identity"] == ["Conv"]
    assert result.report.sites[0].op_type == "MMCVSyncBatchNorm"
    assert "mmcv" not in {item.domain for item in folded.opset_import}
    trains = "training_mode=0" not in nodes
    assert (result.report.verification.passed, result.report.meaning_changed) == (True, trains)
    assert result.report.verification.reference == "converted" or not trains
    inputs = make_inputs(reference)
    for got, expected in zip(run(folded, inputs), exact(reference, inputs), strict=True):
        assert_near(got, expected)
    # The public comparison knows what folding a training graph means.
    assert verify(proto, result.model).passed


def test_module_used_twice_reads_its_old_values() -> None:
    first, second = (f"MMCV <eps=0.001> {inputs}" for inputs in (INPUTS, "(u, m1, v1, p_s, p_b)"))
    result = fold(build(TWICE.format(", m1, v1", first, ", a, b", second), Y3, "mmcv"))
    norm = [f"{NORM} ({value}, p_s, p_b, p_m, p_v)" for value in "zu"]
    plain = build(TWICE.format("", norm[0], "", norm[1]))
    y, mean, var = run(result.model, make_inputs(plain))
    assert_near(y, exact(plain, make_inputs(plain))[0])
    np.testing.assert_array_equal([mean, var], [VALUES["p_m"], VALUES["p_v"]])
    assert result.report.after.batch_norm == result.report.after.sync_batch_norm == 0


def test_a_function_may_define_it_in_the_standard_domain() -> None:
    proto = sync(f"y = MMCV <training_mode=0> {INPUTS}", domain="")
    text = '<opset_import: ["": 17], domain: ""> MMCVSyncBatchNorm (x, m, v, s, b) => (y) { y = BatchNormalization (x, s, b, m, v) }'
    proto.functions.append(onnx.parser.parse_function(text))
    assert operators_of(fold(proto)) == ["Conv"]


def test_it_is_selected_by_its_name_and_trains_by_default() -> None:
    proto, name = sync(f"y = MMCV {INPUTS}"), "MMCVSyncBatchNorm -> y"
    assert operators_of(fold(proto, only=[name])) == ["Conv"]
    kept = fold(proto, skip=[name])
    assert (operators_of(kept), kept.report.notes) == (["Conv", "BatchNormalization"], ())
    assert fold(proto).report.meaning_changed


def test_verify_converts_what_no_engine_has() -> None:
    proto, wrong = (
        sync(f"y = MMCV <eps={eps}, training_mode=0> {INPUTS}", domain="custom.ops") for eps in (0.001, 0.5)
    )
    result = verify(proto, build(PLAIN))
    assert (result.status, result.reference) == ("passed", "converted")
    assert verify(proto, proto).status == "not_verified"
    assert verify(wrong, build(PLAIN)).status == "failed"


@pytest.mark.parametrize(
    ("node", "outs", "code", "values"),
    [
        ("y = MMCV (z, , , p_s, p_b)", Y, "no-statistics", {}),
        ("y = MMCV (z, p_m, , p_s, p_b)", Y, "no-statistics", {}),
        ("y = MMCV (z, , p_v, p_s, p_b)", Y, "no-statistics", {}),
        ("y = MMCV (, p_m, p_v, p_s, p_b)", Y, "bad-node", {}),
        (f"y, , , k = MMCV {INPUTS}", f"{Y}, float[8] k", "statistics-used", {}),
        (f'y = MMCV <eps="small"> {INPUTS}', Y, "bad-attribute", {}),
        # A module without statistics, written with the neutral ones that its portable body needs.
        (f"y = MMCV <training_mode=1> {INPUTS}", Y, "no-statistics", NEUTRAL),
    ],
)
def test_refused_nodes_stay(node: str, outs: str, code: str, values: dict[str, np.ndarray]) -> None:
    result = fold(sync(node, outs, **values), verify=False)
    assert [refusal.code for refusal in result.report.sites[0].refusals] == [code]
    assert (result.report.after.sync_batch_norm, result.report.changed) == (1, False)
    assert operators_of(result) == ["Conv", "MMCVSyncBatchNorm"]


def test_converted_but_not_folded_is_reported() -> None:
    result = fold(sync(f"y = MMCV <eps=0.001> {INPUTS}", before="t = Conv (x, w)\n z = Relu (t)"))
    assert operators_of(result) == ["Conv", "Relu", "BatchNormalization"]
    (site,) = result.report.sites
    assert (site.outcome, bool(site.reason)) == ("converted", True)


BODY = """<domain: "mmcv", opset_import: ["": 17]>
MMCVSyncBatchNorm <eps, momentum, group, group_size, training_mode, stats_mode> (x, m, v, s, b) => (y, nm, nv, sm, si) {
    y = BatchNormalization <epsilon=0.001> (x, s, b, m, v)
    nm = Identity (m) nv = Identity (v) sm = Identity (m) si = Identity (v) }"""


def with_body(mode: int) -> onnx.ModelProto:
    attributes = f'eps=0.001, momentum=0.1, group="", group_size=1, training_mode={mode}, stats_mode="exact"'
    proto = sync(f"y, , , , s = MMCV <{attributes}> {INPUTS}")
    proto.functions.append(onnx.parser.parse_function(BODY))
    return proto


@pytest.mark.parametrize(("mode", "reference"), [(0, "original"), (1, "converted")])
def test_portable_body_leaves_with_its_last_node(mode: int, reference: str) -> None:
    """In inference the original itself is the reference: its body runs anywhere."""
    result = fold(with_body(mode))
    assert (operators_of(result), len(result.model.functions)) == (["Conv"], 0)
    assert (result.report.verification.status, result.report.verification.reference) == ("passed", reference)


def test_without_standard_operators(tmp_path: Path) -> None:
    """A graph without nodes may import nothing but our domain; without it the file would not load again."""
    header, names = '<ir_version: 8, opset_import: ["mmcv": 1]>', "mvwb"
    body = (
        f"g (float[N,4] x) => (float[N,4] y) {{ y = mmcv.MMCVSyncBatchNorm <training_mode=0> (x, {', '.join(names)}) }}"
    )
    (site,) = fold(model(body, dict.fromkeys(names, (4,)), header=header), verify=False).report.sites
    assert (site.outcome, [refusal.code for refusal in site.refusals]) == ("kept", ["opset"])
    fold(onnx.parser.parse_model(f"{header} g () => () {{ }}"), tmp_path / "out.onnx")
    assert load(tmp_path / "out.onnx").opset_imports == {"mmcv": 1}


def test_inspect_describes_the_nodes() -> None:
    report = inspect(with_body(1))
    (info,) = report.batch_norms
    assert (info.op_type, info.domain, info.channels) == ("MMCVSyncBatchNorm", "mmcv", 8)
    assert info.attributes["eps"] == pytest.approx(0.001)
    assert (report.groups, report.functions) == ((("", 1),), ("mmcv:MMCVSyncBatchNorm",))
    assert report.op_counts == {"Conv": 1, "mmcv:MMCVSyncBatchNorm": 1}
    assert inspect(sync(f"y = MMCV <group=7, group_size=2> {INPUTS}")).groups == (("7", 2),)


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize(("before", "folds"), [(CONV, True), ("t = Conv (x, w)\n z = Relu (t)", False)])
def test_half_data_with_float_statistics(opset: int, before: str, folds: bool) -> None:
    node, half = f"y = MMCV <eps=0.001, training_mode=0> {INPUTS}", VALUES["w"].astype(np.float16)
    report = fold(sync(node, before=before, opset=opset, kind="float16", w=half)).report
    assert (report.verification.status, bool(report.folded)) == ("passed", folds)
