"""What random inputs show: integers of a whole range, floats of several scales, several sizes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bnexport import verify
from bnexport.errors import UnsupportedModelError
from bnexport.folding import fold
from bnexport.verification import inputs
from bnexport.verification.input_demands import find_further, find_ranges
from tests.support.claims import outcome
from tests.support.onnx_text import model

INT64 = (-(2**63), 2**63 - 1)
TABLE = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)


BYTE, INDICES, COLUMNS, BIT = ((-128, 127), (0, 1)), ((-50, 49), (0, 49), (0, 1)), ((-4, 3), (0, 3), (0, 1)), ((0, 1),)
RANGES = [
    ("h = Cast <to = 1> (x) y = Sigmoid (h)", BYTE, INT64),
    ("h = Add (x, x) y = Cast <to = 1> (h)", BYTE, INT64),
    ("h = Cast <to = 2> (x) y = Cast <to = 1> (h)", BYTE, INT64),
    ("h = Cast <to = 6> (x) y = Gather (t, h)", INDICES, None),
    ("h = Cast <to = 6> (x) c = Cast <to = 7> (h) y = Tile (t, c)", BIT, None),
    ("h = Cast <to = 9> (x) y = Where (h, z, z)", BYTE, INT64),
    ("l = Less (x, many) y = Cast <to = 1> (l)", ((-2000, 2000), *BYTE), INT64),
    ("y = Gather (t, x)", INDICES, None),
    ("h = Unsqueeze (x, o) y = Gather <axis = 1> (t, h)", COLUMNS, None),
    ("y = Gather (z, x)", BIT, None),
    ("y = Tile (t, x)", BIT, None),
    ("y = Expand (t, x)", BIT, None),
    ("h = Div (x, x) y = Cast <to = 1> (h)", BIT, None),
    ("h = my.Op (x) y = Cast <to = 1> (h)", BIT, None),
    ("""c = Constant <value = bool {1}> () h = If (c) <then_branch = a () => (int64[2] u) { u = Identity (x) },
        else_branch = b () => (int64[2] v) { v = Identity (x) }> y = Tile (t, h)""", BIT, None),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "ranges", "whole"), RANGES)
def test_ranges_of_integers(nodes: str, ranges: tuple[tuple[int, int], ...], whole: tuple[int, int] | None) -> None:
    header = '<ir_version: 8, opset_import: ["": 17, "my": 1]>'
    body = f"g (int64[2] x, float[N,4] z) => (float[A,B] y) {{ {nodes} }}"
    proto = ir.from_proto(model(body, values={"t": TABLE, "o": np.array([0]), "many": np.array(1000)}, header=header))
    assert find_ranges(proto.graph.inputs[0], proto) == (ranges, whole)


def test_ranges_of_types() -> None:
    body = "g (uint8[2] a, int8[2] b, uint16[2] c, int32[2] d) => (float[2] y) {{ {} y = Sum (e, f, h, i) }}"
    casts = "".join(f"{two} = Cast <to = 1> ({one})\n" for one, two in ("ae", "bf", "ch", "di"))
    proto = ir.from_proto(model(body.format(casts)))
    byte, signed, all_16, all_32 = (0, 255), (-128, 127), (0, 65535), (-(2**31), 2**31 - 1)
    found = [find_ranges(value, proto) for value in proto.graph.inputs]
    assert [ranges for ranges, _ in found] == [(each, (0, 1)) for each in (byte, signed, byte, signed)]
    assert [whole for _, whole in found] == [byte, signed, all_16, all_32]
    body = "g (uint8[2] x) => (float[2,4] y) { i = Cast <to = 6> (x) y = Gather (t, i) }"
    for rows, ranges in ((50, ((0, 49), (0, 1))), (300, BIT)):
        proto = ir.from_proto(model(body, {"t": (rows, 4)}))
        assert find_ranges(proto.graph.inputs[0], proto)[0] == ranges


def test_what_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_ELEMENTS", 8)
    specs = [
        inputs.InputSpec("x", kind, "float32", (2, size)) for kind, size in (("float", 4), ("float", 5), (None, 1))
    ]
    assert inputs.draw(specs[:1], inputs.Draw(0, 1, (1,)), {})["x"].shape == (2, 4)
    for spec, says in zip(specs[1:], ("too large to make up", "no tensor of a known rank"), strict=True):
        with pytest.raises(UnsupportedModelError, match=says):
            inputs.draw([spec], inputs.Draw(0, 1, (1,)), {})


def row(nodes: str, **numbers: float) -> onnx.ModelProto:
    values = {name: np.float32(value) for name, value in numbers.items()}
    return model(f"g (float[N,40] x) => (float[N,40] y) {{ {nodes} }}", values=values)


@pytest.mark.parametrize("bias", [8.0, 40.0])
def test_an_elu_that_was_removed(bias: float) -> None:
    first, second = (row(f"a = Add (x, c) y = {name} (a)", c=bias) for name in ("Elu", "Identity"))
    result = verify(first, second)
    assert (result.status, result.input_scale > 1) == ("failed", True)
    assert verify(first, first).passed


def test_a_function_that_saturates() -> None:
    """Only where x is small does the last layer see more than signs."""
    first, right, wrong = (
        row(f"a = Mul (x, c) b = Clip (a, l, u) y = {name} (b)", c=1e5, l=0.25, u=1.0)
        for name in ("Abs", "Identity", "Sqrt")
    )
    assert verify(first, right).passed
    assert verify(first, wrong).status == "failed"


def test_what_the_other_scales_leave_open_counts_for_nothing() -> None:
    """exp(5 x) is infinite for most x of size 64."""
    proto = model("g (float[2,40] x) => (float[2,40] y) { a = Mul (x, c) y = Exp (a) }", values={"c": np.float32(5)})
    result = verify(proto, proto)
    assert (result.status, result.input_scale, result.samples) == ("passed", 1.0, 2)


def test_bounds_of_the_caller_are_for_one_scale() -> None:
    first, second = row("y = Mul (x, c)", c=1), row("y = Mul (x, c)", c=1.001)
    assert verify(first, second, atol=0.01).passed
    assert verify(first, second).status == "failed"


FURTHER = {
    "y = Relu (x)": [],
    "c = Greater (x, near) y = Where (c, x, near)": ["rounded"],
    "h = Exp (x) c = Greater (h, near) y = Where (c, x, near)": [],
    "h = Add (x, near) y = Floor (h)": ["rounded"],
    "c = IsNaN (x) y = Where (c, near, x)": ["nan"],
    "e = Equal (x, x) y = Where (e, x, near)": ["nan", "rounded"],
    "y = Add (x, far)": [4000.0],
    "c = IsInf (x) y = Where (c, near, x)": ["infinite"],
    "y = Hardmax (x)": ["rounded"],
    "p = MaxPool <kernel_shape = [2]> (x) y = Relu (p)": [],
    "p, i = MaxPool <kernel_shape = [2]> (x) y = Relu (p)": ["rounded"],
    "h = Neg (far) y = Clip (x, h, near)": [4000.0],
    "y = Min (x, sentinel)": [],
    "y = Min (x, last)": [],
    "y = Min (x, first)": [260.0],
    "m = ReduceMax <axes = [1]> (x) y = Elu (m)": [8.0, 8.0],
}


@pytest.mark.parametrize("nodes", FURTHER)
def test_further_sets_are_for_some_operators(nodes: str) -> None:
    numbers = {
        name: np.float32(value)
        for name, value in (("near", 6), ("last", 64), ("first", 65), ("far", 1000), ("sentinel", 1e9))
    }
    proto = ir.from_proto(model(f"g (float[N,3,4] x) => (float[A,B,C] y) {{ {nodes} }}", values=numbers))
    found = [each.kind if each.scale == 1.0 else each.scale for each in find_further(proto)]
    assert found == FURTHER[nodes]


def test_one_row() -> None:
    body = "g (float[N,3,1,1] x) => (float[N,3] y) {{ y = Squeeze (x{}) }}"
    first = model(body.format(", a"), values={"a": np.array([2, 3])})
    result = verify(first, model(body.format("")))
    assert result.status == "failed" and "expected float32[1, 3]" in result.reason
    assert {shapes[0][0] for shapes in verify(first, first).sizes} == {1, 2, 3}


def test_multiples_of_32() -> None:
    """At other sizes the reference does not run; they say nothing."""
    body = """g (float[N,3,H,W] x) => (float[N,3,A,B] y) {
        p = MaxPool <kernel_shape = [32, 32], strides = [32, 32]> (x) r = Resize (p, , s) y = Add (x, r) }"""
    proto = model(body, values={"s": np.array([1, 1, 32, 32], np.float32)})
    result = verify(proto, proto)
    assert result.passed
    assert {shapes[0] for shapes in result.sizes} == {(2, 3, 32, 32), (1, 3, 32, 32), (3, 3, 32, 64)}


def test_fixed_sizes_and_inputs_of_the_caller_stay() -> None:
    proto = model("g (float[2,3] x) => (float[2,3] y) { y = Relu (x) }")
    result = verify(proto, proto)
    assert (set(result.sizes), result.samples) == ({((2, 3),)}, 4)
    proto = model("g (float[N,3] x) => (float[N,3] y) { y = Relu (x) }")
    result = verify(proto, proto, inputs={"x": np.ones((4, 3), np.float32)})
    assert (result.sizes, result.samples) == ((((4, 3),),), 1)


def test_random_numbers_are_no_difference() -> None:
    proto = model("""g (float[N,6,H,W] x) => (float[N,8,A,B] y) {
        z = Conv (x, w:8.6.3.3) b = Norm (z, p:8) r = RandomNormalLike (b) y = Add (b, r) }""")
    whole, both = (fold(proto, verify=method).report.verification for method in ("whole", "both"))
    assert (whole.status, whole.reason) == ("not_verified", "the model draws random numbers")
    assert (both.method, outcome(both)) == ("local", ("passed", ["proved"]))


def test_an_output_that_is_empty_for_all_inputs() -> None:
    body = """g (float[N,100] x) => (float[M,100] y, float[N,100] z) {{ m = ReduceMean <axes = [1], keepdims = 0> (x)
        g = Greater (m, c) a = {} (x) y = Compress <axis = 0> (a, g) z = Relu (x) }}"""
    first, second = (model(body.format(name), values={"c": np.float32(1e7)}) for name in ("Neg", "Identity"))
    verdict = verify(first, second, method="whole")
    assert (verdict.status, verdict.reason) == ("not_verified", "output 'y' is empty for all inputs")
