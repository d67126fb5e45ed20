"""MMCVSyncBatchNorm in every form it is found in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest

from bnexport import verify
from bnexport.folding import FoldResult, fold, inspect
from bnexport.model_io import load, to_proto
from tests.support.onnx_text import assert_near, batch_norm, exact, make_inputs, model, operators, parameters, run

X4 = "float[N,6,H,W] x"
SHAPES = {"w": (8, 6, 3, 3), **batch_norm("p", 8)}
PLAIN = model(
    f"g ({X4}) => (float[N,8,A,B] y) {{ z = Conv (x, w)\n y = BatchNormalization <epsilon=0.001> (z, p_s, p_b, p_m, p_v) }}",
    SHAPES,
)


def sync(
    node: str,
    *,
    outputs: str = "float[N,8,A,B] y",
    domain: str = "mmcv",
    before: str = "z = Conv (x, w)",
    **options: object,
) -> onnx.ModelProto:
    imports = f'"": 17, "{domain}": 1' if domain else '"": 17'
    header = f"<ir_version: 8, opset_import: [{imports}]>"
    prefix = f"{domain}." if domain else ""
    body = f"g ({X4}) => ({outputs}) {{ {before}\n {node.replace('MMCV', prefix + 'MMCV')} }}"
    return model(body, options.pop("shapes", SHAPES), header=header, **options)  # type: ignore[arg-type]


def folded_output(proto: onnx.ModelProto) -> tuple[FoldResult, list[np.ndarray]]:
    result = fold(proto)
    folded = to_proto(result.model)
    onnx.checker.check_model(folded)
    return result, run(folded, make_inputs(PLAIN))


@pytest.mark.parametrize("domain", ["mmcv", "", "custom.ops"])
@pytest.mark.parametrize("mode", [0, 1])
def test_any_domain_any_mode(domain: str, mode: int) -> None:
    proto = sync(f"y = MMCVSyncBatchNorm <eps=0.001, training_mode={mode}> (z, p_m, p_v, p_s, p_b)", domain=domain)
    result, outputs = folded_output(proto)
    assert operators(to_proto(result.model)) == ["Conv"]
    assert_near(outputs[0], exact(PLAIN, make_inputs(PLAIN))[0])
    assert result.report.meaning_changed == bool(mode)
    assert result.report.sites[0].op_type == "MMCVSyncBatchNorm"
    assert "mmcv" not in {item.domain for item in to_proto(result.model).opset_import}


def test_a_function_may_define_it_in_the_standard_domain() -> None:
    proto = sync("y = MMCVSyncBatchNorm <training_mode=0> (z, p_m, p_v, p_s, p_b)", domain="")
    names, opsets = ["x", "m", "v", "s", "b"], [onnx.helper.make_opsetid("", 17)]
    body = [onnx.helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"])]
    proto.functions.append(onnx.helper.make_function("", "MMCVSyncBatchNorm", names, ["y"], body, opsets))
    assert operators(to_proto(fold(proto).model)) == ["Conv"]


def test_it_is_selected_by_its_name() -> None:
    proto = sync("y = MMCVSyncBatchNorm (z, p_m, p_v, p_s, p_b)")
    name = "MMCVSyncBatchNorm -> y"
    assert operators(to_proto(fold(proto, only=[name]).model)) == ["Conv"]
    assert operators(to_proto(fold(proto, skip=[name]).model)) == ["Conv", "BatchNormalization"]


def test_training_is_the_default_mode() -> None:
    result, _ = folded_output(sync("y = MMCVSyncBatchNorm (z, p_m, p_v, p_s, p_b)"))
    assert result.report.meaning_changed


def test_verify_converts_what_no_engine_has() -> None:
    proto = sync("y = MMCVSyncBatchNorm <eps=0.001, training_mode=0> (z, p_m, p_v, p_s, p_b)", domain="custom.ops")
    result = verify(proto, PLAIN)
    assert (result.status, result.reference) == ("passed", "converted")
    assert verify(proto, proto).status == "not_verified"
    wrong = sync("y = MMCVSyncBatchNorm <eps=0.5, training_mode=0> (z, p_m, p_v, p_s, p_b)", domain="custom.ops")
    assert verify(wrong, PLAIN).status == "failed"


@pytest.mark.parametrize("group", ['"pod7"', "7"], ids=["a-name", "mmcv-writes-an-int"])
def test_groups_and_modes_do_not_concern_the_folder(group: str) -> None:
    node = f'y = MMCVSyncBatchNorm <eps=0.001, group={group}, group_size=8, stats_mode="N", momentum=0.3> (z, p_m, p_v, p_s, p_b)'
    result, outputs = folded_output(sync(node))
    assert result.report.folded
    assert_near(outputs[0], exact(PLAIN, make_inputs(PLAIN))[0])


@pytest.mark.parametrize("absent", ["weight", "bias", "both", "empty-names"])
def test_absent_parameters(absent: str) -> None:
    inputs = {
        "weight": "z, p_m, p_v, , p_b",
        "bias": "z, p_m, p_v, p_s",
        "both": "z, p_m, p_v",
        "empty-names": "z, p_m, p_v, , ",
    }[absent]
    values = parameters(SHAPES)
    values["p_s"] = np.ones_like(values["p_s"]) if absent != "bias" else values["p_s"]
    values["p_b"] = np.zeros_like(values["p_b"]) if absent != "weight" else values["p_b"]
    body = f"g ({X4}) => (float[N,8,A,B] y) {{ z = Conv (x, w)\n y = BatchNormalization <epsilon=0.001> (z, p_s, p_b, p_m, p_v) }}"
    result, outputs = folded_output(sync(f"y = MMCVSyncBatchNorm <eps=0.001> ({inputs})", shapes={}, values=values))
    assert result.report.folded
    assert_near(outputs[0], exact(model(body, values=values), make_inputs(PLAIN))[0])


def test_updated_statistics_return_the_old_ones() -> None:
    outputs = "float[N,8,A,B] y, float[8] p_m_new, float[8] p_v_new"
    proto = sync("y, p_m_new, p_v_new = MMCVSyncBatchNorm <eps=0.001> (z, p_m, p_v, p_s, p_b)", outputs=outputs)
    result, values = folded_output(proto)
    stored = parameters(SHAPES)
    np.testing.assert_array_equal(values[1], stored["p_m"])
    np.testing.assert_array_equal(values[2], stored["p_v"])
    assert result.report.meaning_changed
    assert result.report.verification is not None
    assert result.report.verification.passed
    assert result.report.verification.reference == "converted"
    # The public comparison knows what folding a training graph means.
    assert verify(proto, result.model).passed


def test_module_used_twice_reads_its_old_values() -> None:
    nodes = """t, m1, v1 = MMCVSyncBatchNorm <eps=0.001> (z, p_m, p_v, p_s, p_b)
        r = Relu (t)
        u = Conv <pads=[1,1,1,1]> (r, w2)
        y, p_m_new, p_v_new = MMCVSyncBatchNorm <eps=0.001> (u, m1, v1, p_s, p_b)"""
    outputs = "float[N,8,A,B] y, float[8] p_m_new, float[8] p_v_new"
    shapes = {**SHAPES, "w2": (8, 8, 3, 3)}
    result = fold(sync(nodes, outputs=outputs, shapes=shapes))
    plain = model(
        f"""g ({X4}) => (float[N,8,A,B] y) {{ z = Conv (x, w)
        t = BatchNormalization <epsilon=0.001> (z, p_s, p_b, p_m, p_v)
        r = Relu (t)
        u = Conv <pads=[1,1,1,1]> (r, w2)
        y = BatchNormalization <epsilon=0.001> (u, p_s, p_b, p_m, p_v) }}""",
        shapes,
    )
    y, mean, var = run(to_proto(result.model), make_inputs(plain))
    assert_near(y, exact(plain, make_inputs(plain))[0])
    np.testing.assert_array_equal(mean, parameters(shapes)["p_m"])
    np.testing.assert_array_equal(var, parameters(shapes)["p_v"])
    assert result.report.after.batch_norm == result.report.after.sync_batch_norm == 0


REFUSED = {
    "no-statistics": ("y = MMCVSyncBatchNorm (z, , , p_s, p_b)", "float[N,8,A,B] y", "no-statistics"),
    "one-statistic": ("y = MMCVSyncBatchNorm (z, p_m, , p_s, p_b)", "float[N,8,A,B] y", "no-statistics"),
    "saved-mean": ("y, , , k, = MMCVSyncBatchNorm (z, p_m, p_v, p_s, p_b)", "float[N,8,A,B] y, float[8] k",
        "statistics-used"),
    "wrong-attribute-type": ('y = MMCVSyncBatchNorm <eps="small"> (z, p_m, p_v, p_s, p_b)', "float[N,8,A,B] y",
        "bad-attribute"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_nodes_stay(case: str) -> None:
    node, outputs, code = REFUSED[case]
    result = fold(sync(node.replace(", =", " ="), outputs=outputs), verify=False)
    assert [refusal.code for refusal in result.report.sites[0].refusals] == [code]
    assert result.report.after.sync_batch_norm == 1
    assert not result.report.changed
    assert operators(to_proto(result.model)) == ["Conv", "MMCVSyncBatchNorm"]


def test_neutral_statistics_that_nothing_updates() -> None:
    """A module without statistics, written with the neutral ones that its portable body needs."""
    values = {"p_m": np.zeros(8, np.float32), "p_v": np.ones(8, np.float32)}
    shapes = {name: shape for name, shape in SHAPES.items() if name not in values}
    node = "MMCVSyncBatchNorm <training_mode={mode}> (z, p_m, p_v, p_s, p_b)"
    untracked = fold(sync("y = " + node.format(mode=1), shapes=shapes, values=values), verify=False)
    assert [refusal.code for refusal in untracked.report.sites[0].refusals] == ["no-statistics"]
    outputs = "float[N,8,A,B] y, float[8] a, float[8] b"
    tracked = fold(sync("y, a, b = " + node.format(mode=1), outputs=outputs, shapes=shapes, values=values))
    inference = fold(sync("y = " + node.format(mode=0), shapes=shapes, values=values))
    assert tracked.report.folded
    assert inference.report.folded


def test_converted_but_not_folded_is_reported() -> None:
    proto = sync("y = MMCVSyncBatchNorm <eps=0.001> (z, p_m, p_v, p_s, p_b)", before="t = Conv (x, w)\n z = Relu (t)")
    result, _ = folded_output(proto)
    assert operators(to_proto(result.model)) == ["Conv", "Relu", "BatchNormalization"]
    assert [site.outcome for site in result.report.sites] == ["converted"]
    assert result.report.sites[0].reason


BODY = """
<domain: "mmcv", opset_import: ["": 17]>
MMCVSyncBatchNorm <eps, momentum, group, group_size, training_mode, stats_mode> (x, m, v, s, b) => (y, nm, nv, sm, si)
{
    y = BatchNormalization <epsilon=0.001> (x, s, b, m, v)
    nm = Identity (m)
    nv = Identity (v)
    sm = Identity (m)
    si = Identity (v)
}
"""


def with_body(mode: int) -> onnx.ModelProto:
    attributes = f'eps=0.001, momentum=0.1, group="", group_size=1, training_mode={mode}, stats_mode="exact"'
    proto = sync(f"y, , , , = MMCVSyncBatchNorm <{attributes}> (z, p_m, p_v, p_s, p_b)".replace(", =", ", s ="))
    proto.functions.append(onnx.parser.parse_function(BODY))
    return proto


@pytest.mark.parametrize("mode", [0, 1])
def test_portable_body_leaves_with_its_last_node(mode: int) -> None:
    result = fold(with_body(mode))
    folded = to_proto(result.model)
    assert not folded.functions
    assert operators(folded) == ["Conv"]
    assert result.report.verification is not None
    assert result.report.verification.passed
    # In inference the original itself is the reference: its body runs anywhere.
    assert result.report.verification.reference == ("converted" if mode else "original")


def test_a_model_without_standard_operators_is_left_alone() -> None:
    names = ("m", "v", "w", "b")
    proto = model(
        f"g (float[N,4] x) => (float[N,4] y) {{ y = mmcv.MMCVSyncBatchNorm <training_mode=0> (x, {', '.join(names)}) }}",
        {**dict.fromkeys(names, (4,))},
        header='<ir_version: 8, opset_import: ["mmcv": 1]>',
    )
    (site,) = fold(proto, verify=False).report.sites
    assert (site.outcome, [refusal.code for refusal in site.refusals]) == ("kept", ["opset"])


def test_the_last_import_stays(tmp_path: Path) -> None:
    """A graph without nodes may import nothing but our domain; without it the file would not load again."""
    proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["mmcv": 1]> g () => () { }')
    fold(proto, tmp_path / "out.onnx")
    assert load(tmp_path / "out.onnx").opset_imports == {"mmcv": 1}


def test_inspect_describes_the_nodes() -> None:
    report = inspect(with_body(1))
    info = report.batch_norms[0]
    assert (info.op_type, info.domain, info.channels) == ("MMCVSyncBatchNorm", "mmcv", 8)
    assert info.attributes["eps"] == pytest.approx(0.001)
    assert report.groups == (("", 1),)
    assert report.functions == ("mmcv:MMCVSyncBatchNorm",)
    assert report.op_counts == {"Conv": 1, "mmcv:MMCVSyncBatchNorm": 1}


def test_inspect_lists_a_group_that_is_an_int() -> None:
    node = "y = MMCVSyncBatchNorm <group=7, group_size=2> (z, p_m, p_v, p_s, p_b)"
    assert inspect(sync(node)).groups == (("7", 2),)


def test_half_data_with_float_statistics() -> None:
    values = parameters(SHAPES)
    values["w"] = values["w"].astype(np.float16)
    for opset in (13, 17):
        header = f'<ir_version: 8, opset_import: ["": {opset}, "mmcv": 1]>'
        for before in ("z = Conv (x, w)", "t = Conv (x, w)\n z = Relu (t)"):
            node = "y = mmcv.MMCVSyncBatchNorm <eps=0.001, training_mode=0> (z, p_m, p_v, p_s, p_b)"
            body = f"g (float16[N,6,H,W] x) => (float16[N,8,A,B] y) {{ {before}\n {node} }}"
            result = fold(model(body, values=values, header=header))
            assert result.report.verification is not None
            assert result.report.verification.passed, (opset, before, result.report.verification)
            assert bool(result.report.folded) == ("Relu" not in before)
