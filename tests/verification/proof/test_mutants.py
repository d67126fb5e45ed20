"""Every wrong fold is refuted, and every right one is proved: mutants over all rules and types."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from bnexport.errors import BnexportError
from bnexport.folding import fold
from bnexport.folding.placing import Rule
from bnexport.folding.report import FoldReport
from bnexport.folding.rules import ALL
from bnexport.model_io import to_proto
from tests.folding.rules.test_takers import LEAVES
from tests.folding.test_random_graphs import PIECES, build
from tests.forms import placements
from tests.forms.engine import Refused as NotRun
from tests.forms.placements import Impossible
from tests.forms.session import computed, of_operator
from tests.support.claims import prove_claims
from tests.support.onnx_text import batch_norm, model
from tests.verification.proof.mutants import differs, mutants

NORM = batch_norm("p", 8)
CONV = {"w": (8, 6, 3, 3), **NORM}


def _text(
    body: str, shapes: dict[str, tuple[int, ...]], *, ins: str = "float[2,6,8,8] x", seed: int = 5
) -> onnx.ModelProto:
    values = {}
    if "q_g" in shapes:
        shapes = dict(shapes)
        values = {"q_g": (np.random.default_rng(0).random(shapes.pop("q_g")) + 0.5).astype(np.float32)}
    return model(f"g ({ins}) => (float[A,B,C,D] y) {{ {body} }}", shapes, values=values, seed=seed)


def models() -> dict[str, onnx.ModelProto]:
    """Folds in more than one place, and the random graphs' pieces."""
    found = {f"piece-{name}": build(["conv", name, "norm"], 3, tail=name in ("norm", "branches")) for name in PIECES}
    after = "y = BatchNormalization (t, p_s, p_b, p_m, p_v)"
    found["resize"] = _text(
        f'z = Conv (x, w)\n f = Constant <value_floats = [1.0, 1.0, 2.0, 2.0]> ()\n t = Resize <mode="linear"> (z, , f)\n {after}',
        CONV,
    )
    found["depth-to-space"] = _text(
        "z = Conv (x, w)\n t = DepthToSpace <blocksize=2> (z)\n y = BatchNormalization (t, r_s, r_b, r_m, r_v)",
        {"w": (8, 6, 3, 3), **batch_norm("r", 2)},
    )
    found["transposed"] = _text(
        "t = ConvTranspose <group=2, strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]> (x, v)\n " + after,
        {"v": (6, 4, 3, 3), **NORM},
    )
    found["transposed-forward"] = _text(
        "t = BatchNormalization (x, q_s, q_b, q_m, q_v)\n y = ConvTranspose (t, v)",
        {"v": (6, 4, 1, 1), **batch_norm("q", 6)},
    )
    found["forward"] = _text(
        "t = BatchNormalization (x, q_s, q_b, q_m, q_v)\n y = Conv (t, w)", {"w": (8, 6, 3, 3), **batch_norm("q", 6)}
    )
    found["matmul-forward"] = model(
        "g (float[N,6] x) => (float[N,8] y) { t = BatchNormalization (x, q_s, q_b, q_m, q_v)\n y = MatMul (t, w) }",
        {"w": (6, 8), **batch_norm("q", 6)},
    )
    found["gemm"] = model(
        "g (float[N,6] x) => (float[N,8] y) { t = Gemm <alpha=0.5, beta=2.0, transB=1> (x, w, b)\n " + after + " }",
        {"w": (8, 6), "b": (8,), **NORM},
    )
    found["merged"] = _text(
        f"r = Relu (x)\n t = Mul (r, k)\n {after.replace('p_', 'q_')}", {"k": (6, 1, 1), **batch_norm("q", 6)}
    )
    found["max-pool"] = _text(
        "z = Conv (x, w)\n t = MaxPool <kernel_shape=[3,3], pads=[1,1,1,1]> (z)\n y = BatchNormalization (t, q_g, p_b, p_m, p_v)",
        {"w": (8, 6, 3, 3), "q_g": (8,), "p_b": (8,), "p_m": (8,), "p_v": (8,)},
    )
    found["parallel"] = _text(
        "a = Conv <pads=[1,1,1,1]> (x, w)\n m = BatchNormalization (a, p_s, p_b, p_m, p_v)\n"
        " b = Conv (x, u)\n n = BatchNormalization (b, r_s, r_b, r_m, r_v)\n"
        " o = BatchNormalization (x, q_s, q_b, q_m, q_v)\n s = Add (m, n)\n y = Add (s, o)",
        {"w": (6, 6, 3, 3), "u": (6, 6, 1, 1), **batch_norm("p", 6), **batch_norm("q", 6), **batch_norm("r", 6)},
    )
    found["with-untouched"] = _text(
        f"k = Conv (x, u)\n r = Sigmoid (k)\n z = Conv (r, w)\n s = Relu (z)\n t = Conv (s, v)\n {after}",
        {"u": (6, 6, 1, 1), "w": (8, 6, 3, 3), "v": (8, 8, 3, 3), **NORM},
    )
    # Without a second Reshape, or dropped channels, which would hide a change.
    found["piece-flattened"] = model(
        f"g (float[2,6,8,8] x) => (float[A,B,C] y) {{ z = Conv (x, w)\n t = Reshape (z, k)\n {after} }}",
        CONV,
        values={"k": np.array([0, 8, -1])},
    )
    found["piece-sliced"] = _text(
        "i = Constant <value_ints = [1]> ()\n j = Constant <value_ints = [-1]> ()\n k = Constant <value_ints = [3]> ()\n"
        f" z = Conv (x, w)\n t = Slice (z, i, j, k)\n {after}",
        CONV,
    )
    edges = 'k = Constant <value_ints = [0, 0, 1, 0, 0, 0, 1, 1]> ()\n z = Conv (x, w)\n t = Pad <mode="edge"> (z, k)\n'
    found["pad"] = _text(edges + after, CONV)
    found["relu"] = _text(
        "a = Conv <pads=[1,1,1,1]> (x, w)\n b = Relu (x)\n s = Add (a, b)\n n = BatchNormalization (s, q_g, q_b, q_m, q_v)\n"
        " r = Relu (n)\n y = Conv <pads=[1,1,1,1]> (r, u)",
        {"w": (6, 6, 3, 3), "u": (8, 6, 3, 3), "q_g": (6,), "q_b": (6,), "q_m": (6,), "q_v": (6,)},
    )
    for name in ("deform-groups", "layer-columns", "lstm-peepholes", "embedding", "shuffled"):
        found[name] = LEAVES[name].model()
    found["batch-norm"] = _text(
        "r = Relu (x)\n t = BatchNormalization (r, q_s, q_b, q_m, q_v)\n s = Constant <value_ints = [0, 6, 4, 16]> ()\n"
        " u = Reshape (t, s)\n y = BatchNormalization (u, p_s, p_b, p_m, p_v)",
        {**batch_norm("q", 6), **batch_norm("p", 6)},
    )
    for dtype in ("float16", "bfloat16"):
        found[dtype] = in_half(_text(f"t = Conv (x, w)\n {after}", CONV), dtype)
    return found


