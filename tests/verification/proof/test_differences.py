"""Folds without a report: those of other tools, as they compute them, and what is no fold."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import pytest

from benchmarks import fold_models
from bnexport import verify
from bnexport.errors import UsageError
from bnexport.folding import fold
from bnexport.model_io import to_proto
from bnexport.verification.proof import numbering, search, weights
from tests.support.claims import outcome, prove_claims
from tests.support.onnx_text import array_of, model, with_arrays

SOURCE = model("""g (float[N,6,H,W] x) => (float[N,8,A,B] y) {
    a = Conv <pads=[1,1,1,1], kernel_shape=[3,3]> (x, u:6.6.3.3) r = Relu (a) z = Conv (r, w:8.6.3.3) n = Norm (z, p:8)
    y = Relu (n) }""")
OTHER = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {{ {} copy = Identity (x)
    v1 = Conv <pads=[1,1,1,1], dilations=[1,1], group=1> (copy, u) v2 = Relu (v1)
    v3 = Conv <strides=[1,1]> (v2, folded, shift) y = Relu (v3) }}"""
GIVEN = {name: array_of(SOURCE, name) for name in ("u", "w", "p_s", "p_b", "p_m", "p_v")}
ONE = ["proved"]


def map_of(proto: onnx.ModelProto, dtype: type = np.float32, prefix: str = "p") -> tuple[np.ndarray, np.ndarray]:
    """Return factor and shift of a batch norm, computed in `dtype`."""
    scale, bias, mean, var = (array_of(proto, f"{prefix}_{name}").astype(dtype) for name in "sbmv")
    factor = scale / np.sqrt(var + dtype(1e-5))
    return factor, bias - mean * factor


def foreign(source: onnx.ModelProto = SOURCE, dtype: type = np.float32) -> onnx.ModelProto:
    """The second Conv and the batch norm as one Conv, with names and defaults of its own."""
    factor, shift = map_of(source, dtype)
    values = {"folded": array_of(source, "w") * factor[:, None, None, None], "shift": shift, "u": array_of(source, "u")}
    return model(OTHER.format(""), values={name: value.astype(np.float32) for name, value in values.items()})


def scaled(proto: onnx.ModelProto, **factors: float) -> onnx.ModelProto:
    return with_arrays(proto, {name: array_of(proto, name) * np.float32(by) for name, by in factors.items()})


def test_a_fold_of_others_is_proved() -> None:
    for dtype in (np.float32, np.float64):
        verdict = verify(SOURCE, foreign(dtype=dtype), method="local")
        assert outcome(verdict) == ("passed", ONE)
        assert verdict.sites[0].site == "BatchNormalization -> n" and verdict.sites[0].bound < 1e-6
    verdict = verify(SOURCE, foreign())
    assert (verdict.method, *outcome(verdict)) == ("both", "passed", ONE) and verdict.outputs
    assert not verify(SOURCE, foreign(), method="whole").sites
    assert outcome(verify(SOURCE, SOURCE, method="local")) == ("passed", [])


def test_the_last_block_of_a_weight_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbering, "BLOCK", 36)
    source = model("g (float[N,8,L] x) => (float[A,B,C] y) { z = ConvTranspose (x, w:8.4.3) y = Norm (z, p:4) }")
    assert outcome(verify(source, fold(source, verify=False).model, method="local")) == ("passed", ONE)


@pytest.mark.parametrize("name", ["folded", "shift"])
def test_a_weight_that_is_too_far_off_is_refuted(name: str) -> None:
    """32 units in the last place, which whole models do not show."""
    array = array_of(foreign(), name)
    at = np.unravel_index(np.argmax(np.abs(array)), array.shape)
    array[at] += 32 * np.spacing(np.abs(array[at]))
    wrong = with_arrays(foreign(), {name: array})
    assert verify(SOURCE, wrong, method="whole").passed
    verdict = verify(SOURCE, wrong)
    assert verdict.status == "failed" and "fold of BatchNormalization -> n is wrong" in verdict.reason


