"""Weights of files from training aware of quantisation: floats, QuantizeLinear, DequantizeLinear, and the operator."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.folding.corpus.case import Case

QDQ = "q = QuantizeLinear {0} (w, s, o) d = DequantizeLinear {0} (q, s, o)"
NORM = "y = Norm (z, p:8)"


def values(
    weight: tuple[int, ...], count: int | None = None, *, sign: bool = False, seed: int = 0
) -> dict[str, np.ndarray]:
    """Parameters of a batch norm, and of a weight whose integers are within -127 and 127. count: of scales; None for one."""
    generator = np.random.default_rng(seed)
    made = {f"p_{name}": generator.standard_normal(8).astype(np.float32) for name in "sbmv"}
    made["p_v"] = np.abs(made["p_v"]) + np.float32(0.5)
    made["p_s"] = made["p_s"] + np.sign(made["p_s"]) * np.float32(0.2)
    if not sign:
        made["p_s"] = np.abs(made["p_s"])
    made["s"] = np.asarray(0.01 + generator.random(count) / 50, np.float32) if count else np.float32(0.02)
    made["o"] = np.zeros(np.shape(made["s"]), np.int8)
    made["w"] = np.clip(generator.standard_normal(weight), -1.2, 1.2).astype(np.float32)
    return made


def _qdq(body: str, held: dict[str, Any], axis: int | None = None, left: str = "Conv", **fields: Any) -> Case:
    left = "" if "refused" in fields else f"QuantizeLinear DequantizeLinear {left}"
    nodes = f"{QDQ.format('' if axis is None else f'<axis = {axis}>')} {body} {NORM if 'y = ' not in body else ''}"
    return Case(nodes, left, values=held, opset=21, **fields)


_PLAIN, _SIGNED, _KERNEL = values((8, 6, 3, 3)), values((8, 6, 3, 3), sign=True), (8, 6, 3, 3)
_STORED = np.random.default_rng(0).integers(-127, 128, _KERNEL).astype(np.int8)
_POINTS = np.random.default_rng(0).integers(100, 150, 8).astype(np.uint8)
CASES: dict[str, Case] = {
    "conv": _qdq("z = Conv (x, d)", _PLAIN),
    "conv-negative": _qdq("z = Conv (x, d)", _SIGNED),
    "conv-channels": _qdq("z = Conv <pads = [1,1,1,1]> (x, d)", values(_KERNEL, 8), 0),
    "conv-channels-negative": _qdq("z = Conv (x, d)", values(_KERNEL, 8, sign=True), -4),
    "depthwise": _qdq("z = Conv <group = 8> (x, d)", values((8, 1, 3, 3), 8, sign=True), 0, ins="float[N,8,H,W] x"),
    "transposed": _qdq("z = ConvTranspose (x, d)", values((6, 8, 2, 2), 8, sign=True), 1, "ConvTranspose"),
    "gemm": _qdq("z = Gemm <transB = 1> (x, d)", values((8, 6), 8, sign=True), 0, "Gemm", ins="float[N,6] x"),
    "matmul": _qdq("m = MatMul (x, d) z = Transpose <perm = [0,2,1]> (m)", values((6, 8), sign=True), None,
        "MatMul Transpose Add", ins="float[N,L,6] x"),
    "scale-of-two": _qdq("t = QuantizeLinear (v, s, o) e = DequantizeLinear (t, s, o) c = Conv (x, e) z = Conv (c, d)",
        {**_SIGNED, "v": np.random.default_rng(1).random((6, 6, 1, 1)).astype(np.float32)}, None,
        "QuantizeLinear DequantizeLinear Conv Conv"),
    "stored": Case(f"d = DequantizeLinear (q, s, o) z = Conv (x, d) {NORM}", "DequantizeLinear Conv", opset=21,
        values={**_SIGNED, "q": _STORED}),
    "stored-with-zero-points": Case(f"d = DequantizeLinear <axis=0> (q, s, o) z = Conv (x, d) {NORM}", "DequantizeLinear Conv",
        opset=21, values={**values(_KERNEL, 8), "q": (_STORED.astype(int) + 127).astype(np.uint8), "o": _POINTS}),
    # which stay
    "below": _qdq("r = Norm (x, p) y = Conv (r, d)", values((4, 8, 1, 1), 4), 0, refused="quantized", ins="float[N,8,H,W] x"),
    "zero-point": _qdq("z = Conv (x, d)", {**_PLAIN, "o": np.int8(3)}, refused="quantized"),
    "unsigned-negative": _qdq("z = Conv (x, d)", {**_SIGNED, "o": np.uint8(0)}, refused="quantized"),
    "no-counterpart": _qdq("z = Conv (x, d)", {**_SIGNED, "w": np.full(_KERNEL, -9.0, np.float32)}, refused="quantized"),
    "zero-scale": _qdq("z = Conv (x, d)", {**_PLAIN, "p_s": np.zeros(8, np.float32)}, refused="quantized"),
    "shared": _qdq("c = Conv (x, d) t = Sigmoid (c) z = Conv (x, d)", _PLAIN, refused="quantized", outs="y, t"),
    "another-axis": _qdq("z = Conv (x, d)", values(_KERNEL, 6), 1, refused="quantized"),
}  # fmt: skip
