"""Rewrites that a proof once let pass: each is refuted or left undecided, and its right counterpart is proved.

A case is the original, a rewrite that computes something else, and one that does not. `truth` of the folder's tests,
ONNX Runtime, says so, too: `test_each_differs_in_onnx_runtime`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest

from bnexport.folding import verify
from tests.support.onnx_text import model, parameters, run

SHAPES = {
    **{"w": (4, 3, 1, 3), "v": (4, 3, 1, 1), "c": (1, 4, 1, 1), "m": (3, 4)},
    **{"p_s": (4,), "p_b": (4,), "p_m": (4,), "p_v": (4,)},
}
VALUES = parameters(SHAPES)
FACTOR = VALUES["p_s"] / np.sqrt(VALUES["p_v"] + np.float32(1e-5))
VALUES |= {
    "turned": VALUES["w"].transpose(0, 1, 3, 2).copy(),
    "folded": VALUES["w"] * FACTOR[:, None, None, None],
    "folded_turned": (VALUES["w"] * FACTOR[:, None, None, None]).transpose(0, 1, 3, 2).copy(),
    "folded_v": VALUES["v"] * FACTOR[:, None, None, None],
    "shift": VALUES["p_b"] - VALUES["p_m"] * FACTOR,
    "rows": np.repeat(VALUES["c"], 2, axis=0),
    "ones": np.ones((1, 4, 1, 1), np.float32),
    "one": np.ones((1, 1, 1), np.float32),
    "plain": np.ones((1, 1, 1, 1), np.float32),
    "slope": np.full((4, 1, 1), 0.5, np.float32),
    "steep": np.full((4, 1, 1), 0.9, np.float32),
    "tiny": np.full((4, 1, 1), 2.0**-12, np.float32),
    "huge": np.full((4, 1, 1), 1e30, np.float32),
    "third": np.full((4, 1, 1), 1 / 3, np.float32),
    "twice": np.asarray([1, 1, 2, 2], np.float32),
    "wider": np.asarray([1, 1, 2, 3], np.float32),
    "two": np.asarray(2, np.int64),
    "many": np.asarray([16777217], np.int64),
    "wide": np.full((4, 1, 1), 16777216.0, np.float32),
    "one_double": np.ones((), np.float64),
    "one_float": np.ones((), np.float32),
    "spatial": np.asarray([2, 3]),
    "rate": np.asarray(0.5, np.float32),
    "true": np.asarray(True),
    "border": np.asarray([0, 0, 1, 1, 0, 0, 1, 1]),
    "gain": np.asarray(3, np.float32),
    "growing": np.asarray([1, 2, 3], np.float32).reshape(3, 1, 1),
}
FOLDED = "BatchNormalization ({}, p_s, p_b, p_m, p_v)"


@dataclasses.dataclass(frozen=True)
class Case:
    """Bodies behind `g (inputs) => (outputs)`. sizes: of the run in ONNX Runtime. runs: whether it runs both."""

    original: str
    wrong: str
    right: str
    inputs: str = "float[N,3,H,W] x"
    outputs: str = "float[A,B,C,D] y"
    shape: tuple[int, ...] = (2, 3, 6, 5)
    opset: int = 17
    other_opset: int = 17
    scale: float = 3.0
    runs: bool = True
    equal: bool = True  # the right one is proved, not only not refuted


CONV = f"z = Conv (x, w)\n y = {FOLDED.format('z')}"
POINT = f"z = Conv (x, v)\n y = {FOLDED.format('z')}"
CASES = {
    "cast-to-integers": Case(
        POINT,
        "z = Conv (x, folded_v, shift)\n i = Cast <to = 6> (z)\n y = Cast <to = 1> (i)",
        "z = Conv (x, folded_v, shift)\n i = Cast <to = 11> (z)\n y = Cast <to = 1> (i)",
    ),
    "kernel-turned": Case(CONV, "y = Conv (x, folded_turned, shift)", "y = Conv (x, folded, shift)"),
    "kernel-turned-by-name": Case("y = Conv <kernel_shape = [1, 3]> (x, w)", "y = Conv (x, turned)", "y = Conv (x, w)"),
    "broadcast-dropped": Case(
        "a = Mul (x, ones)\n y = Relu (a)",
        "y = Relu (x)",
        "a = Mul (ones, x)\n y = Relu (a)",
        inputs="float[N,1,H,W] x",
        shape=(2, 1, 5, 5),
    ),
    "broadcast-dropped-before-conv": Case(
        "a = Mul (x, c)\n y = Conv (a, kernel)",
        "y = Conv (x, scaled_kernel)",
        "a = Mul (c, x)\n y = Conv (a, kernel)",
        inputs="float[N,1,H,W] x",
        shape=(2, 1, 5, 5),
        runs=False,
    ),
    "rank-dropped": Case(
        "a = MatMul (x, m)\n y = Mul (a, one)",
        "y = MatMul (x, m)",
        "a = MatMul (x, m)\n y = Mul (one, a)",
        inputs="float[N,3] x",
        outputs="float[A,B,C] y",
        shape=(2, 3),
        runs=False,
    ),
    "squeeze-at-batch-1": Case(
        f"z = Conv (x, v)\n n = {FOLDED.format('z')}\n p = GlobalAveragePool (n)\n y = Squeeze (p, spatial)",
        "n = Conv (x, folded_v, shift)\n p = GlobalAveragePool (n)\n y = Squeeze (p)",
        "n = Conv (x, folded_v, shift)\n p = GlobalAveragePool (n)\n y = Squeeze (p, spatial)",
        outputs="float[A,B] y",
        shape=(1, 3, 5, 5),
    ),
    "squeeze-alone-at-batch-1": Case(
        "p = GlobalAveragePool (x)\n y = Squeeze (p, spatial)",
        "p = GlobalAveragePool (x)\n y = Squeeze (p)",
        "p = GlobalAveragePool (x)\n i = Identity (p)\n y = Squeeze (i, spatial)",
        outputs="float[A,B] y",
        shape=(1, 3, 5, 5),
    ),
    "constant-of-two-rows": Case(
        "a = Add (x, c)\n r = ReduceMax <axes = [3]> (a)\n y = Flatten (r)",
        "a = Add (x, rows)\n r = ReduceMax <axes = [3]> (a)\n y = Flatten (r)",
        "a = Add (c, x)\n r = ReduceMax <axes = [3]> (a)\n y = Flatten (r)",
        inputs="float[N,4,6,6] x",
        outputs="float[A,B] y",
        shape=(1, 4, 6, 6),
    ),
    "split-in-more-parts": Case(
        "a, b = Split <axis = 1> (x)\n y = Add (a, a)",
        "a, b, e = Split <axis = 1> (x)\n y = Add (a, a)",
        "a, b = Split <axis = 1> (x)\n i = Identity (a)\n y = Add (i, a)",
        inputs="float[N,6,H,W] x",
        shape=(2, 6, 4, 4),
        opset=13,
        other_opset=13,
    ),
    "training-momentum": Case(
        "y, u, q = BatchNormalization <training_mode = 1> (x, p_s, p_b, p_m, p_v)",
        "y, u, q = BatchNormalization <training_mode = 1, momentum = 0.1> (x, p_s, p_b, p_m, p_v)",
        "y, u, q = BatchNormalization <training_mode = 1, momentum = 0.9> (x, p_s, p_b, p_m, p_v)",
        inputs="float[N,4,H,W] x",
        outputs="float[A,B,C,D] y, float[4] u, float[4] q",
        shape=(2, 4, 5, 5),
    ),
    "random-nodes-merged": Case(
        "a = RandomNormalLike (x)\n b = RandomNormalLike (x)\n y = Sub (a, b)",
        "a = RandomNormalLike (x)\n y = Sub (a, a)",
        "b = RandomNormalLike (x)\n a = RandomNormalLike (x)\n y = Sub (b, a)",
        runs=False,
    ),
    "random-dropouts-merged": Case(
        "a = Dropout (x, rate, true)\n b = Dropout (x, rate, true)\n y = Sub (a, b)",
        "a = Dropout (x, rate, true)\n y = Sub (a, a)",
        "b = Dropout (x, rate, true)\n a = Dropout (x, rate, true)\n y = Sub (b, a)",
        runs=False,
    ),
    "dropout-that-trains": Case(
        "d = Dropout (x)\n y = Relu (d)",
        "y = Relu (x)",
        "i = Identity (x)\n d = Dropout (i)\n y = Relu (d)",
        opset=6,
        other_opset=6,
        runs=False,
    ),
    "constant-through-float16": Case(
        "n = Cast <to = 10> (huge)\n k = Cast <to = 1> (n)\n y = Add (x, k)",
        "y = Add (x, huge)",
        "n = Cast <to = 10> (huge)\n i = Identity (n)\n k = Cast <to = 1> (i)\n y = Add (x, k)",
        inputs="float[N,4,H,W] x",
        shape=(2, 4, 3, 3),
    ),
    "constant-through-bfloat16": Case(
        "n = Cast <to = 16> (third)\n k = Cast <to = 1> (n)\n y = Mul (x, k)",
        "y = Mul (x, third)",
        "n = Cast <to = 16> (third)\n i = Identity (n)\n k = Cast <to = 1> (i)\n y = Mul (x, k)",
        inputs="float[N,4,H,W] x",
        shape=(2, 4, 3, 3),
    ),
    "integer-through-float32": Case(
        "f = Cast <to = 1> (many)\n y = Cast <to = 7> (f)\n z = Relu (x)",
        "y = Identity (many)\n z = Relu (x)",
        "f = Cast <to = 1> (many)\n i = Identity (f)\n y = Cast <to = 7> (i)\n z = Relu (x)",
        outputs="int64[1] y, float[A,B,C,D] z",
    ),
    "cast-like-another-type": Case(
        "d = Mul (one_float, one_float)\n y = CastLike (x, d)",
        "d = Mul (one_double, one_double)\n y = CastLike (x, d)",
        "d = Mul (one_float, one_float)\n i = Identity (x)\n y = CastLike (i, d)",
        runs=False,
    ),
    "slopes-of-prelu": Case(
        f"z = Conv (x, v)\n n = {FOLDED.format('z')}\n y = PRelu (n, slope)",
        "n = Conv (x, folded_v, shift)\n y = PRelu (n, steep)",
        "n = Conv (x, folded_v, shift)\n y = PRelu (n, slope)",
    ),
    "computed-slopes-of-prelu": Case(
        "a = Mul (x, c)\n s = ReduceMax <keepdims = 1, axes = [0, 2, 3]> (x)\n p = PRelu (a, s)\n y = Div (p, c)",
        "s = ReduceMin <keepdims = 1, axes = [0, 2, 3]> (x)\n y = PRelu (x, s)",
        "a = Mul (c, x)\n s = ReduceMax <keepdims = 1, axes = [0, 2, 3]> (x)\n p = PRelu (a, s)\n y = Div (p, c)",
        inputs="float[N,4,H,W] x",
        shape=(2, 4, 3, 3),
        opset=15,
        other_opset=15,
    ),
    "integer-division": Case(
        "a = Div (x, two)\n y = Mul (a, two)",
        "y = Identity (x)",
        "i = Identity (x)\n a = Div (i, two)\n y = Mul (a, two)",
        inputs="int64[N,3,H,W] x",
        outputs="int64[A,B,C,D] y",
        runs=False,
    ),
    "opset-under-its-other-name": Case(
        "y = Softmax (x)", "y = Softmax (x)", "i = Identity (x)\n y = Softmax (i)", other_opset=12, opset=13
    ),
    "constant-in-one-model": Case(
        "a = Mul (x, c)\n y = Add (a, x)",
        "a = Mul (c, c)\n y = Add (a, c)",
        "a = Mul (c, x)\n y = Add (a, x)",
        inputs="float[1,4,1,1] x",
        shape=(1, 4, 1, 1),
    ),
    "switch-of-3": Case(
        f"a = {FOLDED.format('x')}\n y = ReduceMean <axes = [3], keepdims = 1> (a)",
        f"a = {FOLDED.format('x')}\n y = ReduceMean <axes = [3], keepdims = 3> (a)",
        f"a = {FOLDED.format('x')}\n y = ReduceMean <axes = [3]> (a)",
        inputs="float[N,4,H,W] x",
        shape=(2, 4, 3, 3),
    ),
    "resize-with-an-unread-region": Case(
        f'a = Resize <mode = "nearest"> (x, , twice)\n y = {FOLDED.format("a")}',
        f'b = {FOLDED.format("x")}\n y = Resize <mode = "nearest"> (b, ones, wider)',
        f'b = {FOLDED.format("x")}\n y = Resize <mode = "nearest"> (b, ones, twice)',
        inputs="float[N,4,H,W] x",
        shape=(2, 4, 3, 3),
    ),
    "constant-over-a-value": Case(
        "a = Div (one_float, x)\n b = Mul (a, c)\n y = Relu (b)",
        "a = Div (x, one_float)\n b = Mul (a, c)\n y = Relu (b)",
        "a = Div (one_float, x)\n b = Mul (c, a)\n y = Relu (b)",
        inputs="float[N,4,H,W] x",
        shape=(2, 4, 3, 3),
    ),
    "pad-of-a-half": Case(
        "a = Pad (x, border, rate)\n y = Mul (a, gain)",
        "a = Mul (x, gain)\n y = Pad (a, border, rate)",
        "i = Identity (x)\n a = Pad (i, border, rate)\n y = Mul (gain, a)",
    ),
    "beta-of-a-gemm-in-a-sum": Case(
        "a = Gemm <beta = 3.0> (x, square, p_b)\n b = MatMul (x, square)\n y = Add (a, b)",
        "y = Gemm (x, double, p_b)",
        "y = Gemm (x, double, thrice)",
        inputs="float[N,4] x",
        outputs="float[A,B] y",
        shape=(2, 4),
    ),
    "gemm-of-what-is-turned": Case(
        "a = Gemm <transA = 1> (x, square)\n y = Mul (a, gain)",
        "y = Gemm (x, scaled_square)",
        "y = Gemm <transA = 1> (x, scaled_square)",
        inputs="float[4,4] x",
        outputs="float[4,4] y",
        shape=(4, 4),
    ),
    "maximum-over-all-axes": Case(
        "a = Mul (x, growing)\n t = Transpose <perm = [1, 0, 2, 3]> (a)\n y = ReduceMax (t)",
        "t = Transpose <perm = [1, 0, 2, 3]> (x)\n y = ReduceMax (t)",
        "a = Mul (growing, x)\n t = Transpose <perm = [1, 0, 2, 3]> (a)\n y = ReduceMax (t)",
    ),
    "axis-of-an-old-product": Case(
        "y = Mul <axis = 1, broadcast = 1> (x, p_s)",
        "y = Mul <axis = 3, broadcast = 1> (x, p_s)",
        "i = Identity (x)\n y = Mul <axis = 1, broadcast = 1> (i, p_s)",
        inputs="float[N,4,H,4] x",
        opset=6,
        other_opset=6,
        runs=False,
    ),
}
VALUES["square"] = parameters({"square": (4, 4)}, seed=5)["square"]
VALUES |= {"double": 2 * VALUES["square"], "scaled_square": 3 * VALUES["square"], "thrice": 3 * VALUES["p_b"]}
VALUES["kernel"] = parameters({"kernel": (5, 4, 3, 3)}, seed=4)["kernel"]
VALUES["scaled_kernel"] = VALUES["kernel"] * VALUES["c"]


def build(case: Case, body: str, opset: int) -> onnx.ModelProto:
    proto = model(f"g ({case.inputs}) => ({case.outputs}) {{ {body} }}", opset=opset)
    used = {name for node in proto.graph.node for name in node.input}
    for name in sorted(used & VALUES.keys()):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(VALUES[name], name))
    return proto


@pytest.mark.parametrize("name", CASES)
def test_it_is_not_proved(name: str) -> None:
    case = CASES[name]
    source, wrong = build(case, case.original, case.opset), build(case, case.wrong, case.other_opset)
    if name == "opset-under-its-other-name":
        wrong.opset_import[0].domain = "ai.onnx"
    verdict = verify(source, wrong, method="local")
    assert verdict.status != "passed", verdict
    assert "proved" not in {proof.method for proof in verdict.sites if "Conv" in proof.reason}


@pytest.mark.parametrize("name", CASES)
def test_its_right_counterpart_is_proved(name: str) -> None:
    case = CASES[name]
    source, right = build(case, case.original, case.opset), build(case, case.right, case.opset)
    verdict = verify(source, right, method="local")
    assert verdict.status == "passed", verdict


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.runs])
def test_each_differs_in_onnx_runtime(name: str) -> None:
    case = CASES[name]
    x = case.scale * np.random.default_rng(0).standard_normal(case.shape).astype(np.float32)
    sources = [(case.original, case.opset), (case.wrong, case.other_opset), (case.right, case.opset)]
    first, wrong, right = (run(build(case, body, opset), {"x": x}) for body, opset in sources)
    assert same(first, right)
    assert not same(first, wrong)


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    """Equal shapes, and numbers that differ by rounding alone."""
    return all(
        one.shape == two.shape
        and (np.allclose(one, two, rtol=1e-4, atol=1e-4) if one.dtype.kind == "f" else np.array_equal(one, two))
        for one, two in zip(first, second, strict=True)
    )