def test_an_arithmetic_that_stays_in_the_graph() -> None:
    """As onnxoptimizer leaves it: the weight is an expression."""
    nodes = """t0 = Add (p_v, e) t1 = Sqrt (t0) t2 = Div (p_s, t1) t3 = Unsqueeze (t2, axes) folded = Mul (w, t3)
        t4 = Mul (p_m, t2) shift = Sub (p_b, t4)"""
    values = {**GIVEN, "e": np.array([1e-5], np.float32), "axes": np.array([1, 2, 3])}
    assert outcome(verify(SOURCE, model(OTHER.format(nodes), values=values), method="local")) == ("passed", ONE)


def test_a_weight_outside_is_no_fold() -> None:
    """It is another model, perhaps on purpose; running both says how far it is off."""
    wrong = scaled(foreign(), u=1.001)
    verdict = verify(SOURCE, wrong, method="local")
    assert verdict.status == "not_verified" and "nothing was folded there" in verdict.reason
    result = verify(SOURCE, wrong)
    assert result.status == "failed"
    assert verify(SOURCE, wrong, atol=2 * result.max_abs_diff).passed


def test_a_scale_that_the_next_layer_takes_back() -> None:
    """It passes the Relu, so that one region holds both layers."""
    assert outcome(verify(SOURCE, scaled(foreign(), u=2, folded=0.5), method="local")) == ("passed", ONE)
    assert verify(SOURCE, scaled(foreign(), u=2, folded=0.25), method="local").status == "not_verified"


def test_a_guess_above_what_is_proved_refutes_nothing() -> None:
    """Behind padding the Conv takes the scale alone; the other output is equal in a way that no lemma knows."""
    text = "g (float[N,6,H,W] x) => (float[N,8,H,W] y, float[N,6,H,W] z) {{ {} (n, w:8.6.3.3) {} }}"
    conv = "y = Conv <pads = [1, 1, 1, 1]>"
    source = model(text.format(f"n = Norm (x, p:6) {conv}", "a = Norm (x, q:6) z = Softplus (a)"))
    (p, p_shift), (q, q_shift) = (map_of(source, np.float64, prefix) for prefix in "pq")
    column = (-1, 1, 1)
    values = {
        **{"t": (p_shift / p).reshape(column), "w": array_of(source, "w") * p.reshape(column)},
        **{"k": q.reshape(column), "h": np.exp(q_shift).reshape(column), "e": np.ones(())},
    }
    other = text.format(
        f"n = Add (x, t) {conv}", "b = Mul (x, k) c = Exp (b) g = Mul (c, h) d = Add (g, e) z = Log (d)"
    )
    candidate = model(other, values={name: array.astype(np.float32) for name, array in values.items()})
    verdict = verify(source, candidate, method="local")
    assert verdict.status == "not_verified" and "wrong" not in verdict.reason


def test_two_wrong_folds_on_one_path() -> None:
    """Each may be meant for the other."""
    source = model("""g (float[N,6,H,W] x) => (float[N,6,A,B] y) {
        a = Conv (x, u:6.6.3.3) n = Norm (a, p:6) r = Relu (n) z = Conv (r, v:6.6.3.3) y = Norm (z, p) }""")
    good = to_proto(fold(source, verify=False).model)
    first, second = (node.input[1] for node in good.graph.node if node.op_type == "Conv")
    assert verify(source, good, method="local").passed
    assert verify(source, scaled(good, **{first: 2}), method="local").status == "failed"
    both = verify(source, scaled(good, **{first: 2, second: 0.5}), method="local")
    assert outcome(both) == ("not_verified", ["not_run", "not_run"])


