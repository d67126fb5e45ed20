"""A lone Mul, Add, Sub or Div with constants leaves where a neighbour takes it, and no other node comes for it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from bnexport.folding import fold
from tests.support.onnx_text import batch_norm, fold_and_check, model, operators, operators_of

X = "float[N,6,H,W] x"
CONV = {"w": (8, 6, 3, 3)}


def test_in_matrix_products() -> None:
    body = "g (float[N,L,6] x) => (float[N,L,4] y) { z = MatMul (x, w)\n t = Add (z, b)\n y = Mul (t, s) }"
    folded, _ = fold_and_check(model(body, {"w": (6, 4), "b": (4,)}, values={"s": np.float32(0.125)}))
    assert operators(folded) == ["MatMul", "Add"]
    body = "g (float[N,6] x) => (float[N,4] y) { z = Gemm (x, w)\n t = Add (z, b)\n y = Div (t, s_s) }"
    folded, _ = fold_and_check(model(body, {"w": (6, 4), "b": (4,), "s_s": (1,)}))
    assert operators(folded) == ["Gemm"]
    alone = model(
        "g (float[N,L,6] x) => (float[N,L,4] y) { z = Add (x, b)\n y = MatMul (z, w) }", {"w": (6, 4), "b": (6,)}
    )
    assert operators_of(fold(alone)) == ["Add", "MatMul"]


@pytest.mark.parametrize(("pads", "left"), [("[0,0,0,0]", 0), ("[1,1,1,1]", 1)])
def test_gelu_written_out_stays_and_its_neighbours_fold(pads: str, left: int) -> None:
    """Its last factor is a map as well, and goes with the batch norm behind it."""
    gelu = (
        "r = Constant <value_float = 1.4142135> ()\n o = Constant <value_float = 1.0> ()\n h = Constant <value_float = 0.5> ()\n"
        " d = Div (n, r)\n e = Erf (d)\n f = Add (e, o)\n p = Mul (n, f)\n i = Mul (p, h)"
    )
    body = (
        f"z = Conv (x, w)\n n = BatchNormalization (z, p_s, p_b, p_m, p_v)\n {gelu}\n"
        f" m = BatchNormalization (i, q_s, q_b, q_m, q_v)\n y = Conv <pads = {pads}> (m, v)"
    )
    shapes = CONV | {"v": (4, 8, 3, 3)} | batch_norm("p", 8) | batch_norm("q", 8)
    folded, result = fold_and_check(
        model(f"g ({X}) => (float[N,4,A,B] y) {{ {body} }}", shapes), left=left, sizes={"H": 8, "W": 8}
    )
    kept = [each for each in operators(folded) if each != "Constant"]
    assert kept == ["Conv", "Div", "Erf", "Add", "Mul", *["BatchNormalization"] * left, "Conv"]
    assert {proof.method for proof in result.report.verification.sites} == {"proved"}


def test_integers_and_what_was_skipped_are_left_alone() -> None:
    body = "g (int64[N,6] x) => (int64[N,6] y) { z = Add (x, a)\n y = Mul (z, a) }"
    assert not fold(model(body, values={"a": np.arange(6)})).report.sites
    body = f"g ({X}) => (float[N,8,A,B] y) {{ z = Conv (x, w)\n y = Mul (z, c_s) }}"
    proto = model(body, CONV | {"c_s": (8, 1, 1)})
    proto.graph.node[1].name = "gain"
    assert operators_of(fold(proto, skip=["gain"])) == ["Conv", "Mul"]


def random_chain(seed: int, norms: bool = False) -> onnx.ModelProto:
    """Convolutions, activations and lone arithmetic in any order, sometimes read twice. norms: batch norms in between."""
    generator = np.random.default_rng(seed)
    nodes, channels = [], 6
    for i in range(int(generator.integers(3, 9))):
        kind = str(generator.choice(["conv", "padded", "Relu", "LeakyRelu", "Mul", "Add", "Sub", "Div", "skip"]))
        if kind in ("conv", "padded"):
            size, new = 3 if kind == "padded" else 1, int(generator.choice([4, 6, 8]))
            nodes.append(f"Conv <pads={[size // 2] * 4}> (v{i}, w{i}_s:{new}.{channels}.{size}.{size})")
            channels = new
        elif kind in ("Relu", "LeakyRelu"):
            nodes.append(f"{kind} (v{i})")
        elif kind == "skip":
            nodes.append(f"Add (v{i}, v{i})")
        else:
            shapes = ["-", "1", f"{channels}.1.1", f"1.{channels}.1.1", "1.1.1.1", "5"]
            operands = [f"v{i}", f"k{i}_s:{shapes[generator.integers(len(shapes))]}"]
            turned = kind != "Div" and generator.random() < 0.3
            nodes.append(f"{kind} ({', '.join(operands[:: -1 if turned else 1])})")
        if norms and generator.random() < 0.5:
            nodes[-1] = f"{nodes[-1]} v{i + 1} = Norm (u{i}, p{i}:{channels})"
    text = " ".join(
        f"{'u' if 'Norm' in node else 'v'}{i + ('Norm' not in node)} = {node}" for i, node in enumerate(nodes)
    )
    return model(f"g (float[N,6,5,5] v0) => (y) {{ {text} y = Identity (v{len(nodes)}) }}", seed=seed)


def check_random(seeds: range) -> None:
    gone = 0
    for seed in seeds:
        proto = random_chain(seed)
        result = fold(proto)
        gone += len(result.report.folded)
        removed = sum(len(site.nodes) for site in result.report.folded)
        pairs = sum(not site.lone for site in result.report.folded)  # an Add may be left of them
        assert 0 <= len(operators_of(result)) - (len(proto.graph.node) - removed) <= pairs, seed
        verdict = result.report.verification
        assert verdict is None or verdict.passed, (seed, verdict)
        assert verdict is None or {proof.method for proof in verdict.sites} <= {"proved", "compared"}, (seed, verdict)
    assert gone > len(seeds) // 3


def test_random_chains() -> None:
    check_random(range(20))


@pytest.mark.slow
def test_300_random_chains() -> None:
    check_random(range(1000, 1300))
