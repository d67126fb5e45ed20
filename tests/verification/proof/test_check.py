"""Folds that are proved, and those that are not: by what their report claims, and from the two models alone."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bnexport import verify
from bnexport.errors import UnsupportedModelError, VerificationError
from bnexport.folding import fold
from bnexport.folding.report import FoldReport
from bnexport.model_io import to_proto
from bnexport.verification.proof.numbering import check_node, is_default
from bnexport.verification.proof.relations import Unrelated, require_ones
from tests.miscompilations.mistake import affine
from tests.support.claims import outcome, prove_claims
from tests.support.onnx_text import array_of, model, parameters, with_arrays

CHAIN = "g (float[N,6,H,W] x) => (float[N,8,A,B] y) { z = Conv (x, w:8.6.3.3) y = Norm (z, p:8) }"
# A residual sum whose batch norm goes apart: its scale through the Relu and the padded Conv, its shift into the sum.
APART = """g (float[N,4,H,W] x) => (float[N,6,A,B] y) {
    a = Conv <pads=[1,1,1,1]> (x, w:4.4.3.3) s = Add (a, x) n = Norm (s, p+:4) r = Relu (n)
    c = Conv <pads=[1,1,1,1]> (r, u:6.4.3.3) y = Norm (c, q:6) }"""
# Two residual blocks: a batch norm next to a Conv is merged into it, and the sum with the shortcut is written anew.
BLOCK = """n{0} = Conv <pads=[1,1,1,1]> (r{0}, w:4.4.3.3) c{0} = Conv (n{0}, u:4.4.1.1) m{0} = Norm (c{0}, p:4)
    f{0} = Norm (n{0}, q:4) g{0} = Add (m{0}, f{0}) s{0} = Add (g{0}, {1})"""
MERGED = f"""g (float[N,4,H,W] x) => (float[N,6,A,B] y) {{ h = Conv (x, w) s0 = Norm (h, p) r1 = Relu (s0)
    {BLOCK.format(1, "s0")} r2 = Relu (s1) {BLOCK.format(2, "s1")} t = Conv (s2, v:6.4.1.1) y = Norm (t, t:6) }}"""
MAKES_BIAS = """k = Constant <value_ints = [8]> () p_b = ConstantOfShape <value = float[1] {0.5}> (k)
    z = Conv (x, w:8.6.3.3) y = BatchNormalization (z, p_s:8, p_b, p_m:8, p_v:8)"""
SIDE_BY_SIDE = """g (float[N,4,H,W] a, float[N,4,H,W] b) => (float[N,8,A,B] y) { z = Norm (a, p:4) u = Norm (b, p)
    t = Concat <axis = 1> (z, u) y = Conv (t, w:8.8.3.3) }"""
ADDS_ZERO = """g (float[N,3,8,8] x) => (float[N,4,8,8] y) { c = Conv <pads=[1,1,1,1]> (x, a:4.3.3.3) n = Norm (c, p:4)
    d = Conv (x, b:4.3.1.1) m = Norm (d, q:4) s = Add (n, m) zero = Constant <value_float = 0.0> () t = Add (s, zero) y = Relu (t) }"""
POSITIVE = {"p_s": np.array([0.5, 1.0, 2.0, 3.0], np.float32)}


def behind(form: str, first: str = "Conv (x, w)", declared: str = "N,4,S", **options: Any) -> onnx.ModelProto:
    """An operator that makes z, `form` of z, a batch norm."""
    text = f"g (float[{declared}] x) => (float[] y) {{ z = {first} r = {form} y = Norm (r, p:4) }}"
    return model(text, {"w": (4, 4, 1)}, **options)


def far(ratio: float) -> onnx.ModelProto:
    """Whole models decide nothing here: the reference's own rounding errors are as large as its outputs."""
    return model(CHAIN, values={"p_m": np.full(8, ratio, np.float32), "p_v": np.ones(8, np.float32)})


