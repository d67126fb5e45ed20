"""Pairs of models of which one computes something else, and what `verify` says of them: no case is a fold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from tests.support.onnx_text import model

_RNG = np.random.default_rng(3)
_TABLE = _RNG.standard_normal((1000, 8)).astype(np.float32)
_SMALL = _TABLE[:8] * np.array([1e5, 1, 1, 1, 1, 1, 1, 1], np.float32)


def _cut(rows: int) -> np.ndarray:
    """The table, with zeros from some row on."""
    return np.where(np.arange(1000)[:, None] < rows, _TABLE, np.float32(0))


@dataclasses.dataclass(frozen=True)
class Pair:
    """A graph in ONNX text in which one of two texts takes the place of OP.

    says: the status by each method. values: constants; one of two for each model is a pair. turned: the other way round
    as well.
    """

    graph: str
    mine: str
    theirs: str
    says: Mapping[str, str]
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    header: str | None = None
    opset: int = 17
    turned: bool = False

    def models(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        return self._model(0, self.mine), self._model(1, self.theirs)

    def _model(self, index: int, text: str) -> onnx.ModelProto:
        body = self.graph.replace("OP", text)
        words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
        values = {name: value[index] if isinstance(value, tuple) else value for name, value in self.values.items()}
        used = {name: np.asarray(value) for name, value in values.items() if name in words}
        return model(body, values=used, header=self.header, opset=self.opset)


def _row(nodes: str, size: int = 8) -> str:
    return f"g (float[N,{size}] x) => (float[N,{size}] y) {{ {nodes} }}"


def _image(nodes: str) -> str:
    return f"g (float[N,4,H,W] x) => (float[M,4,A,B] y) {{ {nodes} }}"


def _columns(nodes: str, length: str = "") -> str:
    return f"g (float[N,L,8] x) => (float[A,B,C] y) {{ {length} {nodes} }}"


def _never(nodes: str) -> str:
    return f"g (float[N,4,5,6] x) => (float[N,4,5,6] y) {{ m = OP (x, k:4.1.1) {nodes} }}"


def _one(nodes: str) -> str:
    return _image(f"""size = Constant <value_ints=[1048576, 1048576]> () zero = Constant <value_ints=[0]> () {nodes}
        one = OP y = Mul (x, one)""")


_SIZE, _LIMITED = "s = Shape (x) l = Gather <axis=0> (s, one)", "m = Min (l, hundred) e = Unsqueeze (m, zeros)"
_RANGE = "n = Gather (s, at) r = Range (zero, n, step) i = Cast <to=OP> (r) f = Cast <to=1> (i) t = Reshape (f, rows)"
_NUMBERS = {
    **{name: np.int64(value) for name, value in {"zero": 0, "one": 1, "step": 1, "hundred": 100}.items()},
    **{name: np.array([value]) for name, value in {"zeros": 0, "first": 1, "last": 2, "end": 100}.items()},
    **{"k": np.float32(2), "half": np.float32(0.5)},
}
_WHOLE, _LOCAL, _BOTH = {"whole": "failed"}, {"local": "not_verified"}, {"both": "failed"}
_BRANCH = "y = If (g) <then_branch = t () => (float[N,64] a) { a = OP (x) }, else_branch = e () => (float[N,64] b) { b = %s (x) }>"
_MEAN = "m = ReduceMean <keepdims=0> (x) g = Greater (m, c)"

_WITH_F = '<ir_version: 8, opset_import: ["": 17, "f": 1]>'
_CALL = """g (float[N,2,8] x) => (float[N,2,8] y) { y = f.block (x) }
    <domain: "f", opset_import: ["": 17]> block (a) => (b) { b = OP (a) }"""
_BEYOND = "AveragePool <kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1>"
_UPSAMPLE, _NORM = "Upsample <height_scale=2.0, width_scale=2.0>", "BatchNormalization <is_test=1>"
_PLACES = " ".join(
    f"c{i} = Constant <value_float={i}.0> () n{i} = OP (x, c{i}) r{i} = Abs (n{i})" for i in range(2, 68)
)
PAIRS: dict[str, Pair] = {
    # what runs of the models alone see
    "equal to a threshold": Pair(_row("g = OP (x, c) y = Cast <to=1> (g)"), "Greater", "GreaterOrEqual", _WHOLE,
        {"c": np.float32(0.3)}),
    "halves": Pair(_row("OP"), "y = Round (x)", "a = Add (x, half) y = Floor (a)", _WHOLE, _NUMBERS),
    "saturated": Pair(_row("a = OP (x, c) y = Erf (a)"), "Mul", "Div", _WHOLE, {"c": np.float32(1e5)}),
    "far below a bias": Pair(_row("a = Add (x, c) r = Relu (a) z = OP (r) y = Add (z, x)"), "Abs", "Neg", _WHOLE,
        {"c": np.float32(-2000)}),
    "a small column": Pair(_row("a = OP (x) y = Mul (a, c)"), "Neg", "Identity", _WHOLE, {"c": np.float32([1e9, *[1e-2] * 7])}),
    "all true": Pair("""g (bool[64] m, float[4] x) => (float[4] y) { f = Cast <to=1> (m) a = ReduceMean <keepdims=0> (f)
        g = GreaterOrEqual (a, c) n = OP (x) y = Where (g, n, x) }""", "Neg", "Sin", _WHOLE, {"c": np.float32(1)}),
    "a size beyond a constant": Pair(_columns("OP f = Cast <to=1> (m) y = Mul (x, f)", _SIZE), "m = Min (l, c)", "m = Identity (l)",
        _WHOLE, {**_NUMBERS, "c": np.int64(300)}),
    "the sign of a maximum": Pair("g (float[N,64] x) => (float[N,1] y) { m = ReduceMax <axes=[1]> (x) y = OP (m) }", "Relu",
        "Identity", _WHOLE),
    "a branch by a mean": Pair(_row(f"{_MEAN} {_BRANCH % 'Relu'}", 64), "Neg", "Sin", _WHOLE, {"c": np.float32(100)}),
    "a branch by a mean of both signs": Pair(_row(f"{_MEAN} {_BRANCH % 'Neg'}", 64), "Relu", "Elu", _WHOLE, {"c": np.float32(1)}),
    "the only sizes that run": Pair(_image("m = OP (x) a = Add (x, m) y = Add (a, c)"), "GlobalAveragePool", "GlobalMaxPool", _WHOLE,
        {"c": np.ones((4, 6, 6), np.float32)}),
    "the only sizes that a constant fits": Pair(_image("m = OP (x) y = Reshape (m, c)"), "Relu", "Elu", _WHOLE,
        {"c": np.array([-1, 4, 6, 6])}),
    "the only sizes that a vector fits": Pair(_image("m = Mul (x, c) y = OP <axes=[2]> (m)"), "ReduceMean", "ReduceMax", _WHOLE,
        {"c": np.ones(6, np.float32)}),
    "a batch that divides most sizes": Pair(_image("s = Shape (x) a = Reshape (x, OP) y = Reshape (a, s)"), "pairs", "fours", _WHOLE,
        {"pairs": np.array([1, -1]), "fours": np.array([16, -1])}),
    "a batch beyond bytes beside large rows": Pair(_image(f"s = Shape (x) {_RANGE} y = Mul (x, t)"), "6", "3", _WHOLE,
        {**_NUMBERS, "at": np.int64(0), "rows": np.array([-1, 1, 1, 1])}),
    "rows beyond bytes": Pair(_image(f"s = Shape (x) {_RANGE} y = Mul (x, t)"), "6", "3", _WHOLE,
        {**_NUMBERS, "at": np.int64(2), "rows": np.array([-1, 1])}),
    "a batch beyond a constant": Pair(_row("s = Shape (x) n = Gather (s, zero) g = Greater (n, c) m = OP (x) y = Where (g, m, x)"),
        "Neg", "Sin", _WHOLE, {**_NUMBERS, "c": np.int64(20)}),
    "a table behind an offset": Pair(
        "g (int64[N,L] t) => (float[N,L,8] y) { s = Add (t, two) w = Cast <to=1> (c) y = Gather (w, s) }", "", "", _WHOLE,
        {"two": np.int64(2), "c": (_TABLE.astype(np.float16), _cut(900).astype(np.float16))}),
    "the rows of a table of positions": Pair(_columns("l = Gather (s, first) w = Slice (t, zeros, l) y = Add (x, w)", "s = Shape (x)"), "",
        "", _WHOLE, {**_NUMBERS, "t": (_TABLE[:100], _cut(60)[:100])}),
    "texts are the keys of the model": Pair("""g (string[N] s) => (float[N] y) {
        y = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b", "c"], values_floats = [1.0, 2.0, OP]> (s) }""", "3.0", "30.0", _WHOLE,
        header='<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]>'),
    # integers and numbers of other kinds
    "a cast to a narrower type": Pair("g (uint8[N,5] x) => (float[N,5] y) { c = OP (x) y = Cast <to=1> (c) }", "Identity",
        "Cast <to=3>", _BOTH),
    "numbers beyond float16": Pair("g (bfloat16[N] x) => (bfloat16[N] y) { OP }", "a = Cast <to=10> (x) y = Cast <to=16> (a)",
        "y = Identity (x)", _LOCAL),
    "values beyond a byte": Pair("g (int64[N,5] x) => (float[N,5] y) { OP y = Cast <to=1> (h) }", "h = Identity (x)",
        "c = Cast <to=6> (x) h = Cast <to=7> (c)", _BOTH),
    **{f"a table of {rows} rows": Pair("g (int64[N,T] x) => (float[N,T,8] y) { y = Gather (t, x) }", "", "", _BOTH,
        {"t": (_TABLE[:50], _cut(rows)[:50])}) for rows in (2, 30, 49)},
    # Indices of the second table would be too small for the first one's rows.
    "a range for each input": Pair("""g (int64[N,T] x, int64[N,T] j) => (float[N,T,8] y) { a = Gather (t, x) s = Add (j, one)
        b = Gather (u, s) y = Add (a, b) }""", "", "", _BOTH,
        {**_NUMBERS, "u": _TABLE[:3], "t": (_TABLE[:50], _cut(2)[:50])}),
    "infinite": Pair(_row("c = OP (x) y = Where (c, z, x)"), "IsInf", "IsInf", _BOTH, {"z": (np.float32(0), np.float32(1))}),
    "no number": Pair(_row("c = OP (x) y = Where (c, z, x)"), "IsNaN", "IsNaN", _BOTH, {"z": (np.float32(0), np.float32(1))}),
    # sizes
    "factors and sizes": Pair("g (float[N,3,H,W] x) => (float[N,3,A,B] y) { y = Resize <axes=[2, 3]> (x, , OP) }", "s", ", t", _BOTH,
        {"s": np.array([2, 2], np.float32), "t": np.array([64, 64])}, opset=18),
    "height for width": Pair("g (float[N,3,H,W] x) => (float[N,3,A] y) { y = ReduceMax <axes=[OP], keepdims=0> (x) }", "2", "3", _BOTH),
    "minimum of a height": Pair("g (float[N,3,H,W] x) => (float[N,3,A] y) { y = OP <axes=[2], keepdims=0> (x) }", "ReduceMax",
        "ReduceMin", _BOTH),
    "beside a mask": Pair(_row("z = Mul (x, k) a = Add (z, m) y = Softmax (a)", 4), "", "", _BOTH, {**_NUMBERS,
        "m": (np.float32([0, 0, -1e9, -60]), np.float32([0, 0, -1e9, -61]))}),
    # equal where x has up to 100 columns: equal at small sizes is no proof
    "a table of which few rows are read": Pair(_columns("t = Slice (OP, zeros, e, zeros) y = Add (x, t)", f"{_SIZE} {_LIMITED}"),
        "p", "q", _LOCAL, {**_NUMBERS, "p": _TABLE, "q": _cut(100)}, turned=True),
    "a slice that is left out": Pair(_columns("OP", f"{_SIZE} {_LIMITED}"), "t = Slice (x, zeros, e, first) y = Mul (t, k)",
        "y = Mul (x, k)", _LOCAL, _NUMBERS, turned=True),
    "a size that is left out": Pair(_columns("OP y = Mul (x, f)", f"{_SIZE} {_LIMITED}"), "f = Cast <to=1> (m)",
        "f = Cast <to=1> (l)", _LOCAL, _NUMBERS, turned=True),
    "a slice of other data": Pair(_columns("""a = Mul (x, c) t = Slice (a, zeros, end, first) r = ReduceSum (t, first)
        b = Mul (x, d) u = ReduceSum (b, first) y = Add (r, u)"""), "", "", _LOCAL, {**_NUMBERS,
        "c": (np.float32(2), np.float32(2.5)), "d": (np.float32(1), np.float32(0.5))}, turned=True),
    "a slice in front of padding": Pair("g (float[N,8,L] x) => (float[A,B,C] y) { OP }",
        "t = Slice (x, zeros, end, last) y = Conv <pads=[1, 1]> (t, w:8.8.3)",
        "t = Conv <pads=[1, 1]> (x, w:8.8.3) y = Slice (t, zeros, end, last)", _LOCAL, _NUMBERS, turned=True),
    # another model, node by node: no run makes them equal
    "a table behind a cast": Pair("g (int64[N,L] t) => (float[N,L,8] y) { w = Cast <to=1> (c) v = Identity (w) y = Gather (v, t) }",
        "", "", {"both": "another"}, {"c": (_TABLE[:600].astype(np.float16), _cut(300)[:600].astype(np.float16))}),
    "a table by equality": Pair(
        "g (int64[N,L,1] t) => (float[N,L,8] y) { e = Equal (t, r) o = Cast <to=1> (e) y = MatMul (o, c) }", "", "",
        {"both": "another"}, {"c": (_TABLE[:600], _cut(300)[:600]), "r": np.arange(600)}),
    "a branch of large batches": Pair(_row("""s = Shape (x) n = Gather (s, zero) g = Greater (n, many)
        y = If (g) <then_branch = a () => (float[N,8] t) { t = Mul (x, c) },
            else_branch = b () => (float[N,8] e) { e = Identity (x) }>"""), "", "", {"both": "another"},
        {**_NUMBERS, "many": np.int64(10**6), "c": (np.float32(2), np.float32(3))}),
    "another small column": Pair(_row("y = Gemm (x, c)"), "", "", {"both": "another"},
        {"c": (_SMALL, _SMALL * np.float32([1, -1, 1, 1, 1, 1, 1, 1]))}),
    "another saturated product": Pair(_row("a = MatMul (x, c) y = Erf (a)"), "", "", {"both": "another"},
        {"c": (1e4 * _TABLE[:8], 1e4 * _TABLE[8:16])}),
    "another large threshold": Pair("g (int64[N] t) => (bool[N] y) { y = Less (t, c) }", "", "", {"both": "another"},
        {"c": (np.int64(10**9), np.int64(2 * 10**9))}),
    # equal models, of which a proof of parts does not tell that no output shows the difference
    "rows that a mask never takes": Pair(_never("r = Range (zero, six, step) l = Less (r, six) y = Where (l, x, m)"), "Mul", "Div",
        {"local": "failed", "both": "not_verified"}, {**_NUMBERS, "six": np.int64(6)}),
    "a branch that a constant never takes": Pair(_never("""c = Not (true) y = If (c) <then_branch = t () => (float[N,4,5,6] a)
        { a = Identity (m) }, else_branch = e () => (float[N,4,5,6] b) { b = Relu (x) }>"""), "Mul", "Div",
        {"local": "failed", "both": "not_verified"}, {"true": np.array(True)}),
    "numbers below a limit": Pair(_never("t = Tanh (m) y = Clip (t, limit, )"), "Mul", "Div",
        {"local": "failed", "both": "not_verified"}, {"limit": np.float32(2)}),
    # functions that both models have
    "a function of another body": Pair(_CALL, "Relu", "Elu", _LOCAL, header=_WITH_F),
    "a function of another opset": Pair(_CALL.replace("17", "OP").replace("= OP", "= Softmax"), "17", "12", _LOCAL, header=_WITH_F),
    # Along the channels the scales would be moved with them.
    "padded along given axes": Pair("g (float[N,4,H,W] x, int64[4] t) => (float[A,B,C,D] y) { OP }",
        "a = Mul (x, k:4.1.1) p = Pad (a, n, , t) y = Mul (p, i)", "p = Pad (x, n, , t) y = Mul (p, k:4.1.1)", _LOCAL,
        {"n": np.array([1, 0, 0, 0, -1, 0, 0, 0]), "i": np.ones((4, 1, 1), np.float32)}, opset=18),
    "a function of one model": Pair(_CALL[: _CALL.index("<")] + "OP", _CALL[_CALL.index("<") :].replace("OP", "Relu"), "", _LOCAL,
        header=_WITH_F, turned=True),
    "a function with one input more": Pair(_CALL.replace("OP", "Relu").replace("(a) =>", "(OP) =>"), "a", "a, c", _LOCAL, header=_WITH_F),
    "a function with another default": Pair(_CALL.replace("(a) =>", "<slope: float = OP> (a) =>").replace("= OP (",
        "= LeakyRelu <alpha: float = @slope> ("), "0.1", "0.2", _LOCAL, header=_WITH_F.replace("8", "10")),
    "more wrong places than are tried": Pair(_row(f"{_PLACES} y = Max ({', '.join(f'r{i}' for i in range(2, 68))})"), "Div", "Mul", _LOCAL),
    # Behind a Reshape whose second size is 1 whenever it runs, though nothing says so.
    "columns behind a size that is not known": Pair(
        "g (float[8] x, int64[1] s) => (float[A,B,C] y) { t = Concat <axis=0> (two, s, four) OP y = Identity (o) }",
        "a = Mul (x, k) r = Reshape (a, t) o = Gather <axis=1> (r, zeros)", "r = Reshape (x, t) b = Gather <axis=1> (r, zeros) "
        "o = Mul (b, c)", _LOCAL, {**_NUMBERS, "two": np.array([2]), "four": np.array([4]), "k": _TABLE[0], "c": _TABLE[0, :4]}),
    "an output of another rank": Pair("g (float[N,4] x) => (float[OP }", "N,4] y) { y = Relu (x)", "N] y) { y = Abs (x)", _LOCAL),
    "an old Upsample of rank 5": Pair("g (float[N,4,D,H,W] x) => (float[A,B,C,D,E] y) { OP }",
        f"u = {_UPSAMPLE} (x) y = {_NORM} (u, ones, no, no, var)", f"n = {_NORM} (x, ones, no, no, var) y = {_UPSAMPLE} (n)", _LOCAL,
        {**dict.fromkeys(("ones", "no"), np.ones(4, np.float32)), "var": _TABLE[0, :4] ** 2}, opset=6),
    # Engines have counted the zeros there in several ways.
    "a shift in front of windows beyond the end": Pair(_image("OP"), f"a = Add (x, k:4.1.1) y = {_BEYOND} (a)",
        f"p = {_BEYOND} (x) y = Add (p, k:4.1.1)", _LOCAL, opset=19),
    **{f"a window of padding alone, {kind} {form} {size}": Pair(f"g (float[N,4,{size}] x) => (float[A,B,C] y) {{ OP }}",
        f"r = {kind} <kernel_shape=[2], {form}> (x) y = Add (r, k:4.1)", f"r = Add (x, k:4.1) y = {kind} <kernel_shape=[2], {form}> (r)",
        _LOCAL, opset=19) for kind in ("MaxPool", "AveragePool") for form, size in (("dilations=[2], pads=[1, 1]", "1"),
            ("dilations=[2], pads=[1, 1]", "S"), ("pads=[0, 2]", "4"), ("pads=[2, 0]", "4"))},
    # More numbers than a text of an array shows.
    "a number in a long attribute": Pair(f"""g (int64[N] t) => (float[N] y) {{ y = ai.onnx.ml.LabelEncoder <keys_tensor = int64[1200]
        {{{', '.join(map(str, range(1200)))}}}, values_tensor = float[1200] {{{'0.5, ' * 600}OP{', 0.5' * 599}}}> (t) }}""", "1.0", "2.0",
        {"local": "another"}, header='<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 4]>'),
    # Resizes that no engine runs; of rank 2 the result of a namesake has one more axis.
    **{f"no size, {mine}": Pair("g (float[N,2,4,4] x) => (float[A,B,C,D] y) { r = OP y = Add (x, r) }", mine, "Identity (w)", _LOCAL,
        {"w": np.ones((1, 2, 2, 2), np.float32), "at": np.array([4, 4])}, opset=18)
        for mine in ("Resize (w)", "Resize <axes = [2, 7]> (w, , , at)")},
    "a namesake of another domain": Pair("g (float[N,3] x) => (float y) { z = other.Conv (x, w:8.3.3.3) OP }",
        "y = BatchNormalization (z, ones, k, no, var)", "s = Mul (z, f) y = Add (s, h)", _LOCAL, {"no": np.zeros(8, np.float32),
        **{"k": _TABLE[0], "ones": np.ones(8, np.float32), "var": np.full(8, 4 - 1e-5, np.float32)},
        "f": np.full((8, 1, 1), 0.5, np.float32), "h": _TABLE[0].reshape(8, 1, 1)}, '<ir_version: 8, opset_import: ["": 17, "other": 1]>'),
    **{f"attributes of another type, {mine}": Pair(_row("a = Neg (x) z = OP (a) y = Relu (z)"), mine, "Identity",
        _LOCAL | {"whole": "not_verified"}, opset=6) for mine in ("Dropout <is_test=1.0>", 'Cast <to="a">', "Cast <to=99>")},
    # An operator that asks for as many parameters as channels has one: no engine runs it on four.
    **{f"one channel of four, {name}": Pair(_image("OP"), "y = Mul (x, c)", theirs, _LOCAL, values)
        for name, theirs, values in (
            ("a norm", "y = BatchNormalization <epsilon=1.0> (x, d, zeros, zeros, zeros)", {"c": np.float32(2), "d": np.float32([2]),
                "zeros": np.zeros(1, np.float32)}),
            ("a convolution", "y = Conv (x, d)", {"c": np.float32(2), "d": np.full((1, 1, 1, 1), 2, np.float32)}))},
    # constants: a terabyte is neither made nor needed; without digits, and with a switch of 2, they are not equal
    **{f"a huge {name}": Pair(_one(nodes), "ReduceMax <keepdims=0> (huge)", "Constant <value_float=1.0> ()", _LOCAL)
        for name, nodes in {
            "constant": "huge = ConstantOfShape (size)",
            "expansion": "k = Constant <value_float=1.0> () huge = Expand (k, size)",
            "repetition": "k = Constant <value_floats=[1.0, 2.0]> () l = Unsqueeze (k, zero) huge = Tile (l, size)",
            "range": "a = Constant <value_float=0.0> () b = Constant <value_float=1e12> () c = Constant <value_float=1.0> () "
            "huge = Range (a, b, c)",
        }.items()},
    "constants without digits": Pair("g (float[N,3,H,W] x) => (float[N,8,A,B] y) { s = Add (w:8.3.3.3, a) c = Sub (s, a) y = Conv (x, c) }",
        "", "", _LOCAL, {"a": (np.float32(1e5), np.float32(2e5))}),
    "a number for a list": Pair("g (float[N,3,H,W] x, float[8,3,3,3] w) => (float[N,8,A,B] y) { y = Conv <kernel_shape=OP> (x, w) }",
        "[3, 3]", "3", _LOCAL),
    # Of what has no elements nothing is said, wrong or right.
    "none of the columns": Pair(_columns("OP"), "a = Add (x, k:8) y = Gather <axis=2> (a, none)",
        "a = Gather <axis=2> (x, none) y = Add (a, half)", _LOCAL, {**_NUMBERS, "none": np.zeros(0, np.int64)}),
    # the weight of an operator of MMDeploy, behind constant offsets
    "a weight beside a constant": Pair("""g (float[1,3,4,4] x) => (float[1,4,4,4] y) { z = mmdeploy.MMCVDeformConv2d <stride=[1, 1],
        padding=[1, 1], dilation=[1, 1], groups=1, deform_groups=1> (x, o:1.18.4.4, w) y = Relu (z) }""", "", "", _LOCAL,
        {"w": tuple(_RNG.standard_normal((2, 4, 3, 3, 3)).astype(np.float32))}, '<ir_version: 8, opset_import: ["": 17, "mmdeploy": 1]>'),
    "a switch of 2": Pair("""g (float[N,3,H,W] x) => (float[N,8,A,B] y) { n = ReduceL2 <axes=[1, 2, 3], keepdims=OP> (w:8.3.3.3)
        c = Div (w, n) y = Conv (x, c) }""", "1", "2", _LOCAL),
}  # fmt: skip