def in_half(proto: onnx.ModelProto, dtype: str) -> onnx.ModelProto:
    """The same model with every float32 in `dtype`."""
    import ml_dtypes

    kind = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}[dtype]
    for tensor in proto.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = kind
    return proto


def folded(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, FoldReport]:
    result = fold(proto, verify=False)
    return to_proto(result.model), result.report


def uses(rule: Rule, proto: onnx.ModelProto) -> bool:
    return any(rule.name in site.rules for site in folded(proto)[1].folded)


def of_rule(rule: Rule) -> onnx.ModelProto:
    """Return a model that the rule folds: one of `MODELS`, or the first form of its operators in tests/forms."""
    for proto in MODELS.values():
        if uses(rule, proto):
            return proto
    for one in (each for op_type in rule.op_types for each in of_operator(op_type, 1, 8)):
        for place in (*one.places, "conv form gain", "gain form conv"):
            with contextlib.suppress(Impossible, NotRun):
                result = computed(one, one.case)
                proto = placements.build(one.op_type, one.case, place, one.shape, result, one.opset, one.seed)
                if uses(rule, proto):
                    return proto
    raise AssertionError(
        f"no form of {', '.join(rule.op_types)} in tests/forms is folded by {rule.name}: add one to `models`"
    )


def missed(name: str, proto: onnx.ModelProto, step: int) -> tuple[int, list[str]]:
    """Every `step`th mutant of the model; how many there were, and which were not refuted."""
    count, survivors = 0, []
    good, report = folded(proto)
    verdict = prove_claims(proto, good, report)
    assert verdict.status == "passed", (name, verdict.reason)
    for index, (what, wrong) in enumerate(mutants(good)):
        if index % step:
            continue
        count += 1
        try:
            status = prove_claims(proto, wrong, report).status
        except BnexportError as error:  # a refused file is no pass
            status = type(error).__name__
        if status == "passed" and differs(good, wrong):
            survivors.append(f"{name}: {what}")
    return count, survivors


