"""The local proof: what it proves, what it refutes, and what it says about what it cannot run."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from bnexport import verify
from bnexport.errors import VerificationError
from bnexport.folding import fold
from bnexport.folding.report import FoldReport
from bnexport.model_io import to_proto
from bnexport.verification.verdict import Verification
from tests.support.claims import prove_claims
from tests.support.onnx_text import batch_norm, model

# A residual sum whose batch norm goes apart: its scale through the Relu and the padded Conv, its shift into the sum.
APART = """g (float[N,4,H,W] x) => (float[N,6,A,B] y) {
    a = Conv <pads=[1,1,1,1]> (x, w)
    s = Add (a, x)
    n = BatchNormalization (s, p_g, p_b, p_m, p_v)
    r = Relu (n)
    c = Conv <pads=[1,1,1,1]> (r, u)
    y = BatchNormalization (c, q_s, q_b, q_m, q_v)
}"""
SHAPES = {"w": (4, 4, 3, 3), "u": (6, 4, 3, 3), **batch_norm("q", 6)}


def apart() -> onnx.ModelProto:
    generator = np.random.default_rng(3)
    values = {
        name: np.abs(generator.standard_normal(4)).astype(np.float32) + np.float32(0.5) for name in ("p_g", "p_v")
    }
    return model(APART, {**SHAPES, "p_b": (4,), "p_m": (4,)}, values=values)


CHAIN = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {
    z = Conv (x, w)
    y = BatchNormalization (z, p_s, p_b, p_m, p_v)
}"""
CHAIN_SHAPES = {"w": (8, 6, 3, 3), **batch_norm("p", 8)}


# Two residual blocks: a batch norm next to a Conv is merged into it, and the sum with the shortcut is written anew.
BLOCK = """
    n{0} = Conv <pads=[1,1,1,1]> (r{0}, w)
    c{0} = Conv (n{0}, u)
    m{0} = BatchNormalization (c{0}, p_s, p_b, p_m, p_v)
    f{0} = BatchNormalization (n{0}, q_s, q_b, q_m, q_v)
    g{0} = Add (m{0}, f{0})
    s{0} = Add (g{0}, {1})
"""
MERGED = f"""g (float[N,4,H,W] x) => (float[N,6,A,B] y) {{
    h = Conv (x, w)
    s0 = BatchNormalization (h, p_s, p_b, p_m, p_v)
    r1 = Relu (s0) {BLOCK.format(1, "s0")}
    r2 = Relu (s1) {BLOCK.format(2, "s1")}
    t = Conv (s2, v)
    y = BatchNormalization (t, t_s, t_b, t_m, t_v)
}}"""
MERGED_SHAPES = {
    **{"w": (4, 4, 3, 3), "u": (4, 4, 1, 1), "v": (6, 4, 1, 1)},
    **batch_norm("p", 4),
    **batch_norm("q", 4),
    **batch_norm("t", 6),
}


# Sizes are asked for of what a batch norm reads, and of what it makes.
ASKED = {
    "above": "z = Conv (x, w)\n s = Shape (z)\n y = BatchNormalization (z, p_s, p_b, p_m, p_v)",
    "below": "z = BatchNormalization (x, p_s, p_b, p_m, p_v)\n s = Shape (z)\n y = Conv (z, w)",
}
ASKED_SHAPES = {
    "above": {"w": (8, 6, 3, 3), **batch_norm("p", 8)},
    "below": {"w": (8, 6, 3, 3), **batch_norm("p", 6)},
}


def asked(where: str) -> onnx.ModelProto:
    body = f"g (float[N,6,H,W] x) => (float[N,8,A,B] y, int64[4] s) {{ {ASKED[where]} }}"
    return model(body, ASKED_SHAPES[where])


def methods(verdict: Verification | None) -> list[str]:
    assert verdict is not None
    return [proof.method for proof in verdict.sites]


def test_folds_behind_a_merged_sum_are_proved() -> None:
    folded = fold(model(MERGED, MERGED_SHAPES), verify="local")
    assert folded.report.after.batch_norm == 0
    verdict = folded.report.verification
    assert verdict is not None and verdict.passed, verdict
    assert set(methods(verdict)) == {"proved"}


@pytest.mark.parametrize("where", ASKED)
def test_sizes_that_are_asked_for_stay(where: str) -> None:
    result = fold(asked(where), verify="both")
    assert result.report.after.batch_norm == 0
    verdict = result.report.verification
    assert verdict is not None and verdict.passed, verdict
    assert methods(verdict) == ["proved"]
    changed = to_proto(result.model)
    shape = next(node for node in changed.graph.node if node.op_type == "Shape")
    changed.graph.node.remove(shape)
    shape.input[0] = "x" if where == "above" else changed.graph.output[0].name
    changed.graph.node.append(shape)
    assert prove_claims(asked(where), changed, result.report).status != "passed"


