"""Mistakes of the passes of a quantisation tool that fold and convert batch norms."""

from __future__ import annotations

from tests.miscompilations.mistake import Mistake, affine, column, floats
from tests.support.onnx_text import batch_norm, parameters

QUARK = "amd-quark 0.13"
_P = parameters(
    {**{"w": (6, 4), "c": (6,), "a": (3, 4, 3, 3), "b": (3, 4, 3, 3)}, **batch_norm("p", 6), **batch_norm("q", 4)}
)
# Small variances, next to which epsilon counts.
_P |= {"p_v": floats(1e-3 * _P["p_v"]), "q_v": floats(1e-3 * _P["q_v"])}
_K, _H = affine(_P)
_WRONG_K, _WRONG_H = affine(_P, epsilon=1e-10)
_QK, _QH = affine(_P, "q")
_WRONG_QK, _WRONG_QH = affine(_P, "q", epsilon=1e-10)
_BN = "(g, p_s, p_b, p_m, p_v)"
_ROW = "float[N,4] x => float[N,6] y"
_GEMM = "Gemm <transB = 1>"
_VALUES = {**_P, "f": floats(_P["w"] * column(_K, 2)), "h": floats(_P["c"] * _K + _H)}
_WRONG = {"fw": floats(_P["w"] * column(_WRONG_K, 2)), "hw": floats(_P["c"] * _WRONG_K + _WRONG_H)}

MISTAKES: list[Mistake] = [
    Mistake("default_epsilon_of_a_gemm", QUARK, "Gemm, BatchNormalization", "An epsilon that is not written counts as 1e-10, not as 1e-5.",
        graph=_ROW, values={**_VALUES, **_WRONG}, original=f"g = {_GEMM} (x, w, c) y = BatchNormalization {_BN}",
        wrong=f"y = {_GEMM} (x, fw, hw)", right=f"y = {_GEMM} (x, f, h)"),
    Mistake("another_reader_of_a_gemm", QUARK, "Gemm, BatchNormalization, Relu", "A second reader of the Gemm gets the normalised value.",
        graph=_ROW, values=_VALUES, original=f"g = {_GEMM} (x, w, c) d = BatchNormalization {_BN} e = Relu (g) y = Add (d, e)",
        wrong=f"d = {_GEMM} (x, f, h) e = Relu (d) y = Add (d, e)",
        right=f"g = {_GEMM} (x, w, c) d = {_GEMM} (x, f, h) e = Relu (g) y = Add (d, e)"),
    Mistake("alpha_and_beta_of_a_gemm", QUARK, "Gemm, BatchNormalization", "The shift is written into the bias, which beta multiplies.",
        graph=_ROW, values={**_VALUES, "r": floats(_P["c"] * _K + _H / 2)},
        original=f"g = Gemm <transB = 1, alpha = 0.5, beta = 2.0> (x, w, c) y = BatchNormalization {_BN}",
        wrong="y = Gemm <transB = 1, alpha = 0.5, beta = 2.0> (x, f, h)", right="y = Gemm <transB = 1, alpha = 0.5, beta = 2.0> (x, f, "
        "r)"),
    Mistake("shared_weight_of_a_gemm", QUARK, "Gemm, BatchNormalization", "A weight that two operators share is changed for both.",
        graph=_ROW, values=_VALUES, original=f"g = {_GEMM} (x, w, c) d = BatchNormalization {_BN} e = {_GEMM} (x, w, c) y = Add (d, e)",
        wrong=f"d = {_GEMM} (x, f, h) e = {_GEMM} (x, f, h) y = Add (d, e)",
        right=f"d = {_GEMM} (x, f, h) e = {_GEMM} (x, w, c) y = Add (d, e)"),
    Mistake("another_reader_in_front_of_a_concat", QUARK, "Conv, Concat, BatchNormalization",
        "A Conv in front of the Concat is folded, though its value is read elsewhere, too.",
        graph="float[N,4,5,5] x => float[N,9,3,3] y", values={**_P, **{"fa": floats(_P["a"] * column(_K[:3])),
        "fb": floats(_P["b"] * column(_K[3:]))}, **{"ha": floats(_H[:3]), "hb": floats(_H[3:])}},
        original=f"u = Conv (x, a) v = Conv (x, b) g = Concat <axis = 1> (u, v) d = BatchNormalization {_BN} y = Concat <axis = 1> (d, u)",
        wrong="u = Conv (x, fa, ha) v = Conv (x, fb, hb) g = Concat <axis = 1> (u, v) y = Concat <axis = 1> (g, u)",
        right="u = Conv (x, fa, ha) v = Conv (x, fb, hb) g = Concat <axis = 1> (u, v)"
        " z = Conv (x, a) y = Concat <axis = 1> (g, z)"),
    Mistake("default_epsilon_of_a_lone_norm", QUARK, "BatchNormalization", "A batch norm becomes a depthwise Conv, with 1e-10 for an "
        "epsilon that is not written.", graph="float[N,4,5,5] x => float[N,4,5,5] y",
        values={**_P, **{"fw": floats(column(_WRONG_QK)), "hw": floats(_WRONG_QH), "f": floats(column(_QK)), "h": floats(_QH)}},
        original="g = Relu (x) y = BatchNormalization (g, q_s, q_b, q_m, q_v)", wrong="g = Relu (x) y = Conv <group = 4> (g, fw, hw)",
        right="g = Relu (x) y = Conv <group = 4> (g, f, h)"),
]  # fmt: skip