MODELS = models()


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_some_wrong_folds_of_each_rule_are_refuted(rule: Rule) -> None:
    count, survivors = missed(rule.name, of_rule(rule), 12)
    assert survivors == []
    assert count >= 2


def test_each_right_fold_is_proved() -> None:
    for name, proto in MODELS.items():
        good, report = folded(proto)
        verdict = prove_claims(proto, good, report)
        assert verdict.status == "passed", (name, verdict.reason)
        assert {proof.method for proof in verdict.sites} <= {"proved"}, (name, verdict.sites)


@pytest.mark.parametrize("name", ["forward", "with-untouched", "float16"])
def test_some_wrong_folds_are_refuted(name: str) -> None:
    count, survivors = missed(name, MODELS[name], 3)
    assert survivors == []
    assert count >= 3


# Right folds that were called wrong: numbers that a scale near 1 leaves as they are in bfloat16; a constant shape that fits
# the declared sizes alone; a shift that was rounded once by each of two folds.
DOUBTED = {
    "bfloat16": (28, ["conv-3x3-padded", "sliced", "pre-activation", "positions"]),
    "bfloat16, a channel": (236, ["branches", "residual", "conv"]),
    "shape": (125, ["positions", "pooled", "flattened"]),
    "twice": (239, ["norm", "conv-transpose", "positions", "flattened", "flattened"]),
    "twice, cancelled": (
        285,
        [
            "identity",
            "constant-product",
            "conv-3x3-padded",
            "constant-product",
            "conv-3x3-padded",
            "positions",
            "norm",
            "pooled",
        ],
    ),
}


@pytest.mark.parametrize("name", DOUBTED)
def test_a_right_fold_is_not_refuted(name: str) -> None:
    seed, pieces = DOUBTED[name]
    proto = build([*pieces, "norm"], seed, tail=seed % 2 == 0)
    if name.startswith("bfloat16"):
        proto = in_half(proto, "bfloat16")
    good, report = folded(proto)
    assert report.changed
    verdict = prove_claims(proto, good, report)
    # What bfloat16 rounds may be more than a sixteenth of an output's largest coefficient.
    assert verdict.status in ("passed", "not_verified" if name.startswith("bfloat16") else "passed"), verdict
    assert {proof.method for proof in verdict.sites} == {"proved"} or not verdict.passed


@pytest.mark.slow
def test_all_wrong_folds_are_refuted() -> None:
    every = MODELS | {f"rule-{rule.name}": of_rule(rule) for rule in ALL}
    found = [missed(name, proto, 1) for name, proto in every.items()]
    count, survivors = sum(each for each, _ in found), [it for _, each in found for it in each]
    print(f"{count} mutants, {len(survivors)} missed")
    assert survivors == []
    assert count >= 1000


@pytest.mark.slow
def test_no_right_fold_is_refuted() -> None:
    """Random graphs, as they are, with means of 1e5 standard deviations, and in half precision."""
    generator = np.random.default_rng(11)
    marks: Counter[str] = Counter()
    rejected, models = [], 0
    for seed in range(300):
        names = [str(name) for name in generator.choice(sorted(PIECES), generator.integers(2, 9))]
        for kind in ("plain", "far", "float16", "bfloat16"):
            proto = build([*names, "norm"], seed, tail=seed % 2 == 0)
            if kind == "far":
                move_means(proto, 1e5)
            elif kind != "plain":
                proto = in_half(proto, kind)
            good, report = folded(proto)
            if not report.changed:
                continue
            models += 1
            verdict = prove_claims(proto, good, report)
            marks.update(proof.method for proof in verdict.sites)
            if verdict.status == "failed" or any(not it.reason for it in verdict.sites if it.method != "proved"):
                rejected.append((seed, kind, verdict.reason))
    print(f"{models} folded models, {len(rejected)} rejected, sites: {dict(marks)}")
    assert rejected == []
    assert marks["proved"] > 0.9 * sum(marks.values())


def move_means(proto: onnx.ModelProto, ratio: float) -> None:
    """Puts the running means of every batch norm `ratio` standard deviations from 0."""
    arrays = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "BatchNormalization":
            mean, var = arrays[node.input[3]], onnx.numpy_helper.to_array(arrays[node.input[4]])
            mean.CopyFrom(onnx.numpy_helper.from_array((ratio * np.sqrt(var)).astype(np.float32), mean.name))