def test_each_fold_is_proved() -> None:
    for proto in (apart(), model(CHAIN, CHAIN_SHAPES)):
        verdict = fold(proto, verify="local").report.verification
        assert verdict is not None
        assert verdict.passed, verdict
        assert set(methods(verdict)) == {"proved"}
        assert all(0 < proof.bound < 1e-6 for proof in verdict.sites)
        assert "proved" in verdict.summary()


@pytest.mark.parametrize("ratio", [1e3, 1e5])
def test_an_ill_conditioned_fold_is_proved(ratio: float) -> None:
    """Whole models decide nothing here: the reference's own rounding errors are as large as its outputs."""
    values = {"p_m": np.full(8, ratio, np.float32), "p_v": np.full(8, 1.0, np.float32)}
    verdict = fold(model(CHAIN, CHAIN_SHAPES, values=values), verify="local").report.verification
    assert verdict is not None
    assert (verdict.status, methods(verdict)) == ("passed", ["proved"])


def test_a_model_that_nothing_runs_is_proved(tmp_path: Path) -> None:
    header = '<ir_version: 8, opset_import: ["": 17, "other": 1]>'
    body = CHAIN.replace("z = Conv (x, w)", "s = other.Secret (x)\n z = Conv (s, w)")
    result = fold(model(body, CHAIN_SHAPES, header=header), tmp_path / "out.onnx")
    verdict = result.report.verification
    assert verdict is not None
    assert (verdict.status, verdict.method, methods(verdict)) == ("passed", "local", ["proved"])


def test_parameters_that_a_node_makes_in_float32() -> None:
    shift = "k = Constant <value_ints = [8]> ()\n p_b = ConstantOfShape <value = float[1] {0.5}> (k)\n"
    body = CHAIN.replace("z = Conv", f"{shift} z = Conv")
    shapes = {name: shape for name, shape in CHAIN_SHAPES.items() if name != "p_b"}
    verdict = fold(model(body, shapes), verify="local").report.verification
    assert verdict is not None
    assert (verdict.status, methods(verdict)) == ("passed", ["proved"])


def test_the_wrong_fold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from bnexport.folding import context

    real = context.scale_small
    monkeypatch.setattr(context, "scale_small", lambda weight, factor, *rest: real(weight, factor * 1.0001, *rest))
    with pytest.raises(
        VerificationError, match=r"site BatchNormalization -> y: at .*: the scale of channel \d+ differs"
    ):
        fold(model(CHAIN, CHAIN_SHAPES), verify="local")


@pytest.mark.parametrize("proto", [apart(), model(CHAIN, CHAIN_SHAPES)], ids=["apart", "chain"])
def test_a_changed_number_is_found(proto: onnx.ModelProto) -> None:
    result = fold(proto, verify=False)
    good = to_proto(result.model)
    assert prove_claims(proto, good, result.report).passed
    for index in range(len(good.graph.initializer)):
        wrong = copy.deepcopy(good)
        tensor = wrong.graph.initializer[index]
        array = onnx.numpy_helper.to_array(tensor).copy()
        flat = array.reshape(-1)
        flat[0] += 4 * np.spacing(np.abs(array).max())
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        assert prove_claims(proto, wrong, result.report).status == "failed", tensor.name


class TestClaims:
    @pytest.fixture
    def folded(self) -> tuple[onnx.ModelProto, onnx.ModelProto, FoldReport]:
        proto = apart()
        result = fold(proto, verify=False)
        return proto, to_proto(result.model), result.report

    def test_a_region_that_is_too_small_hides_nothing(self, folded: Any) -> None:
        """A claim says whose mark a window is, and nothing of what has to be proved."""
        proto, result, report = folded
        for missing in {node for site in report.sites for node in site.region}:
            sites = [
                dataclasses.replace(site, region=tuple(node for node in site.region if node != missing))
                for site in report.sites
            ]
            forged = dataclasses.replace(report, sites=tuple(sites))
            assert prove_claims(proto, result, forged).status == "failed", missing

    def test_what_is_not_claimed_is_the_same(self, folded: Any) -> None:
        proto, result, report = folded
        assert prove_claims(proto, result, dataclasses.replace(report, sites=())).status == "failed"

    def test_what_is_written_besides_is_the_same(self, folded: Any) -> None:
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

    def test_a_missing_node_fails(self, folded: Any) -> None:
        proto, result, report = folded
        first = dataclasses.replace(report.sites[0], region=(*report.sites[0].region, "no such \x1b node"))
        verdict = prove_claims(proto, result, dataclasses.replace(report, sites=(first, *report.sites[1:])))
        assert verdict.status == "failed"
        assert "which is no node" in verdict.reason
        assert "\x1b" not in verdict.reason

    def test_claims_about_another_model_fail(self, folded: Any) -> None:
        _, result, report = folded
        other = model(CHAIN, CHAIN_SHAPES)
        assert prove_claims(other, result, report).status == "failed"
        assert prove_claims(other, to_proto(fold(other, verify=False).model), report).status == "failed"