def test_another_difference_is_no_fold() -> None:
    changed = foreign()
    changed.graph.node[2].op_type = "Sigmoid"
    verdict = verify(SOURCE, changed, method="local")
    assert verdict.status == "not_verified" and "v2 (Sigmoid)" in verdict.reason
    assert verify(SOURCE, changed).status == "failed"
    # Parameters that a caller may give, made constant.
    source = copy.deepcopy(SOURCE)
    source.graph.input.append(onnx.helper.make_tensor_value_info("p_b", 1, [8]))
    assert verify(source, foreign(), method="local").status == "not_verified"


@pytest.mark.parametrize("method", [True, "some"])
def test_an_unknown_method(method: object) -> None:
    with pytest.raises(UsageError, match='expected "local", "whole" or "both"'):
        verify(SOURCE, SOURCE, method=method)  # type: ignore[arg-type]


TURNED = "g (float[8,6] x) => (float[8,8] y) {{ t = MatMul (x, w:6.8) {} }}"


def test_a_wrong_axis_is_refuted() -> None:
    """What ONNX Runtime 1.31 makes of it: the map is along the rows, the weight took it along its columns."""
    source = model(TURNED.format("z = Transpose <perm=[1,0]> (t) y = Norm (z, p:8)"))
    assert verify(source, fold(source, verify=False).model, method="local").passed
    factor, shift = map_of(source)
    values = {"w": array_of(source, "w") * factor, "b": shift}
    wrong = model(TURNED.format("z = Transpose <perm=[1,0]> (t) y = Add (z, b)"), values=values)
    assert verify(source, wrong, method="local").status == "failed"
    # A batch of one would make channels broadcast; the declared sizes are taken instead.
    alone = model(TURNED.format("y = Transpose <perm=[1,0]> (t)"), values={"w": array_of(source, "w")})
    verdict = verify(source, alone, method="local")
    assert verdict.status == "failed" and "shape" not in verdict.reason


def many_layers(seed: int, layers: int = 24) -> onnx.ModelProto:
    """Residual blocks of one shape."""
    blocks = [
        f"""c{i} = Conv <pads = [1, 1, 1, 1]> (r{i}, w{i}:4.4.3.3) n{i} = Norm (c{i}, p{i}:4) a{i} = Add (n{i}, r{i})
        r{i + 1} = Relu (a{i})"""
        for i in range(layers)
    ]
    text = f"g (float[N,4,H,W] x) => (float[N,4,H,W] y) {{ r0 = Identity (x) {' '.join(blocks)} y = Relu (r{layers}) }}"
    return model(text, seed=seed)


@pytest.mark.parametrize(("limit", "layers", "words"), [(64, 24, ""), (3, 3, "in more places than are tried")])
def test_another_network_is_given_up(monkeypatch: pytest.MonkeyPatch, limit: int, layers: int, words: str) -> None:
    monkeypatch.setattr(search, "_DOUBTS", limit)
    verdict = verify(many_layers(0, layers), many_layers(1, layers), method="local")
    assert verdict.status == "not_verified"
    assert words in verdict.reason and (words or verdict.another)


@pytest.mark.parametrize("place", [0, 11, 23])
def test_one_wrong_fold_is_refuted_among_many(place: int) -> None:
    source = many_layers(0)
    good = fold(source, verify=False).model
    name = [each.name for each in good.graph.initializer if len(each.dims) == 4][place]
    array = array_of(good, name)
    array[0] *= 1.1
    status, marks = outcome(verify(source, with_arrays(good, {name: array}), method="local"))
    assert (status, marks.count("proved")) == ("failed", 23)


@pytest.mark.parametrize("change", [1e-3, 1e-2])
def test_a_weight_that_a_sum_hides_is_not_passed(change: float) -> None:
    """Two large convolutions are compared in random directions, where each result is a sum of thousands of weights."""
    source = model("""g (float[N,64,H,W] x) => (float[N,64,A,B] y) { c = Conv <pads=[1,1,1,1]> (x, w:64.64.3.3)
        d = Conv <pads=[1,1,1,1]> (c, v:64.64.3.3) y = Norm (d, p:64) }""")
    changed = fold(source, verify=False).model
    array = array_of(changed, "w")
    array[0, 0, 0, 0] += change
    assert verify(source, with_arrays(changed, {"w": array}), method="local").status == "not_verified"