PROVED = {
    "apart": model(APART),
    "chain": model(CHAIN),
    "a mean of a thousand deviations": far(1e3),
    "a mean of 10^5 deviations": far(1e5),
    "behind a merged sum": model(MERGED),
    "a bias that a node makes in float32": model(f"g (float[N,6,H,W] x) => (float[N,8,A,B] y) {{ {MAKES_BIAS} }}"),
    "equal maps side by side": model(SIDE_BY_SIDE),
    "a Relu of a sum with 0": model(ADDS_ZERO),
    # onnx.reference takes it over the channels, and rounds the weights of Resize so that they do not sum to 1.
    "a global maximum of rank 3": behind("GlobalMaxPool (z)", values=POSITIVE),
    "cubic weights": behind(
        'Resize <mode="cubic"> (z, , , s)', declared="2,4,7", opset=13, values={"s": np.array([2, 4, 10])}
    ),
    "an operator of an old opset": behind("Upsample <scales=[1.0, 1.0, 2.0]> (z)", opset=7),
    # A free size is not known to be that of the other factor, which is the same in both.
    "a product of sizes that may differ": behind("Mul (z, f)", values={"f": parameters({"f": (4, 3)})["f"]}),
    "a cast that rounds, and one that does not": model(
        CHAIN.replace(
            "y = Norm (z, p:8)", "n = Norm (z, p:8) h = Cast <to = 10> (n) f = Cast <to = 1> (h) y = Relu (f)"
        )
    ),
}


@pytest.mark.parametrize("name", PROVED)
def test_each_fold_is_proved(name: str) -> None:
    result = fold(PROVED[name], verify="local")
    for verdict in (result.report.verification, verify(PROVED[name], result.model, method="local")):
        status, marks = outcome(verdict)
        assert (status, set(marks)) == ("passed", {"proved"}), verdict
        assert all(0 < proof.bound < 1e-6 for proof in verdict.sites)
    assert result.report.after.batch_norm == 0


# Sizes are asked for of what a batch norm reads, and of what it makes.
ASKED = {
    "x": "z = Conv (x, w:8.6.3.3) s = Shape (z) y = Norm (z, p:8)",
    "y": "z = Norm (x, p:6) s = Shape (z) y = Conv (z, w:8.6.3.3)",
}


@pytest.mark.parametrize("other", ASKED)
def test_sizes_that_are_asked_for_stay(other: str) -> None:
    source = model(f"g (float[N,6,H,W] x) => (float[N,8,A,B] y, int64[4] s) {{ {ASKED[other]} }}")
    result = fold(source, verify="both")
    assert (result.report.after.batch_norm, *outcome(result.report.verification)) == (0, "passed", ["proved"])
    changed = to_proto(result.model)
    shape = next(node for node in changed.graph.node if node.op_type == "Shape")
    changed.graph.node.remove(shape)
    shape.input[0] = other
    changed.graph.node.append(shape)
    assert prove_claims(source, changed, result.report).status != "passed"


def test_a_model_that_nothing_runs_is_proved(tmp_path: Path) -> None:
    header = '<ir_version: 8, opset_import: ["": 17, "other": 1]>'
    body = CHAIN.replace("z = Conv (x,", "s = other.Secret (x) z = Conv (s,")
    verdict = fold(model(body, header=header), tmp_path / "out.onnx").report.verification
    assert (verdict.method, *outcome(verdict)) == ("local", "passed", ["proved"])


def test_the_wrong_fold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from bnexport.folding import context

    real = context.scale_small
    monkeypatch.setattr(context, "scale_small", lambda weight, factor, *rest: real(weight, factor * 1.0001, *rest))
    said = r"site BatchNormalization -> y: at .*: the scale of channel \d+ differs"
    with pytest.raises(VerificationError, match=said):
        fold(model(CHAIN), verify="local")


