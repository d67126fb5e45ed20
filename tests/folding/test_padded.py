"""A batch norm in front of a zero-padded convolution: k goes into the weights, h / k stays as an Add or joins what made its input."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from bnexport.folding import fold, verify
from bnexport.model_io import to_proto
from tests.folding.reading.test_decomposed import operators_of
from tests.support.claims import prove_claims
from tests.support.onnx_text import batch_norm, batch_norms, fold_and_check, model, operators

X = "float[N,6,H,W] x"
NORM = "z = BatchNormalization (x, p_s, p_b, p_m, p_v)"
P = batch_norm("p", 6)
PADS = "pads = [1,1,1,1]"
W = {"w": (8, 6, 3, 3)}
# Body, parameters, and the operators that are left with leftover="arithmetic".
LEAVES = {
    "input": (f"{NORM}\n y = Conv <{PADS}> (z, w)", W | P, ["Add", "Conv"]),
    "strided": (f"{NORM}\n y = Conv <{PADS}, strides = [2,2]> (z, w)", W | P, ["Add", "Conv"]),
    "dilated": (f"{NORM}\n y = Conv <pads = [2,2,2,2], dilations = [2,2]> (z, w)", W | P, ["Add", "Conv"]),
    "same": (f'{NORM}\n y = Conv <auto_pad = "SAME_UPPER"> (z, w)', W | P, ["Add", "Conv"]),
    "one-side": (f"{NORM}\n y = Conv <pads = [1,0,0,0]> (z, w)", W | P, ["Add", "Conv"]),
    "grouped": (f"{NORM}\n y = Conv <{PADS}, group = 2> (z, w)", {"w": (8, 3, 3, 3)} | P, ["Add", "Conv"]),
    "depthwise": (f"{NORM}\n y = Conv <{PADS}, group = 6> (z, w)", {"w": (6, 1, 3, 3)} | P, ["Add", "Conv"]),
    "two-readers": (f"{NORM}\n a = Conv <{PADS}> (z, w)\n b = Conv <{PADS}> (z, v)\n y = Mul (a, b)",
        W | {"v": (8, 6, 3, 3)} | P, ["Add", "Conv", "Conv", "Mul"]),
    "bias": (f"{NORM}\n y = Conv <{PADS}> (z, w, b)", W | {"b": (8,)} | P, ["Add", "Conv"]),
    # h / k joins the bias of what made one operand of a sum, and no node is left, in any form of what stays.
    "behind-sum": (f"a = Conv (x, v)\n s = Sigmoid (x)\n u = Add (a, s)\n {NORM.replace('(x', '(u')}\n y = Conv <{PADS}> (z, w)",
        W | {"v": (6, 6, 1, 1)} | P, ["Conv", "Sigmoid", "Add", "Conv"]),
    "behind-difference": (f"a = Conv (x, v)\n s = Sigmoid (x)\n u = Sub (s, a)\n {NORM.replace('(x', '(u')}\n y = Conv <{PADS}> (z, w)",
        W | {"v": (6, 6, 1, 1)} | P, ["Conv", "Sigmoid", "Sub", "Conv"]),
}  # fmt: skip
# The scale does not move: another reader wants the normalised value, an activation is in between, or a channel is 0.
STAYS = {
    "read-elsewhere": (f"{NORM}\n a = Conv <{PADS}> (z, w)\n y = Mul (a, z)", {"w": (6, 6, 3, 3)} | P),
    "an-output": (f"{NORM}\n z2 = Sigmoid (z)\n y = Conv <{PADS}> (z2, w)", W | P),
    "activation": (f"{NORM}\n a = Tanh (z)\n y = Conv <{PADS}> (a, w)", W | P),
    "reader-without-rule": (f"{NORM}\n a = Conv <{PADS}> (z, w)\n b = Softmax <axis = 1> (z)\n y = Add (a, b)", {"w": (6, 6, 3, 3)} | P),
    "computed-weight": (f"{NORM}\n v = Tanh (q)\n y = Conv <{PADS}> (z, v)", {"q": (8, 6, 3, 3)} | P),
}  # fmt: skip


def graph(body: str) -> str:
    return f"g ({X}) => (float[N,C,A,B] y) {{ {body} }}"


@pytest.mark.parametrize("case", LEAVES)
def test_the_scale_goes_into_the_weights(case: str) -> None:
    body, shapes, left = LEAVES[case]
    folded, result = fold_and_check(model(graph(body), shapes), leftover="arithmetic", sizes={"H": 7, "W": 7})
    assert operators(folded) == left
    assert {proof.method for proof in result.report.verification.sites} == {"proved"}


@pytest.mark.parametrize("case", STAYS)
def test_it_stays_where_it_is(case: str) -> None:
    body, shapes = STAYS[case]
    if case == "computed-weight":  # an input, so that it is no constant
        proto = model(
            graph(body).replace(X, f"{X}, float[8,6,3,3] q"), {key: shapes[key] for key in shapes if key != "q"}
        )
    else:
        proto = model(graph(body), shapes)
    source = [node.op_type for node in proto.graph.node]
    result = fold(proto, leftover="arithmetic")
    expected = [each for op in source for each in (["Mul", "Add"] if op == "BatchNormalization" else [op])]
    assert operators_of(result) == expected
    assert result.report.sites[0].outcome == "restated" and result.report.verification.passed


@pytest.mark.parametrize("leftover", ["batch-norm", "conv"])
def test_an_add_in_place_of_a_batch_norm_is_only_made_on_request(leftover: str) -> None:
    body, shapes, _ = LEAVES["input"]
    kept = "BatchNormalization" if leftover == "batch-norm" else "Conv"
    assert operators_of(fold(model(graph(body), shapes), leftover=leftover)) == [kept, "Conv"]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["behind-sum", "behind-difference"])
def test_a_shift_that_finds_a_place_needs_no_request(case: str) -> None:
    body, shapes, left = LEAVES[case]
    assert operators_of(fold(model(graph(body), shapes))) == left


@pytest.mark.parametrize("case", LEAVES)
def test_a_map_that_forgets_the_padding_is_refuted(case: str) -> None:
    """The shift moved into the bias, as if there were no border: wrong by h where zeros are read."""
    body, shapes, _ = LEAVES[case]
    source = model(graph(body), shapes)
    result = fold(source, leftover="arithmetic", verify=False)
    report, folded = result.report, to_proto(result.model)
    floats = [tensor for tensor in folded.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    changed = 0
    for tensor in floats:
        values = onnx.numpy_helper.to_array(tensor).copy()
        if values.ndim != 4 or values.shape[1] != 6 or values.shape[0] != 1:  # the Add's constant
            continue
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros_like(values), tensor.name))
        changed += 1
    if not changed:  # no Add is left: the weights of the padded Conv forget k
        tensor = next(each for each in floats if list(each.dims)[2:] == [3, 3])
        original = next(each for each in source.graph.initializer if each.name == "w")
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(original), tensor.name))
    assert prove_claims(source, folded, report).status == "failed"
    assert verify(source, folded).status == "failed"


def check_random(seeds: range) -> None:
    names = list(LEAVES)
    for seed in seeds:
        body, shapes, left = LEAVES[names[seed % len(names)]]
        source = model(graph(body), shapes, seed=seed)
        generator = np.random.default_rng(seed)
        for tensor in source.graph.initializer:
            values = onnx.numpy_helper.to_array(tensor)
            if not tensor.name.endswith("_v"):
                signs = np.where(generator.random(values.shape) < 0.3, -1, 1) * 10.0 ** generator.uniform(-2, 2)
                tensor.CopyFrom(onnx.numpy_helper.from_array((values * signs).astype(np.float32), tensor.name))
        result = fold(source, leftover="arithmetic", verify="both" if seed % 2 else "local")
        assert operators_of(result) == left and batch_norms(to_proto(result.model)) == 0, seed
        assert {proof.method for proof in result.report.verification.sites} == {"proved"}, seed


def test_random_parameters() -> None:
    check_random(range(24))


@pytest.mark.slow
def test_300_random_parameters() -> None:
    check_random(range(1000, 1300))
