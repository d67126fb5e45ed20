"""Sums of branches that are easily merged wrongly: each is merged right or stays, its outputs those of the source."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.folding.parallel.sums import BN, PAD, SHAPES, X, Y, build, check, named
from tests.support.onnx_text import assert_near, batch_norm, exact, make_inputs, model, operators, run

BLOCK = f"a = Conv (x, w1)\n c = Conv <{PAD}> (x, w3, b)\n t = Add (a, c)\n y = Add (t, x)"
STAYS = ["Conv", "Conv", "Add", "Add"]


def reasons(proto: onnx.ModelProto, **options: object) -> list[str]:
    """Codes of the refusals of the rule."""
    report = fold(proto, verify=False, **options).report  # type: ignore[arg-type]
    return [refusal.code for site in report.sites for refusal in site.refusals if refusal.rule == "parallel"]


def test_the_sum_is_a_graph_output() -> None:
    nodes = f"a = Conv (x, w1)\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)\n z = Relu (y)"
    folded = check(build(nodes, outputs=f"{Y}, float[N,A,B,D] z"), ["Conv", "Relu"])
    assert [value.name for value in folded.graph.output] == ["y", "z"]


def test_a_branch_is_a_graph_output() -> None:
    nodes = f"a = Conv (x, w1)\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)"
    check(build(nodes, outputs=f"{Y}, float[N,A,B,D] a"), ["Conv", "Conv", "Add"])


def test_the_base_is_a_graph_output() -> None:
    nodes = f"r = Relu (x)\n a = Conv (r, w1)\n c = Conv <{PAD}> (r, w3)\n y = Add (a, c)"
    check(build(nodes, outputs=f"{Y}, float[N,A,B,D] r"), ["Relu", "Conv"])


@pytest.mark.parametrize("computed", ["input", "node", "overridable"])
def test_a_weight_that_the_model_does_not_fix(computed: str) -> None:
    name = {"input": "k", "overridable": "w1", "node": "h"}[computed]
    weight = "" if computed == "overridable" else ", float[4,4,1,1] k"
    first = "h = Neg (k)\n" if computed == "node" else ""
    nodes = f"{first} a = Conv (x, {name})\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)"
    proto = build(nodes, inputs=X + weight)
    if computed == "overridable":
        proto.graph.input.append(onnx.helper.make_tensor_value_info("w1", onnx.TensorProto.FLOAT, (4, 4, 1, 1)))
    check(proto, ["Neg"] * (computed == "node") + ["Conv", "Conv", "Add"])
    assert reasons(proto) == ["overridable" if computed == "overridable" else "not-constant"]


def test_a_batch_norm_in_training_stays() -> None:
    nodes = f"a = Conv (x, w1)\n n, e, v = {BN} <training_mode=1> (x, p_s, p_b, p_m, p_v)\n y = Add (a, n)"
    result = fold(build(nodes), verify=False)
    assert operators(to_proto(result.model)) == ["Conv", BN, "Add"]


def test_contradicting_sizes_stay() -> None:
    """Results of 2 and of 4 channels: no input can make it run, and nothing certain says so before."""
    nodes = "r = Relu (x)\n a = Conv (r, w1)\n c = Conv (r, less)\n y = Add (a, c)"
    proto = build(nodes, inputs="float[N,C,H,W] x")
    result = fold(proto, verify=False)
    assert operators(to_proto(result.model)) == ["Relu", "Conv", "Conv", "Add"]
    assert reasons(proto) == ["shape"]


def test_channels_that_contradict_each_other_stay() -> None:
    nodes = "r = Relu (x)\n a = Conv (r, w1)\n c = Conv (r, narrow1)\n y = Add (a, c)"
    weight = np.ones((4, 8, 1, 1), np.float32)
    proto = build(nodes, inputs="float[N,C,H,W] x", narrow1=weight)
    assert operators(to_proto(fold(proto, verify=False).model)) == ["Relu", "Conv", "Conv", "Add"]
    assert reasons(proto) == ["shape"]


def test_vectors_stay() -> None:
    nodes = "a = MatMul (x, m)\n c = MatMul (x, m2)\n y = Add (a, c)"
    proto = model(f"g (float[7] x) => (float[7] y) {{ {nodes} }}", {"m": (7, 7), "m2": (7, 7)})
    assert operators(to_proto(fold(proto).model)) == ["MatMul", "MatMul", "Add"]
    assert reasons(proto) == ["rank"]


def test_matmuls_of_unknown_rank_stay() -> None:
    nodes = "r = other.Thing (x)\n a = MatMul (r, m)\n c = MatMul (r, m2)\n y = Add (a, c)"
    header = '<ir_version: 8, opset_import: ["": 17, "other": 1]>'
    proto = model(f"g ({X}) => ({Y}) {{ {nodes} }}", {"m": (7, 7), "m2": (7, 7)}, header=header)
    assert operators(to_proto(fold(proto, verify=False).model)) == ["Thing", "MatMul", "MatMul", "Add"]
    assert reasons(proto) == ["rank"]


def test_a_later_fold_scales_a_weight_of_another_shape() -> None:
    """The depthwise carrier becomes a convolution of two groups, which a batch norm behind another sum scales."""
    nodes = (
        f"a = Conv <group=4, {PAD}> (x, d3)\n c = Conv <group=4, {PAD}> (x, e3)\n e = Conv <group=2> (x, g1)"
        f"\n r = Relu (x)\n f = Conv (r, w1)\n t = Sum (a, c, e)\n u = Add (t, f)\n y = {BN} (u, p_s, p_b, p_m, p_v)"
    )
    random = np.random.default_rng(0).standard_normal
    weights = {"e3": random((4, 1, 3, 3)).astype(np.float32), "g1": random((4, 2, 1, 1)).astype(np.float32)}
    check(build(nodes, **weights), ["Conv", "Relu", "Conv", "Add"])


HUGE = {
    "shifted": (
        "a = Conv <pads=[0,0,1000000,1000000]> (x, w1)\n c = Conv <pads=[1000000,1000000,0,0]> (x, v1)\n t = Add (a, c)"
        f"\n n = {BN} (t, p_s, p_b, p_m, p_v)\n e = Conv <pads=[1000000,1000000,0,0]> (x, w1)\n y = Add (n, e)"
    ),
    "pool": "a = AveragePool <kernel_shape=[1000000,1000000]> (x)\n c = Conv (x, w1)\n y = Add (a, c)",
    "outer-product": "a = Conv (x, to_one)\n c = Conv (a, from_one)\n y = Add (c, x)",
}


@pytest.mark.parametrize("case", HUGE)
def test_a_size_that_a_file_may_claim_is_not_allocated(case: str) -> None:
    channels = 20_000 if case == "outer-product" else 4
    values = {"to_one": np.ones((1, channels, 1, 1), np.float32), "from_one": np.ones((channels, 1, 1, 1), np.float32)}
    proto = build(
        HUGE[case], X.replace("4", str(channels)), **{name: values[name] for name in named(HUGE[case], values)}
    )
    assert "too-large" in reasons(proto)
    assert not any(site.summary for site in fold(proto, verify=False).report.sites)


def test_half_precision() -> None:
    proto = build(BLOCK, X.replace("float", "float16"), Y.replace("float", "float16"), dtype="float16")
    inputs = make_inputs(proto)
    folded = to_proto(fold(proto).model)
    assert operators(folded) == ["Conv"]
    assert_near(run(folded, inputs)[0], run(proto, inputs)[0])


def test_half_precision_that_overflows_stays() -> None:
    """Each weight is finite, their sum is not."""
    large = np.full((4, 4, 1, 1), 60000, np.float16)
    nodes = "a = Conv (x, u)\n c = Conv (x, v)\n y = Add (a, c)"
    proto = build(nodes, X.replace("float", "float16"), Y.replace("float", "float16"), u=large, v=large)
    assert operators(to_proto(fold(proto, verify=False).model)) == ["Conv", "Conv", "Add"]
    assert reasons(proto) == ["overflow"]
    small = build(nodes, X.replace("float", "float16"), Y.replace("float", "float16"), u=large, v=-large)
    assert operators(to_proto(fold(small, verify=False).model)) == ["Conv"]


def test_half_precision_bias_that_overflows_stays() -> None:
    large = np.full(4, 60000, np.float16)
    nodes = "a = Conv (x, w1, u)\n c = Conv (x, v1, u)\n y = Add (a, c)"
    proto = build(nodes, X.replace("float", "float16"), Y.replace("float", "float16"), dtype="float16", u=large)
    assert operators(to_proto(fold(proto, verify=False).model)) == ["Conv", "Conv", "Add"]
    assert reasons(proto) == ["overflow"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_stays(value: float) -> None:
    proto = build(BLOCK, w1=np.full((4, 4, 1, 1), value, np.float32))
    folded = to_proto(fold(proto, verify=False).model)
    assert operators(folded) == ["Conv", "Conv", "Add"], "the other two are merged"
    assert any(np.isnan(tensor) or np.isinf(tensor) for tensor in weights(folded))


def weights(proto: onnx.ModelProto) -> list[float]:
    return [float(onnx.numpy_helper.to_array(tensor).reshape(-1)[0]) for tensor in proto.graph.initializer]


def test_a_quantized_weight_stays() -> None:
    nodes = f"k = DequantizeLinear (q8, s8)\n a = Conv (x, k)\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)"
    values = {"q8": np.full((4, 4, 1, 1), 3, np.int8), "s8": np.float32(0.5)}
    proto = build(nodes, **values)  # type: ignore[arg-type]
    assert operators(to_proto(fold(proto, verify=False).model)) == ["DequantizeLinear", "Conv", "Conv", "Add"]
    assert reasons(proto) == ["quantized"]


def test_a_weight_that_others_read_is_copied() -> None:
    nodes = f"{BLOCK.replace('y = ', 's = ')}\n e = Conv <{PAD}> (s, w3)\n y = Relu (e)"
    folded = check(build(nodes), ["Conv", "Conv", "Relu"])
    source = build(nodes)
    kept = {tensor.name: tensor for tensor in folded.graph.initializer}["w3"]
    assert kept.raw_data == {tensor.name: tensor for tensor in source.graph.initializer}["w3"].raw_data


def test_weights_in_constant_nodes() -> None:
    first = "k = Constant <value_floats=[0.5, 1.0, 2.0, 4.0]> ()\n g = Reshape (k, s4)\n"
    nodes = f"{first} a = Conv <group=4> (x, g)\n c = Conv <group=4, {PAD}> (x, d3)\n y = Add (a, c)"
    check(build(nodes, s4=np.array([4, 1, 1, 1])), ["Conv"])


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks(rank: int) -> None:
    axes, size = ",".join("AB D".replace(" ", "")[:rank]), (4, 4, *[1] * rank)
    inputs = f"float[N,4,{','.join(['H'] * rank)}] x"
    pads = ",".join("1" * 2 * rank)
    nodes = f"a = Conv (x, u)\n c = Conv <pads=[{pads}]> (x, v)\n n = {BN} (x, p_s, p_b, p_m, p_v)\n y = Sum (a, c, n)"
    random = np.random.default_rng(0).standard_normal
    values = {"u": random(size).astype(np.float32), "v": random((4, 4, *[3] * rank)).astype(np.float32)}
    check(build(nodes, inputs, f"float[N,4,{axes}] y", **values), ["Conv"])


GEMMS = {
    "two": ("a = Gemm (x, m)\n c = Gemm (x, m2)\n y = Add (a, c)", ["Gemm"]),
    "alpha-beta-transposed": (
        "a = Gemm <alpha=0.5, beta=2.0, transB=1> (x, m, last)\n c = Gemm <alpha=2.0> (x, m2)\n y = Sub (a, c)",
        ["Gemm"],
    ),
    "with-matmul-and-identity": (
        "a = Gemm (x, m, last)\n c = MatMul (x, m2)\n t = Add (a, c)\n y = Add (x, t)",
        ["Gemm"],
    ),
    "batch-norm-in-front": (
        f"n = {BN} (x, r_s, r_b, r_m, r_v)\n a = Gemm (n, m, last)\n o = {BN} (x, u_s, u_b, u_m, u_v)\n c = Gemm (o, m2)"
        "\n t = Add (a, c)\n y = Mul (t, scalar)",
        ["Gemm"],
    ),
    "low-rank": (
        "a = MatMul (x, m)\n s = MatMul (x, down)\n c = MatMul (s, up)\n d = Mul (c, scalar)\n y = Add (a, d)",
        ["MatMul"],
    ),
    "low-rank-and-identity-would-grow": (
        "s = MatMul (x, down)\n c = MatMul (s, up)\n y = Add (x, c)",
        ["MatMul", "MatMul", "Add"],
    ),
    "transposed-data": ("a = Gemm <transA=1> (x, m)\n c = Gemm (x, m2)\n y = Add (a, c)", ["Gemm", "Gemm", "Add"]),
    "matrix-of-constants": ("a = Gemm (x, m, m2)\n c = Gemm (x, m2)\n y = Add (a, c)", ["Gemm", "Gemm", "Add"]),
    "vector-weight": ("a = MatMul (x, last)\n c = MatMul (x, scale7)\n y = Add (a, c)", ["MatMul", "MatMul", "Add"]),
}


@pytest.mark.parametrize("case", GEMMS)
def test_gemm(case: str) -> None:
    nodes, expected = GEMMS[case]
    extra = {**batch_norm("r", 7), **batch_norm("u", 7), "down": (7, 2), "up": (2, 7), "scale7": (7,)}
    values = {
        name: np.abs(np.random.default_rng(5).standard_normal(extra[name])).astype(np.float32)
        for name in named(nodes, extra)
    }
    output = "float[A] y" if case == "vector-weight" else "float[A,B] y"
    check(build(nodes, "float[M,7] x".replace("M", "7"), output, **values), expected)


def test_in_the_branches_of_an_if() -> None:
    nodes = f"""y = If (c) <then_branch = one () => (float[N,A,B,D] y1) {{
            a = Conv (x, w1)
            d = Conv <{PAD}> (x, w3)
            y1 = Add (a, d) }},
        else_branch = two () => (float[N,A,B,D] y2) {{ y2 = Conv (x, v1) }}>"""
    proto = build(nodes, f"{X}, bool c")
    folded = check(proto, ["If"])
    (body, _) = (attribute.g for attribute in folded.graph.node[0].attribute)
    assert [node.op_type for node in body.node] == ["Conv"]


def test_a_sum_that_a_body_reads() -> None:
    nodes = f"""a = Conv (x, w1)
        d = Conv <{PAD}> (x, w3)
        t = Add (a, d)
        y = If (c) <then_branch = one () => (float[N,A,B,D] y1) {{ y1 = Relu (t) }},
        else_branch = two () => (float[N,A,B,D] y2) {{ y2 = Conv (a, v1) }}>"""
    check(build(nodes, f"{X}, bool c"), ["Conv", "Conv", "Add", "If"])
    check(build(nodes.replace("(a, v1)", "(t, v1)"), f"{X}, bool c"), ["Conv", "If"])


def test_in_a_function() -> None:
    """Constants inside, so that no call has to be inlined."""
    body = f"""<ir_version: 8, opset_import: ["": 17, "local": 1]>
        g ({X}) => ({Y}) {{ y = local.block (x) }}
        <domain: "local", opset_import: ["": 17]> block (x) => (y) {{
            k = Constant <value = float[1, 4, 1, 1] {{1.0, 2.0, 3.0, 4.0}}> ()
            s = Constant <value_ints=[4, 4, 1, 1]> ()
            w = Expand (k, s)
            a = Conv (x, w)
            y = Sub (a, x)
        }}"""
    proto = onnx.parser.parse_model(body)
    inputs = make_inputs(proto)
    folded = to_proto(fold(proto, verify=False).model)
    assert_near(run(folded, inputs)[0], run(proto, inputs)[0])
    (function,) = folded.functions
    assert [node.op_type for node in function.node] == ["Constant", "Conv"]


@pytest.mark.parametrize("opset", [6, 7, 9, 13, 21])
def test_opsets(opset: int) -> None:
    proto = model(f"g ({X}) => ({Y}) {{ {BLOCK} }}", {name: SHAPES[name] for name in ("w1", "w3", "b")}, opset=opset)
    inputs = make_inputs(proto)
    folded = to_proto(fold(proto, verify=False).model)
    assert operators(folded) == ["Conv"]
    assert_near(exact(folded, inputs)[0].astype(np.float32), exact(proto, inputs)[0])


def test_a_broadcasting_add_before_opset_7_stays() -> None:
    nodes = "a = Conv (x, w1)\n c = Conv (x, one)\n d = Flatten (c)\n y = Add <broadcast=1, axis=0> (a, x)"
    proto = model(f"g ({X}) => ({Y}) {{ {nodes} }}", {"w1": (4, 4, 1, 1), "one": (1, 4, 1, 1)}, opset=6)
    assert "Add" in operators(to_proto(fold(proto, verify=False).model))


def test_a_new_batch_norm_is_never_written() -> None:
    """Layer scale around a pool, as in PoolFormer: no batch norm before, none after."""
    nodes = (
        f"a = AveragePool <kernel_shape=[3,3], {PAD}> (x)\n d = Sub (a, x)\n u = Mul (d, c_s)\n t = Add (x, u)"
        "\n e = Mul (t, c_s)\n y = Add (e, c_s)"
    )
    folded = check(build(nodes), ["AveragePool", "Sub", "Mul", "Add", "Mul", "Add"])
    assert BN not in operators(folded)


NORMS = (
    f"n = {BN} (x, p_s, p_b, p_m, p_v)\n c = Conv <{PAD}> (x, w3)\n d = {BN} (c, q_s, q_b, q_m, q_v)\n y = Add (n, d)"
)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, ["Conv"]),
        ({"only": ["parallel"]}, ["Conv"]),
        ({"skip": ["parallel"]}, [BN, "Conv", "Add"]),
        ({"skip": [f"{BN} -> n"]}, [BN, "Conv", "Add"]),
        ({"skip": [f"{BN} -> d"]}, [BN, BN, "Conv", "Add"]),
        ({"only": [f"{BN} -> d"]}, [BN, "Conv", "Add"]),
        ({"only": [f"{BN} -> n", f"{BN} -> d"]}, ["Conv"]),
    ],
)
def test_selection(options: dict[str, list[str]], left: list[str]) -> None:
    check(build(NORMS), left, **options)  # type: ignore[arg-type]


def test_the_report_has_a_line_for_each_merge() -> None:
    result = fold(build(f"{NORMS.replace('y = ', 's = ')}\n r = Relu (s)\n y = Add (r, s)"))
    (site,) = result.report.sites
    assert site.summary == "2 branches, 2 batch norms -> 1 Conv 3x3"
    assert (site.outcome, site.rules, site.channels) == ("folded", ("parallel",), 4)
    assert set(site.nodes) == {f"{BN} -> n", "Conv -> c", f"{BN} -> d", "Add -> s"}
    names = [node.name for node in to_proto(result.model).graph.node]
    assert set(site.targets) <= set(names)
    assert result.report.verification is not None and result.report.verification.passed


def test_names_are_kept() -> None:
    """The convolution that carries the sum keeps its name and its weight's, the sum's value its name."""
    proto = build(f"{BLOCK.replace('y = ', 's = ')}\n y = Relu (s)")
    proto.graph.node[1].name = "block.conv3"
    folded = to_proto(fold(proto, verify=False).model)
    assert folded.graph.node[0].name == "block.conv3"
    assert folded.graph.node[0].output[0] == "s"
    assert {tensor.name for tensor in folded.graph.initializer} == {"w3", "b"}