def test_a_thousand_equal_layers_are_not_compared_each_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    relate = weights.relate
    monkeypatch.setattr(weights, "relate", lambda *arguments: compared.append(1) or relate(*arguments))
    fold_models.pairs(300, 2, tmp_path / "a.onnx", external=False)
    assert fold(tmp_path / "a.onnx", tmp_path / "b.onnx", verify="local").report.verification.passed
    assert len(compared) == 300


def test_branches_that_are_exchanged() -> None:
    """A file may hold the attributes of an If in any order: their names say which branch is which, also of nodes of one name."""
    source = model("""g (float[N,4] x, bool g) => (float[N,4] y) { y = If (g) <
        then_branch = t () => (float[N,4] a) { c = Gemm (x, w:4.4) r = Relu (c) a = Gemm (r, v:4.4) },
        else_branch = e () => (float[N,4] b) { c = Gemm (x, u:4.4) r = Relu (c) b = Gemm (r, s:4.4) }> }""")
    first, second = scaled(source, w=2, v=0.5, u=4, s=0.25), copy.deepcopy(source)
    first.graph.node[0].attribute.reverse()
    for branch in second.graph.node[0].attribute:
        branch.name = "else_branch" if branch.name == "then_branch" else "then_branch"
    assert verify(source, first, method="local").passed
    assert verify(source, second, method="local").status == "not_verified"
    # No run of whole models needs to take the branch.
    second.CopyFrom(source)
    second.graph.node[0].attribute[0].g.node[1].op_type = "Sigmoid"
    assert verify(source, second, method="local").another


def test_infinity_minus_infinity_says_nothing() -> None:
    """The first two are equal; infinity for a number is wrong."""
    k, h, wide = (np.float32([2, each, 2, 2]) for each in (2, 1, np.inf))
    values = {"k": k, "h": h, "wide": wide, "m": np.zeros(4, np.float32), "v": np.ones(4, np.float32)}
    texts = ("a = Mul (x, k) y = Add (a, wide)", "a = Mul (x, k) y = Add (a, h)")
    for text, status in zip(texts, ("not_verified", "failed"), strict=True):
        pair = (text, "y = BatchNormalization <epsilon = 0.0> (x, k, wide, m, v)")
        models = [model(f"g (float[N,4] x) => (float[N,4] y) {{ {each} }}", values=values) for each in pair]
        assert verify(*models, method="local").status == status


def test_a_norm_of_one_channel_is_proved() -> None:
    source = model("g (float[N,1,L] x) => (float[N,1,L] y) { n = Norm (x, p:1) y = Relu (n) }")
    (factor, shift), text = (
        map_of(source),
        "g (float[N,1,L] x) => (float[N,1,L] y) { a = Mul (x, k) n = Add (a, h) y = Relu (n) }",
    )
    assert verify(model(text, values={"k": factor, "h": shift}), source, method="local").passed


def test_a_long_chain_of_branches_is_not_followed() -> None:
    w, v = (np.linalg.matrix_power(np.tri(4) / 2, n).astype(np.float32) for n in (1, 10))
    chain = " ".join(f"z{i + 1} = MatMul (z{i}, w)" for i in range(10))
    text = "g (float[N,4] x) => (float[N,4] y) {{ {} y = Add (z, x) }}"
    source = model(text.format(f"z0 = Identity (x) {chain} z = Identity (z10)"), values={"w": w})
    other = model(text.format("z = MatMul (x, v)"), values={"v": v})
    assert verify(source, other, method="local").status == "not_verified"