@pytest.mark.parametrize("text", [APART, CHAIN], ids=["apart", "chain"])
def test_a_changed_number_is_found(text: str) -> None:
    """In the result, and in a model that was not folded, whose windows have the operators of the original."""
    result = fold(model(text), verify=False)
    for good in (to_proto(result.model), model(text)):
        for name in [each.name for each in good.graph.initializer]:
            array = array_of(good, name)
            array.flat[0] += 4 * np.spacing(np.abs(array).max())
            assert prove_claims(model(text), with_arrays(good, {name: array}), result.report).status == "failed", name


Folded = tuple[onnx.ModelProto, onnx.ModelProto, FoldReport]


@pytest.fixture
def folded() -> Folded:
    result = fold(model(APART), verify=False)
    return model(APART), to_proto(result.model), result.report


def test_a_region_that_is_too_small_hides_nothing(folded: Folded) -> None:
    """A claim says whose mark a window is, and nothing of what has to be proved."""
    proto, result, report = folded
    for missing in {node for site in report.sites for node in site.region}:
        sites = tuple(
            dataclasses.replace(site, region=tuple(node for node in site.region if node != missing))
            for site in report.sites
        )
        assert prove_claims(proto, result, dataclasses.replace(report, sites=sites)).status == "failed", missing
    assert prove_claims(proto, result, dataclasses.replace(report, sites=())).status == "failed"


def test_what_is_written_besides_is_the_same(folded: Folded) -> None:
    """Files in the wrong order, a tensor that nothing reads, an input more."""
    proto, result, report = folded
    assert not prove_claims(result, proto, report)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "idle"))
    for value in (1.0, 2.0):
        other = copy.deepcopy(result)
        other.graph.initializer.append(onnx.numpy_helper.from_array(np.full(3, value, np.float32), "idle"))
        assert prove_claims(proto, other, report).passed == (value == 1.0)
    other.graph.input.append(onnx.helper.make_tensor_value_info("more", 1, [1]))
    assert prove_claims(proto, other, report).status == "failed"


def test_claims_about_another_model_fail(folded: Folded) -> None:
    proto, result, report = folded
    first = dataclasses.replace(report.sites[0], region=(*report.sites[0].region, "no such \x1b node"))
    verdict = prove_claims(proto, result, dataclasses.replace(report, sites=(first, *report.sites[1:])))
    assert verdict.status == "failed"
    assert "which is no node" in verdict.reason and "\x1b" not in verdict.reason
    other = model(CHAIN)
    for candidate in (result, to_proto(fold(other, verify=False).model)):
        assert prove_claims(other, candidate, report).status == "failed"


@pytest.mark.parametrize("count", [60, 1500])
def test_copies_are_no_part_of_a_region(count: int) -> None:
    copies = "\n".join(f"i{index + 1} = Identity (i{index})" for index in range(count))
    text = f"g (float[N,6,H,W] x) => (float[N,8,A,B] y) {{{{ i0 = Conv (x, {{}}) {copies} z = {{}} y = Relu (z) }}}}"
    source = model(text.format("w:8.6.1.1", f"Norm (i{count}, p:8)"))
    factor, shift = affine({name: array_of(source, name) for name in ("p_s", "p_b", "p_m", "p_v")})
    wide = {"v": array_of(source, "w") * factor[:, None, None, None], "b": shift}
    values = {name: array.astype(np.float32) for name, array in wide.items()}
    candidate = model(text.format("v, b", f"Identity (i{count})"), values=values)
    assert outcome(verify(source, candidate, method="local")) == ("passed", ["proved"])


def test_a_proof_ends_in_time() -> None:
    verdict = verify(model(CHAIN), model(CHAIN), method="local", proof_seconds=0.0)
    assert verdict.status == "not_verified" and "the 0 seconds for a proof are over" in verdict.reason


def test_what_is_left_after_the_time_is_compared_only() -> None:
    verdict = fold(model(APART), proof_seconds=0.0).report.verification
    assert verdict and "0 folds proved" in verdict.summary()