@pytest.mark.parametrize("count", [60, 1500])
def test_copies_are_no_part_of_a_region(count: int) -> None:
    copies = "\n".join(f"i{index + 1} = Identity (i{index})" for index in range(count))

    def build(
        operands: str,
        last: str,
        shapes: dict[str, tuple[int, ...]] | None = None,
        values: dict[str, np.ndarray] | None = None,
    ) -> onnx.ModelProto:
        body = f"i0 = Conv ({operands})\n {copies}\n z = {last}\n y = Relu (z)"
        return model(f"g (float[N,6,H,W] x) => (float[N,8,A,B] y) {{ {body} }}", shapes, values=values)

    norm = f"BatchNormalization (i{count}, p_s, p_b, p_m, p_v)"
    source = build("x, w", norm, {"w": (8, 6, 1, 1), **batch_norm("p", 8)})
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in source.graph.initializer}
    factor = arrays["p_s"] / np.sqrt(arrays["p_v"] + np.float32(1e-5))
    folded = {"v": arrays["w"] * factor[:, None, None, None], "b": arrays["p_b"] - arrays["p_m"] * factor}
    verdict = verify(source, build("x, v, b", f"Identity (i{count})", values=folded), method="local")
    assert (verdict.status, methods(verdict)) == ("passed", ["proved"]), verdict


def test_a_proof_ends_in_time() -> None:
    """What is left is compared only."""
    proto = apart()
    result = fold(proto, verify=False)
    verdict = verify(proto, result.model, method="local", proof_seconds=0.0)
    assert verdict.status == "not_verified"
    assert "the 0 seconds for a proof are over" in verdict.reason
    verdict = fold(proto, proof_seconds=0.0).report.verification
    assert verdict is not None and verdict.passed
    assert "0 folds proved" in verdict.summary()


def test_a_fold_that_ends_in_adding_zero() -> None:
    """Both sides of it are equal, and so is what a Relu behind it makes of them."""
    text = """g (float[N,3,8,8] x) => (float[N,4,8,8] y) {
        c = Conv <pads=[1,1,1,1]> (x, a)
        n = BatchNormalization (c, p_s, p_b, p_m, p_v)
        d = Conv (x, b)
        m = BatchNormalization (d, q_s, q_b, q_m, q_v)
        s = Add (n, m)
        zero = Constant <value_float = 0.0> ()
        t = Add (s, zero)
        y = Relu (t)
    }"""
    shapes = {"a": (4, 3, 3, 3), "b": (4, 3, 1, 1), **batch_norm("p", 4), **batch_norm("q", 4)}
    result = fold(model(text, shapes), verify="local")
    assert result.report.verification.passed
    assert [node.op_type for node in result.model.graph.node] == ["Conv", "Relu"]


@pytest.mark.parametrize(
    "branches",
    [
        "a = Conv <pads=[0,0,1000000,1000000]> (x, v:4.4.1.1) c = Conv <pads=[1000000,1000000,0,0]> (x, w:4.4.1.1)",
        "a = Conv <dilations=[1000000,1000000]> (x, v:4.4.3.3) c = Conv (x, w:4.4.1.1)",
        "a = AveragePool <kernel_shape=[1000000,1000000]> (x) c = Identity (x)",
    ],
)
def test_kernels_that_a_file_claims_are_not_written_out(branches: str) -> None:
    """Sums of branches that would have 16 * 10^12 elements or more."""
    text = "g (float[N,4,H,W] x) => (float[N,A,B,C] y) {{ {} }}"
    source = model(text.format(f"{branches} y = Add (a, c)"))
    for nodes in (f"{branches} y = Sub (a, c)", "y = Conv (x, v:4.4.3.3)"):
        assert verify(source, model(text.format(nodes)), method="local").status == "not_verified"