def test_the_fold_behind_another_difference_is_proved() -> None:
    """What differs is taken for its counterpart, which has the same size."""
    text = "g (float[N,8,L] x, float[N,4,L] u) => (float[] y) <float[N,4,L] a, float[N,8,L] {}> {{ {} y = Add (n, r) }}"
    beside = "a = Abs (u) r = Conv (a, t:4.4.1)"
    source = model(
        text.format("z", f"{beside} z = InstanceNormalization (x, s:8, b:8) c = Conv (z, w:4.8.1) n = Norm (c, p:4)")
    )
    factor, shift = map_of(source)
    other = f"e = InstanceNormalization <epsilon = 0.1> (x, s, b) n = Conv (e, w, h) {beside}"
    values = {name: array_of(source, name) for name in "tsb"}
    values |= {"w": array_of(source, "w") * factor[:, None, None], "h": shift}
    verdict = verify(source, model(text.format("e", other), values=values), method="local")
    assert outcome(verdict) == ("not_verified", ONE) and "'epsilon' changed" in verdict.another


def test_a_default_written_out_on_the_way_of_a_fold_changes_nothing() -> None:
    """The map of the fold passes a MaxPool, to which a tool has added an attribute that says what its absence says."""
    text = "c = Conv (x, w:4.3.3.3) m = MaxPool <kernel_shape = [2, 2]> (c) y = Norm (m, p+:4)"
    source = model(f"g (float[N,3,8,8] x) => (float[N,4,A,B] y) {{ {text} }}")
    result = fold(source, verify=False, certificate=False)
    assert [site.outcome for site in result.report.sites] == ["folded"]
    changed = to_proto(result.model)
    pool = next(node for node in changed.graph.node if node.op_type == "MaxPool")
    pool.attribute.append(onnx.helper.make_attribute("dilations", [1, 1]))
    assert verify(source, changed, method="local").passed
    pool.attribute[-1].ints[:] = [2, 2]
    assert not verify(source, changed, method="local").passed


CHAIN = "g ({0}[N,6,H,W] x) => ({0}[N,8,A,B] y) {{ {1} }}"
NORM = "z = Conv (x, w:8.6.3.3) y = Norm (z, p:8)"


@pytest.mark.parametrize(("kind", "proved"), [(11, True), (10, False)], ids=["double", "half"])
def test_a_cast_that_rounds_is_not_proved(kind: int, proved: bool) -> None:
    source = model(CHAIN.format("float", NORM))
    result = fold(source, verify=False)
    wrong = to_proto(result.model)
    for name, data, to in (("wide", "narrow", 1), ("narrow", "x", kind)):
        wrong.graph.node.insert(0, onnx.helper.make_node("Cast", [data], [name], name, to=to))
    wrong.graph.node[2].input[0] = "wide"
    for verdict in (prove_claims(source, wrong, result.report), verify(source, wrong, method="local")):
        assert (verdict.passed, "proved" in outcome(verdict)[1]) == (proved, proved), verdict


def test_of_two_casts_none_is_lost() -> None:
    """What is rounded in between is no candidate for what is not, though both are read by a Cast."""
    text = CHAIN.format(
        "float", f"{NORM.replace('y =', 'n =')} h = Cast <to = 10> (n) f = Cast <to = 1> (h) y = Relu (f)"
    )
    source, wrong = model(text), model(text.replace("<to = 10>", "<to = 1>"))
    assert verify(source, wrong, method="local").status == "not_verified"


def test_a_half_model_computed_in_single() -> None:
    """As ONNX Runtime writes it: wide weights, and the values rounded to the model's type behind them."""
    source = model(CHAIN.format("float16", NORM), dtype="float16")
    factor, shift = map_of(source)
    wide = {"w": array_of(source, "w").astype(np.float32) * factor[:, None, None, None], "b": shift}
    other = model(
        CHAIN.format("float16", "i = Cast <to = 1> (x) z = Conv (i, w, b) y = Cast <to = 10> (z)"), values=wide
    )
    assert outcome(verify(source, other, method="local")) == ("passed", ONE)
    assert verify(source, scaled(other, w=1.01), method="local").status == "failed"