def test_functions_that_call_each_other_are_read_to_a_depth() -> None:
    head = '<domain: "f", opset_import: ["": 17, "f": 1]>'
    for depth, passed in ((64, True), (65, False)):
        calls = (f"f.f{i + 1}" if i + 1 < depth else "Relu" for i in range(depth))
        bodies = " ".join(f"{head} f{i} (a) => (b) {{ b = {call} (a) }}" for i, call in enumerate(calls))
        text = f"g (float[N,4] x) => (float[N,4] y) {{ y = f.f0 (x) }} {bodies}"
        source = model(text, header='<ir_version: 8, opset_import: ["": 17, "f": 1]>')
        assert verify(source, source, method="local").passed is passed


PADS = 'Pad <mode="{}", pads=[1, 0, 0, 1, 0, 0]> (z)'
# There are sizes at which both are equal.
FORMS = {
    "slice of the batch": ("Slice <starts=[-2], ends=[9223372036854775807], axes=[0]> (z)", "Identity (z)", "N,4,4"),
    "slice of a free size": ("Slice <starts=[0], ends=[6], axes=[2]> (z)", "Identity (z)", "2,4,S"),
    "two slices": (
        *("Slice <starts=[0], ends=[3], axes=[2]> (z)", "Slice <starts=[-2], ends=[99999999999], axes=[2]> (z)"),
        "2,4,3",
    ),
    "pads": (PADS.format("edge"), PADS.format("reflect"), "N,4,4"),
    "transpose": ("Transpose <perm=[2, 1, 0]> (z)", "Identity (z)", "N,4,S"),
    "mean": ("ReduceMean <axes=[0, 2]> (z)", "ReduceMean <axes=[2]> (z)", "N,4,3"),
}


@pytest.mark.parametrize("name", FORMS)
def test_another_form_is_not_proved(name: str) -> None:
    *forms, declared = FORMS[name]
    source, other = (behind(form, "Identity (x)", declared, opset=9) for form in forms)
    candidate = fold(other, verify=False).model
    assert prove_claims(source, candidate, fold(source, verify=False).report).status != "passed"
    assert verify(source, candidate, method="local").status != "passed"


OPEN = {
    # onnx.reference places the windows in another way than ONNX Runtime.
    **{
        way: behind(f'AveragePool <auto_pad="{way}", kernel_shape=[3], dilations=[2]> (z)', declared="2,4,8", opset=19)
        for way in ("SAME_UPPER", "SAME_LOWER", "VALID")
    },
    "a resize to nothing": behind("Resize (z, , , s)", declared="0,4,5", opset=13, values={"s": np.array([0, 4, 3])}),
    "no elements": model(
        "g (float[0,4] x) => (float[] y) { z = Norm (x, p:4) r = Mul (c, z) y = Norm (r, q:4) }",
        values={"c": np.zeros((0, 4), np.float32)},
    ),
}


@pytest.mark.parametrize("name", OPEN)
def test_a_right_fold_that_is_not_evaluated_is_not_refuted(name: str) -> None:
    result = fold(OPEN[name], verify=False)
    assert result.report.changed
    status = prove_claims(OPEN[name], result.model, result.report).status
    assert status == "not_verified" if name in ("SAME_UPPER", "SAME_LOWER", "VALID") else status != "failed"
    assert verify(OPEN[name], result.model, method="local").status != "failed"


def test_weights_in_files_are_told_apart_by_file_and_place(tmp_path: Path) -> None:
    w, v = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    text = "g (float[N,64] x) => (float[N,64] y, float[N,64] z) { y = MatMul (x, w)\n z = MatMul (y, v) }"
    for name, values in (("one", {"w": w, "v": v}), ("two", {"w": v, "v": w})):
        proto = model(text, values=values)
        onnx.save(
            proto, tmp_path / f"{name}.onnx", save_as_external_data=True, location=f"{name}.data", size_threshold=0
        )
    proto = onnx.load(tmp_path / "one.onnx", load_external_data=False)
    proto.graph.node[0].input[1] = "v"
    onnx.save(proto, tmp_path / "v.onnx")
    for name in ("two", "v"):
        assert not verify(tmp_path / "one.onnx", tmp_path / f"{name}.onnx", method="local").passed


