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


def random_chain(seed: int) -> onnx.ModelProto:
    """Convolutions, activations and lone arithmetic in any order, sometimes read twice."""
    generator = np.random.default_rng(seed)
    nodes, held, value, channels = [], [], "x", 6

    def parameter(*shape: int) -> str:
        array = generator.standard_normal(shape).astype(np.float32)
        held.append(onnx.numpy_helper.from_array(np.sign(array) * (np.abs(array) + np.float32(0.2)), f"p{len(held)}"))
        return held[-1].name

    for number in range(int(generator.integers(3, 9))):
        kind = generator.choice(["conv", "padded", "Relu", "LeakyRelu", "Mul", "Add", "Sub", "Div", "skip"])
        made = f"v{number}"
        if kind in ("conv", "padded"):
            pads = [1, 1, 1, 1] if kind == "padded" else [0, 0, 0, 0]
            size = 3 if kind == "padded" else 1
            new = int(generator.choice([4, 6, 8]))
            inputs = [value, parameter(new, channels, size, size)]
            nodes.append(onnx.helper.make_node("Conv", inputs, [made], pads=pads))
            channels = new
        elif kind in ("Relu", "LeakyRelu"):
            nodes.append(onnx.helper.make_node(kind, [value], [made]))
        elif kind == "skip":
            nodes.append(onnx.helper.make_node("Add", [value, value], [made]))
        else:
            shapes = [(), (1,), (channels, 1, 1), (1, channels, 1, 1), (1, 1, 1, 1), (5,)]
            operands = [value, parameter(*shapes[generator.integers(len(shapes))])]
            nodes.append(
                onnx.helper.make_node(kind, operands[:: 1 if kind == "Div" or generator.random() < 0.7 else -1], [made])
            )
        value = made
    nodes.append(onnx.helper.make_node("Identity", [value], ["y"]))
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, ["N", 6, 5, 5])],
        [onnx.helper.make_tensor_value_info("y", 1, None)],
        held,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


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