X = ir.val("x", dtype=ir.DataType.FLOAT)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (ir.node("Unknown", [X]), "Unknown with 1 inputs"),
        (ir.node("Relu", [X, X]), "Relu with 2 inputs"),
        (ir.node("Add", [X, None]), "without an input that it needs"),
        (ir.node("Relu", [X], attributes={"alpha": 0.1}), "'alpha' that its schema does not have"),
        (ir.node("LeakyRelu", [X], attributes={"alpha": 1}), "'alpha' that its schema does not have"),
        (ir.Node("", "LeakyRelu", [X], [ir.RefAttr("alpha", "a", ir.AttributeType.FLOAT)]), "'alpha' that its schema"),
        (ir.node("ReduceMean", [X], attributes={"keepdims": 2}), "neither 0 nor 1"),
    ],
)
def test_a_node_that_is_not_as_its_schema_says(node: ir.Node, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_node(node, 17)


def test_defaults_that_a_file_may_spell() -> None:
    node = ir.node("Conv", [X, X], attributes={"kernel_shape": [3, 3], "group": 1})
    assert is_default(node, node.attributes["group"], 17)
    for kernel, same in ((None, False), ((3, 3), True), ((1, 3), False)):
        assert is_default(node, node.attributes["kernel_shape"], 17, kernel=kernel) is same
    for value, same in ((0.01, True), (0.02, False)):
        leaky = ir.node("LeakyRelu", [X], attributes={"alpha": value})
        assert bool(is_default(leaky, leaky.attributes["alpha"], 17)) is same


def test_a_switch_that_the_caller_of_a_function_gives_is_not_read() -> None:
    """In training the momentum counts."""
    text = """g (float[N,4] x) => (float[A,B] y, float[4] u) {{ y, u = f.block <t = 1> (x) }}
        <domain: "f", opset_import: ["": 17]> block <t> (a) => (b, m) {{ s = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()
        b, m, v = BatchNormalization <training_mode: int = @t, momentum: float = {}> (a, s, s, s, s) }}"""
    pair = [model(text.format(each), header='<ir_version: 8, opset_import: ["": 17, "f": 1]>') for each in (0.5, 0.8)]
    assert verify(*pair, method="local").status == "not_verified"


def test_a_map_passes_along_other_axes_alone() -> None:
    assert require_ones(np.ones((3, 1)), (0, 2), 3).shape == (1, 3, 1)
    with pytest.raises(Unrelated):
        require_ones(np.ones((3, 1)), (1,), 3)


@pytest.mark.parametrize("change", ["output", "type", "opset", "names"])
def test_a_fold_between_other_interfaces_is_not_proved(change: str) -> None:
    source = model(CHAIN)
    result = fold(source, verify=False)
    folded = to_proto(result.model)
    if change == "output":
        folded.graph.output[0].name = folded.graph.node[-1].output[0] = "other"
    elif change == "type":
        folded.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    elif change == "opset":
        folded.opset_import[0].version = 16
    else:
        folded.opset_import.add(domain="ai.onnx", version=16)
    assert not prove_claims(source, folded, result.report).passed


@pytest.mark.parametrize("weight", ["8.1.3.3", "1.1.1.1"])
def test_one_channel_of_a_size_that_the_file_leaves_open(weight: str) -> None:
    source = model(
        f"g (float[N,C,H,W] x) => (float[N,D,A,B] y) {{ z = Conv (x, w:{weight}) y = Norm (z, p:{weight[0]}) }}"
    )
    assert verify(source, fold(source, verify=False).model, method="local").passed
