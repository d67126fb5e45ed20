"""Each reason for which a rule refuses a map, in a graph that has nothing else wrong; and bounds just before they bind.

A case asks for a map of 4 channels along axis 1: backward, on what makes `z`, or forward, on what reads `x`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Plan, Raw
from bnexport.folding.placing import Search
from bnexport.folding.rules import ALL, gather
from bnexport.graph.nodes import Refused
from tests.support.contexts import context_of
from tests.support.onnx_text import batch_norm, fold_and_check, model

RULES = {op_type: rule for rule in ALL for op_type in rule.op_types}
MAP = ChannelAffine(np.array([2.0, 3.0, -4.0, 5.0]), np.array([1.0, 0.0, 2.0, -1.0]), np.array([0.5, 1.0, 0.0, 3.0]))
SCALE = MAP.only_scale()
POSITIVE = ChannelAffine.scaling(np.array([2.0, 3.0, 4.0, 5.0]))
SHIFT = ChannelAffine.shifting(np.array([1.0, 0.0, 2.0, -1.0]))
X, ROWS = "float[N,4,H,W] x", "float[N,4] x"
QUANTIZED = {"q": np.ones((4, 4, 1, 1), np.int8), "affine": POSITIVE}
SCALES = np.ones(4, np.float32)
TWICE = ChannelAffine.scaling(2 * np.ones(4))
DEQUANTIZED = "d = DequantizeLinear (q, s)\n z = Conv (x, d)"
BODIES = "then_branch = a () => (float[N,4,H,W] q) {{ q = Relu ({}) }}, else_branch = b () => (float[N,4,H,W] e) {{ e = Relu (v) }}"
CHOICE = f"{X}, float[N,4,H,W] v, bool c"


def attempt(
    direction: str,
    body: str,
    *,
    inputs: str = X,
    affine: ChannelAffine = MAP,
    axis: int = 1,
    opset: int = 17,
    value: str = "",
    shapes: dict[str, tuple[int, ...]] | None = None,
    **more: Any,
) -> Search:
    body = f"{body}\n y = Relu (z)" if direction == "backward" and "y = " not in body else body
    arrays = {name: np.asarray(array) for name, array in more.items()}
    proto = model(f"g ({inputs}) => (float[N,4,H,W] y) {{ {body} }}", shapes, values=arrays, opset=opset)
    context = context_of(proto, opset)
    search = Search(Plan(context), RULES)
    graph = context.model.graph
    values = {it.name: it for it in (*graph.inputs, *(out for node in graph for out in node.outputs))}
    start = values[value or {"backward": "z", "forward": "x"}[direction]]
    getattr(search, direction)(start, axis, affine)
    return search


def w(*shape: int) -> dict[str, Any]:
    return {"shapes": {"w": shape}}


BACKWARD: dict[str, tuple[str, str, dict[str, Any]]] = {
    "z = Conv (x, w)": ("shape", r"Conv makes 6 channels, the map has 4", w(6, 4, 1, 1)),
    "z = Conv (x, w) ": ("axis", "axis 2", {**w(4, 4, 1, 1), "axis": 2}),
    "z = Conv (x, w)  ": ("shape", r"a Conv weight of shape \(4, 4\) with 1 groups", w(4, 4)),
    "z = Conv <group=3> (x, w)": ("shape", r"with 3 groups", w(4, 4, 1, 1)),
    "z = Conv <group=0> (x, w)": ("shape", r"with 0 groups", w(4, 4, 1, 1)),
    "z = Conv (x, w, b)": ("shape", r"the Conv bias has shape \(3,\), expected \(4,\)", {"shapes": {"w": (4, 4, 1, 1), "b": (3,)}}),
    "z = Conv (x, w, b) ": ("shape", r"bias has shape \(1, 4\)", {"shapes": {"w": (4, 4, 1, 1), "b": (1, 4)}}),
    "z = ConvTranspose (x, w)": ("shape", "ConvTranspose makes 6 channels, the map has 4", w(4, 6, 1, 1)),
    "z = ConvTranspose <group=2> (x, w)": ("shape", "ConvTranspose makes 6 channels", w(4, 3, 1, 1)),
    "z = ConvTranspose (x, w) ": ("axis", "the map acts on axis 2", {**w(4, 4, 1, 1), "axis": 2}),
    "z = ConvTranspose (x, w)  ": ("shape", r"a ConvTranspose weight of shape \(4, 4\)", w(4, 4)),
    "z = ConvTranspose <group=3> (x, w)": ("shape", "with 3 groups", w(4, 4, 1, 1)),
    "z = Gemm (x, w)": ("axis", "axis 0, Gemm's columns are axis 1", {**w(4, 4), "axis": 0, "inputs": ROWS}),
    "z = Gemm (x, w) ": ("shape", "Gemm makes 6 columns, the map has 4", {**w(4, 6), "inputs": ROWS}),
    "z = Gemm <transB=1> (x, w)": ("shape", "Gemm makes 6 columns, the map has 4", {**w(6, 4), "inputs": ROWS}),
    "z = Gemm (x, w)  ": ("shape", r"a Gemm weight of shape \(4,\)", {**w(4), "inputs": ROWS}),
    "z = Gemm (x, w, c)": ("shape", r"a Gemm constant of shape \(3,\) for 4 columns",
        {"shapes": {"w": (4, 4), "c": (3,)}, "inputs": ROWS}),
    "z = Gemm (x, w, c) ": ("shape", r"a Gemm constant of shape \(1, 1, 4\)", {"shapes": {"w": (4, 4), "c": (1, 1, 4)}, "inputs": ROWS}),
    "z = MatMul (x, w)": ("shape", "axis 1 of the MatMul weight has 6 channels, the map has 4", {**w(4, 6), "inputs": ROWS}),
    "z = MatMul (w, x)": ("axis", "axis 1 of rank 2, which the MatMul weight does not share", {**w(4, 4), "inputs": ROWS}),
    "z = MatMul (w, x) ": ("shape", "axis 0 of the MatMul weight has 6 channels",
        {**w(6, 4), "inputs": "float[4,N] x", "axis": 0, "affine": SCALE}),
    "z = MatMul (x, x)": ("not-constant", "no operand, or both", {"inputs": ROWS}),
    "z = MatMul (x, w)  ": ("rank", "below 2", {**w(4), "inputs": ROWS}),
    "z = MatMul (x, w)   ": ("rank", "below 2", {**w(4, 4), "inputs": "float[4] x", "axis": 0}),
    "z = MatMul (x, w)    ": ("shift", "MatMul has no bias", {**w(4, 4), "inputs": ROWS}),
    "z = Add (x, b)": ("opset", "before opset 7", {**w(4), "opset": 6, "inputs": f"{X}, {X[:-1]}b"}),
    "z = Add (b, b)": ("constant", "is a constant itself", {"shapes": {"b": (4, 1, 1)}}),
    "z = Div (b, x)": ("rank", "broadcasts from another rank", {"inputs": f"{X}, float[4,1,1] b", "affine": SCALE}),
    "z = Mul (x, x)": ("shift", "multiplies, so it cannot take a shift", {}),
    "z = Div (x, d)": ("no-producer", "input of the graph", {"shapes": {"d": (4, 1, 1)}, "affine": SCALE}),
    "z = Concat <axis=1> (x, x)": ("shape", "joins 8 channels, the map has 4", {}),
    "z = Concat (x, x)": ("shape", "joins 8 channels", {"opset": 3}),  # the default axis is 1
    "z = Concat <axis=1> (x, b)": ("shape", "channels of an operand", {"inputs": f"{X}, float[N,C,H,W] b"}),
    "z = Concat <axis=-1> (x, b)": ("rank", "rank of Concat", {"inputs": "float[] x, float[] b"}),
    "z = Concat <axis=0> (b)": ("shape", r"constant of shape \(3, 5, 1, 1\)", {"shapes": {"b": (3, 5, 1, 1)}}),
    "z = DepthToSpace <blocksize=2, mode=\"XYZ\"> (x)": ("unknown-mode", "'XYZ'", {"inputs": "float[N,16,H,W] x"}),
    "z = DepthToSpace (x)": ("bad-node", "no block size", {}),
    "z = DepthToSpace <blocksize=2> (x)": ("axis", "axis 2, the channels", {"axis": 2}),
    "z = SpaceToDepth <blocksize=2> (x)": ("no-rule", "one channel onto several", {}),
    "z = Pad <mode=\"XYZ\"> (x, p)": ("unknown-mode", "'XYZ'", {"p": [0, 0, 1, 1, 0, 0, 1, 1]}),
    "z = Pad (x, p)": ("bad-node", "no pads, or not two", {"p": [0, 0, 1, 1]}),
    "z = Pad (x, p) ": ("axis", "pads the channel axis", {"p": [0, 1, 0, 0, 0, 0, 0, 0]}),
    "z = Pad (x, p)  ": ("axis", "pads the channel axis", {"p": [0, 0, 0, 0, 0, 1, 0, 0]}),
    "z = Pad (x, p)   ": ("rank", "rank of Pad", {"p": [1, 1], "inputs": "float[] x"}),
    "z = Pad (x)": ("bad-node", "no pads", {}),
    "z = MaxPool <kernel_shape=[1,1]> (x)": ("order", "positive", {}),
    "z = AveragePool <kernel_shape=[1,1]> (x)": ("axis", "axis 2, the channels", {"axis": 2}),
    "z = ReduceMean (x)": ("axis", "reduces over every axis", {}),
    "z = ReduceMean <axes=[2]> (x)": ("rank", "rank of ReduceMean", {"inputs": "float[] x"}),
    "z = PRelu (x, b)": ("rank", "slope of PRelu", {"shapes": {"b": (1, 1, 4, 1, 1)}, "affine": POSITIVE}),
    "z = Relu (x)": ("order", "a scale of 0 or below cannot move through Relu", {"affine": SCALE}),
    "z = Relu (x) ": ("order", "an offset cannot move through Relu", {"affine": SHIFT}),
    "z = Transpose (x)": ("rank", "rank of Transpose", {"inputs": "float[] x"}),
    "z = Transpose <perm=[0]> (x)": ("axis", "has no axis 1", {"inputs": "float[N] x"}),
    "z = Unsqueeze (x, a)": ("axis", "names no axes", {"a": np.zeros(0, np.int64)}),
    "z = Unsqueeze (x, a) ": ("rank", "rank of Unsqueeze", {"a": [2], "inputs": "float[] x"}),
    "z = Unsqueeze (x, a)  ": ("axis", "drops the channel axis", {"a": [1]}),
    "z = Squeeze (x, a)": ("rank", "rank of Squeeze", {"a": [2], "inputs": "float[] x"}),
    "z = Reshape (x)": ("opset", "before opset 5", {"opset": 1}),
    "z = Reshape (x, s)": ("shape", "shapes around", {"inputs": "float[] x, int64[2] s"}),
    "z = Flatten (x)": ("shape", "shape before Flatten", {"inputs": "float[] x"}),
    "z = Resize <mode=\"XYZ\"> (x, , s)": ("unknown-mode", "'XYZ'", {"s": np.array([1, 1, 2, 2], np.float32)}),
    "z = Split <axis=1> (x, s)": ("shape", "do not add up to 4", {"s": [4, 1]}),
    "z = Split <axis=1> (x)": ("shape", "gives 3 channels, the map has 4", {"inputs": "float[N,6,H,W] x"}),
    "z = Split <axis=1> (x) ": ("shape", "channels of Split", {"inputs": "float[N,C,H,W] x"}),
    "z = Split (x)": ("rank", "rank of Split", {"inputs": "float[] x"}),
    "z = Slice (x, a, b, c)": ("bad-node", "1 starts, 2 ends and 1 axes", {"a": [0], "b": [1, 2], "c": [1]}),
    "z = Slice (x, a)": ("bad-node", "no starts or no ends", {"a": [0]}),
    "z = Slice (x, a, b, c, d)": ("axis", "reverses", {"a": [-1], "b": [-9], "c": [1], "d": [-1]}),
    "z = Slice (x, a, b, c, d) ": ("axis", "reverses", {"a": [0], "b": [9], "c": [1], "d": [0]}),
    "z = BatchNormalization (x, p_s, p_b, p_m, p_v)": ("axis", "the map acts on axis 2", {"shapes": batch_norm("p", 4), "axis": 2}),
    "z = BatchNormalization (x, p_s, p_b, p_m, p_v) ": ("shape", r"has shape \(5,\), the map 4", {"shapes": batch_norm("p", 5)}),
    "z = Split (x)   ": ("no-producer", "input of the graph", {}),  # the default axis is 0
    "z = Concat <axis=1> (x, \"\")": ("bad-node", "lacks input 1", {}),
    "z = Concat <axis=0> ()": ("bad-node", "lacks input 0", {}),
    "z = Concat <axis=0> (b) ": ("shape", r"constant of shape \(5,\)", {"shapes": {"b": (5,)}}),
    "z = Upsample <height_scale=2.0, width_scale=2.0> (x)": ("axis", "resizes the channel axis", {"axis": 2, "opset": 1}),
    "z = Upsample <height_scale=2.0, width_scale=2.0> (x) ": ("axis", "resizes the channel axis",
        {"inputs": "float[N,4,H] x", "opset": 1}),
    "z = Split (x)    ": ("shape", "gives 2 channels, the map has 4", {"axis": 0, "inputs": "float[4,4] x"}),
    "z = Concat <axis=-3> (x, x)": ("shape", "joins 8 channels", {}),
    "z = ConvTranspose <group=0> (x, w)": ("shape", "with 0 groups", w(4, 4, 1, 1)),
    "z = Pad (x, p, , a)": ("axis", "pads the channel axis", {"p": [1, 0], "a": [-3], "affine": SCALE}),
    "z = Identity ()": ("bad-node", "lacks input 0", {}),
    "z = Resize <axes=[-1]> (x, , s)": ("axis", "or it is not known",
        {"inputs": "float[] x", "opset": 18, "s": np.array([2], np.float32)}),
    "z = Reshape (x, s)   ": ("reshape", r"\(\?, 4, 3\) to \(12, unk__0\)", {"inputs": "float[?,4,3] x", "s": [12, -1]}),
    "z = Cast <to=10> (x)": ("cast", "changes the type", {}),
    "t = Unknown (x)\n z = Cast <to=1> (t)": ("cast", "changes the type", {}),
    "z = Sigmoid (x)": ("no-rule", "not linear", {}),
    "z = LSTM <hidden_size=4> (x, w, r)": ("no-rule", "cannot take", {"shapes": {"w": (1, 16, 4), "r": (1, 16, 4)}}),
    "t, z = LayerNormalization (x, w)": ("no-rule", "cannot take", w(4)),
    "z = LayerNormalization (x, w)": ("axis", "which LayerNormalization -> z does not scale", w(4)),
    "z = LayerNormalization (x, w) ": ("shape", r"has shape \(6,\), the map 4", {**w(6), "inputs": ROWS}),
    "z = LayerNormalization (x, w, b)": ("shape", r"bias of .* has shape \(1, 4\)", {"shapes": {"w": (4,), "b": (1, 4)}, "inputs": ROWS}),
    "z = InstanceNormalization (x, w, w)": ("shape", "one value for each channel", w(4, 1)),
    "z = GroupNormalization <num_groups=4> (x, w, w)": ("opset", "a scale for each group", {**w(4), "opset": 18}),
    "z = Gather <axis=1> (x, i)": ("shape", "takes a channel twice", {"i": [0, 1]}),
    "z = Gather <axis=1> (x, i) ": ("shape", "takes a channel twice", {"i": [0, 1, 2, 2]}),
    "z = Gather <axis=1> (x, i)  ": ("shape", "takes a channel that its data do not have", {"i": [0, 1, 2, 4]}),
    "z = Gather <axis=1> (x, i)   ": ("shape", "takes a channel that its data do not have", {"i": [0, 1, 2, -5]}),
    "z = Gather <axis=1> (x, i)    ": ("shape", "are not known", {"i": [0, 1, 2, 3], "inputs": "float[N,C,H,W] x"}),
    "z = Gather <axis=1> (x, i)     ": ("shape", "or it takes a single one", {"i": [[0, 1, 2, 3]]}),
    "z = Gather (t, x)": ("shape", r"table of .* has shape \(20, 6\)", {"shapes": {"t": (20, 6)}, "inputs": "int64[N] x"}),
    "z = Gather (t, x) ": ("axis", "the rows that", {"shapes": {"t": (20, 6)}, "inputs": "int64[N,L] x"}),
    "z = Expand (x, s)": ("shape", "repeats the channels", {"s": [1, 4, 1, 1], "inputs": "float[N,1,H,W] x"}),
    "z = AveragePool <kernel_shape=[2,2], ceil_mode=1> (x)": ("shift", "averages over padding", {}),
    "z = AveragePool <kernel_shape=[2,2], count_include_pad=1, pads=[1,1,1,1]> (x)": ("shift", "averages over padding", {}),
    "z, t = MaxPool <kernel_shape=[2,2]> (x)\n u = Neg (t)": ("indices", "indices of MaxPool -> z are used", {"affine": POSITIVE}),
    "z = ReduceMean <axes=[1]> (x)": ("axis", "reduces the channels", {}),
    "z = PRelu (x, b) ": ("rank", "rank of PRelu", {"shapes": {"b": (4, 1, 1)}, "inputs": "float[] x", "affine": POSITIVE}),
    "z = Reshape (x, s)    ": ("shape", "shapes around", {"inputs": "float[2,4,3] x, int64[K] s"}),
    "z = Reshape (x, s)     ": ("reshape", "does not keep the channels", {"inputs": "float[A,4,B] x", "s": [-1, 4, 5]}),
    "a = Reshape (x, s)\n b = Transpose <perm=[0, 2, 1, 3, 4]> (a)\n z = Reshape (b, t)": ("reshape", "does not keep the channels",
        {"inputs": "float[N,8,6,6] x", "s": [0, 2, 4, 6, 6], "t": [0, 8, 6, 6]}),
    "z = Split <axis=1> (x, s) ": ("shape", "do not add up to 4", {"s": [4]}),
    "z = Split <axis=1> (x, s)  ": ("shape", "do not add up to 4", {"s": [5, -1]}),
    "z = Slice (x, \"\", b)": ("bad-node", "no starts or no ends", {"b": [1]}),
    "z = Cast <to=1> (x)": ("no-producer", "input of the graph", {}),
    f"z = Conv (x, w)\n y = If (c) <{BODIES.format('z')}>": ("captured", "computed outside", {"inputs": CHOICE, **w(4, 4, 1, 1)}),
    "d = DequantizeLinear <axis=1> (q, s)\n z = Conv (x, d)": ("quantized", "does not follow the quantization axis",
        {**QUANTIZED, "s": SCALES}),
    "d = DequantizeLinear (q, s, o)\n z = Conv (x, d)": ("quantized", "cannot negate its integers",
        {**QUANTIZED, "s": SCALES[0], "o": np.int8(3), "affine": SCALE}),
    DEQUANTIZED: ("quantized", "holds -128", {"q": np.full((4, 4, 1, 1), -128, np.int8), "s": SCALES[0], "affine": SCALE}),
    f"{DEQUANTIZED} ": ("opset", "before opset 13", {**QUANTIZED, "s": SCALES[0], "affine": SCALE, "opset": 12}),
    f"{DEQUANTIZED}  ": ("quantized", "cannot negate its integers",
        {"q": np.ones((4, 4, 1, 1), np.uint8), "s": SCALES[0], "affine": SCALE}),
    "f = QuantizeLinear (k, s)\n d = DequantizeLinear (f, s)\n e = Neg (f)\n z = Conv (x, d)": ("quantized",
        "a zero point or other uses", {"k": np.ones((4, 4, 1, 1), np.float32), "s": SCALES[0], "affine": POSITIVE}),
    f"{DEQUANTIZED}\n e = Conv (x, d)": ("quantized", "has other uses", {**QUANTIZED, "s": SCALES[0]}),
}  # fmt: skip
FORWARD: dict[str, tuple[str, str, dict[str, Any]]] = {
    "y = Conv (x, w)": ("shape", "Conv reads 6 channels, the map has 4", w(4, 6, 1, 1)),
    "y = Conv <group=2> (x, w)": ("shape", "Conv reads 6 channels", w(4, 3, 1, 1)),
    "y = ConvTranspose (x, w)": ("shape", "ConvTranspose reads 6 channels, the map has 4", w(6, 4, 1, 1)),
    "y = Gemm (x, w)": ("axis", "axis 0, Gemm sums over axis 1", {**w(4, 4), "axis": 0, "inputs": ROWS}),
    "y = Gemm <transA=1> (x, w)": ("axis", "axis 1, Gemm sums over axis 0", {**w(4, 4), "inputs": ROWS}),
    "y = Gemm (x, w) ": ("shape", "Gemm sums over 6 columns, the map has 4", {**w(6, 5), "inputs": ROWS}),
    "y = Gemm (b, x)": ("not-data", "input 1 of Gemm", {"inputs": f"{ROWS}, float[N,M] b"}),
    "y = MatMul (x, w)": ("shape", "axis 0 of the MatMul weight has 6 channels, the map has 4", {**w(6, 5), "inputs": ROWS}),
    "y = MatMul (x, w) ": ("axis", "axis 0 of rank 2, which the MatMul weight does not share", {**w(4, 5), "axis": 0, "inputs": ROWS}),
    "y = MatMul (w, x)": ("axis", "axis 1 of rank 2, which the MatMul weight does not share", {**w(5, 4), "inputs": "float[4,4] x"}),
    "y = MatMul (x, w)   ": ("shift", "not one number for each channel", {**w(3, 4, 5), "inputs": ROWS}),
    "y = Add (x, b)": ("opset", "before opset 7", {"shapes": {"b": (4,)}, "opset": 6}),
    "y = Add (x, b) ": ("rank", "that of its operand", {"shapes": {"b": (1, 4, 1, 1)}, "inputs": ROWS}),
    "y = Add (x, b)  ": ("no-rule", "adds something that is not scaled", {"inputs": f"{X}, float[N,4,H,W] b"}),
    "y = Mul (x, b)": ("shift", "only a scale passes", {"inputs": f"{X}, float[N,4,H,W] b"}),
    "y = Div (b, x)": ("shift", "no divisor", {"inputs": f"{X}, float[N,4,H,W] b", "affine": SCALE}),
    "y = Concat <axis=1> (x, x)": ("shared", "the same value twice", {}),
    "y = Concat <axis=0> (x, b)": ("concat", "along another axis", {"inputs": f"{X}, float[N,4,H,W] b"}),
    "y = Concat <axis=1> (x, b)": ("shape", "operand 0 .* does not have 4", {"inputs": "float[N,6,H,W] x, float[N,2,H,W] b"}),
    "y = DepthToSpace <blocksize=2> (x)": ("no-rule", "several channels onto positions of one", {}),
    "y = Pad (b, x)": ("not-data", "input 1 of Pad", {"inputs": "int64[8] x, float[N,4,H,W] b"}),
    "y = ReduceMean (b, x)": ("not-data", "input 1 of ReduceMean", {"inputs": "int64[1] x, float[N,4] b", "opset": 18}),
    "y = PRelu (b, x)": ("not-data", "input 1 of PRelu", {"inputs": f"{X}, float[N,4,H,W] b"}),
    "y = Reshape (b, x)": ("not-data", "input 1 of Reshape", {"inputs": "int64[4] x, float[N,4,H,W] b"}),
    "y = Resize (b, , x)": ("not-data", "input 2 of Resize", {"inputs": "float[4] x, float[N,4,H,W] b"}),
    "y = Slice (b, x, x)": ("not-data", "input 1 of Slice", {"inputs": "int64[4] x, float[N,4,H,W] b"}),
    "y = Dropout (b, x)": ("not-data", "input 1 of Dropout", {"inputs": "float x, float[N,4,H,W] b"}),
    "y = Transpose <perm=[0]> (x)": ("axis", "has no axis 1", {"inputs": "float[N] x"}),
    "y = Squeeze (x, a)": ("axis", "drops the channel axis", {"a": [1]}),
    "y = Slice (x, a, b, c)": ("shape", "reads 6 channels, the map has 4", {"a": [0], "b": [1], "c": [1], "inputs": "float[N,6,H,W] x"}),
    "y = Reshape (x, s)": ("reshape", "does not keep the channels", {"inputs": "float[2,4,3] x", "s": [8, 3]}),
    "y = Sigmoid (b)": ("unused", "nothing reads 'x'", {"inputs": f"{X}, float[N,4,H,W] b"}),
    "y = BatchNormalization (x, p_s, p_b, p_m, p_v)": ("no-rule", "cannot take", {"shapes": batch_norm("p", 4)}),
    "y = Gather <axis=1> (x, i)": ("shape", "reads 6 channels, the map has 4", {"i": [0, 1], "inputs": "float[N,6,H,W] x"}),
    "y = ReduceMean <axes=[1]> (x)": ("axis", "reduces the channels", {}),
    "y = LSTM <hidden_size=4> (x, w, r)": ("shape", r"weight of shape \(1, 16, 5\)",
        {"shapes": {"w": (1, 16, 5), "r": (1, 16, 4)}, "inputs": "float[L,N,4] x", "axis": 2}),
    "y = LSTM <hidden_size=4> (x, w, r) ": ("shape", r"weight of shape \(16, 4\)",
        {"shapes": {"w": (16, 4), "r": (1, 16, 4)}, "inputs": "float[L,N,4] x", "axis": 2}),
    "y = LSTM <hidden_size=4> (x, w, r, b)": ("shape", r"bias has shape \(1, 16\)",
        {"shapes": {"w": (1, 16, 4), "r": (1, 16, 4), "b": (1, 16)}, "inputs": "float[L,N,4] x", "axis": 2}),
    "a = Reshape (x, s)\n b = Transpose <perm=[0, 2, 1, 3, 4]> (a)\n y = Reshape (b, t)": ("reshape", "does not keep the channels",
        {"inputs": "float[N,8,6,6] x", "s": [0, 2, 4, 6, 6], "t": [0, 8, 6, 6]}),
    f"y = If (c) <{BODIES.format('x')}>": ("captured", "'x' is read inside a body", {"inputs": CHOICE, "affine": POSITIVE}),
    "k = Identity (w)\n y = MatMul (x, k)": ("not-data", "reaches the constant of MatMul", {"value": "k", "inputs": ROWS, **w(4, 4)}),
    "y = ConvTranspose (x, w) ": ("padding", "mixes positions", w(4, 3, 1, 2)),
    **{f"y = ConvTranspose <{fields}> (x, w)": ("padding", "mixes positions", w(4, 3, 1, 1)) for fields in ("strides=[2,2]",
        "pads=[0,0,0,1]", "output_padding=[1,0]", "output_shape=[5,5]", 'auto_pad="SAME_UPPER"')},
}  # fmt: skip


@pytest.mark.parametrize(
    ("direction", "body"), [*(("backward", body) for body in BACKWARD), *(("forward", body) for body in FORWARD)]
)
def test_refused(direction: str, body: str) -> None:
    code, message, options = (BACKWARD if direction == "backward" else FORWARD)[body]
    if "Split" in body:
        body = body.replace("z = ", "z, other = ")
    with pytest.raises(Refused, match=message) as caught:
        attempt(direction, body, **options)
    assert caught.value.code == code


def chain(start: int, count: int) -> str:
    """Identities from a<start> to a<start + count>."""
    return "\n".join(f"a{index + 1} = Identity (a{index})" for index in range(start, start + count))


@pytest.mark.parametrize(
    ("direction", "bodies", "targets", "message"),
    [
        # A Concat, operators and a Conv; the branch before them does not count. Below: nor does the reader before them.
        ("backward", [f"b = Conv (x, v)\n a0 = Conv (x, u)\n {chain(0, count)}\n z = Concat <axis=1> (b, a{count})"
            for count in (62, 63)], 2, "more than 64 operators away"),
        ("forward", [f"b = Conv (x, w)\n a1 = Identity (x)\n {chain(1, count)}\n y = Conv (a{count + 1}, w)"
            for count in (62, 63)], 2, "more than 64 operators away"),
        ("forward", ["\n".join(f"c{index} = Conv (x, w)" for index in range(count)) + "\n y = Sum (c0, c1)"
            for count in (256, 257)], 256, "more than 256 operators would change"),
    ],
)  # fmt: skip
def test_limits(direction: str, bodies: list[str], targets: int, message: str) -> None:
    shapes = {"w": (4, 4, 1, 1)} if direction == "forward" else dict.fromkeys("uv", (2, 4, 1, 1))
    assert len(attempt(direction, bodies[0], shapes=shapes).plan.targets) == targets
    with pytest.raises(Refused, match=message):
        attempt(direction, bodies[1], shapes=shapes)


UNARY = "AveragePool Flatten Gemm Identity Relu Transpose Squeeze Unsqueeze DepthToSpace Pad Resize Split Slice Concat"


@pytest.mark.parametrize("op_type", [*UNARY.split(), "Conv", "ConvTranspose", "MatMul", "Add", "ReduceMean", "Dropout"])
def test_attributes_that_are_not_known(op_type: str) -> None:
    shape = (4, 4) if op_type in ("Gemm", "MatMul") else (4, 4, 1, 1)
    weight = ", w" if op_type not in UNARY or op_type == "Gemm" else ""
    body = f"z = {op_type} <other=1> (x{weight})"
    with pytest.raises(Refused, match="has the attribute 'other'") as caught:
        attempt("backward", body, inputs=ROWS if op_type in ("Gemm", "MatMul") else X, **w(*shape))
    assert caught.value.code == "unknown-attribute"


CONV = "c = Conv (x, w)\n "
# Bodies, and the outputs of the nodes that change.
ACCEPTED: dict[str, tuple[list[str], dict[str, Any]]] = {
    CONV + "z = PRelu (c, b)": (["c"], {"shapes": {"w": (4, 4, 1, 1), "b": (1, 4, 1, 1)}, "affine": POSITIVE}),
    CONV + "z = DepthToSpace <blocksize=1> (c)": (["c"], w(4, 4, 1, 1)),
    CONV + "z, o = Split <axis=1> (c, s)": (["c"], {**w(4, 4, 1, 1), "s": [4, 0]}),
    CONV + "z = Slice (c, s, e)": (["c"], {**w(4, 4, 1, 1), "s": [0], "e": [1]}),
    CONV + "z = Pad (c, p, , a)": (["c"], {**w(4, 4, 1, 1), "p": [0, 0], "a": [-3]}),
    CONV + "z = Concat <axis=-4> (c, c2)\n c2 = Conv (x, w)": (["c", "c2"], w(4, 4, 1, 1)),
    CONV + "z = Upsample <height_scale=2.0, width_scale=2.0> (c)": (["c"], {**w(4, 4, 1, 1), "opset": 1}),
    CONV + "z = Reshape (c, s)": (["c"], {**w(4, 4, 1, 1), "opset": 5, "s": [0, 0, -1]}),
    CONV + "z = Resize (c, r, f)": (
        ["c"],
        {**w(4, 4, 1, 1), "opset": 11, "r": np.zeros(0, np.float32), "f": np.array([1, 1, 2, 2], np.float32)},
    ),
    "z = Gemm (x, w)": (["z"], {**w(4, 4), "inputs": ROWS}),
    "z = MatMul (w, x)": (["z"], {**w(4, 4), "inputs": "float[4,N] x", "axis": 0, "affine": SCALE}),
    "d = DequantizeLinear <axis=0> (q, s)\n z = Conv (x, d)": (["d", "z"], {**QUANTIZED, "s": SCALES}),
    "d = DequantizeLinear <axis=-4> (q, s)\n z = Conv (x, d)": (["d", "z"], {**QUANTIZED, "s": SCALES}),
    "d = DequantizeLinear (q, s)\n z = Conv (x, d)": (["d", "z"], {**QUANTIZED, "s": SCALES[0]}),
    "d = DequantizeLinear (q, s)\n z = Conv (x, d) ": (
        ["d", "z"],
        {**QUANTIZED, "s": SCALES[0], "opset": 12, "affine": TWICE},
    ),
    CONV + "z = MaxPool <kernel_shape=[3,3], dilations=[1,1], pads=[1,1,1,1]> (c)": (
        ["c"],
        {**w(4, 4, 1, 1), "affine": POSITIVE},
    ),
    "z = InstanceNormalization (x, w, w)": (["z"], w(4)),
}


@pytest.mark.parametrize("body", ACCEPTED)
def test_accepted(body: str) -> None:
    changed, options = ACCEPTED[body]
    body = "\n".join(sorted(body.split("\n "), key=lambda line: line.startswith("z")))
    plan = attempt("backward", body, **options).plan
    assert sorted(node.outputs[0].name or "" for node in plan.targets) == changed
    assert {name for _, name in plan.attributes} == ({"axis"} if "Dequantize" in body else set())


ACCEPTED_BELOW: dict[str, dict[str, Any]] = {
    "u = Unsqueeze <axes=[1]> (x)\n y = MatMul (u, w)": {**w(4, 4), "inputs": ROWS, "opset": 11, "affine": SCALE},
    "r = Reshape (x, s)\n y = Conv (r, w)": {**w(4, 4, 1), "inputs": "float[?,4,3,3] x", "s": [0, 4, 9]},
    "u = Unsqueeze <axes=[2]> (x)\n y = Conv (u, w)": {**w(4, 4, 1), "inputs": ROWS, "opset": 10},
    "y = ConvTranspose (x, w)": w(4, 3, 1, 1),
    'y = ConvTranspose <strides=[1,1], pads=[0,0,0,0], output_padding=[0,0], auto_pad="VALID"> (x, w)': w(4, 3, 1, 1),
}


@pytest.mark.parametrize("body", ACCEPTED_BELOW)
def test_accepted_below(body: str) -> None:
    assert [node.outputs[0].name for node in attempt("forward", body, **ACCEPTED_BELOW[body]).plan.targets] == ["y"]


def test_a_zero_point_becomes_one_for_each_channel() -> None:
    """Scales do; ONNX asks for zero points of their shape."""
    body = "d = DequantizeLinear (q, s, o)\n z = Conv (x, d)"
    plan = attempt("backward", body, **QUANTIZED, s=SCALES[0], o=np.int8(3)).plan
    (points,) = [edit for (node, index), edit in plan.edits.items() if (node.op_type, index) == ("DequantizeLinear", 2)]
    assert isinstance(points, Raw) and points.values.tolist() == [3] * 4 and points.values.dtype == np.int8


def test_a_table_beyond_the_bound_of_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound, changed in ((80, True), (79, False)):
        monkeypatch.setattr(gather, "ELEMENTS", bound)
        body = "z = Gather (t, x)"
        with contextlib.nullcontext() if changed else pytest.raises(Refused, match="too large to be shifted"):
            attempt("backward", body, inputs="int64[N] x", shapes={"t": (20, 4)})


@pytest.mark.parametrize(
    ("body", "products", "options"),
    [
        ("z = Gemm <alpha=0.5> (x, w)", 6 * 0.25, {**w(6, 4), "inputs": "float[N,6] x"}),
        ("z = ConvTranspose <group=2> (x, w)", 9, {**w(6, 2, 1, 3), "inputs": "float[N,6,H,W] x"}),
    ],
)
def test_products_that_an_output_adds_up(
    monkeypatch: pytest.MonkeyPatch, body: str, products: float, options: dict[str, Any]
) -> None:
    """They bound the rounding error that hides what a weight loses."""
    seen = []
    monkeypatch.setattr(Plan, "scale", lambda *_, products, **__: seen.append(products))
    attempt("backward", body, **options)
    assert seen == [products]


@pytest.mark.parametrize(("ir_version", "opset"), [(3, 8), (4, 9)])
def test_new_constants_are_inputs_before_ir_version_4_only(ir_version: int, opset: int) -> None:
    body = "g (float[N,4,H,W] x) => (float[N,4,A,B] y) { z = Conv (x, w)\n y = BatchNormalization (z, p_s, p_b, p_m, p_v) }"
    proto = model(body, {"w": (4, 4, 1, 1), **batch_norm("p", 4)}, ir_version=ir_version, opset=opset)
    folded, _ = fold_and_check(proto, oracle=False)  # onnx's reference has no BatchNormalization so old
    names = {tensor.name for tensor in folded.graph.initializer}
    assert len(names) == 2
    assert {value.name for value in folded.graph.input} == ({"x", *names} if ir_version == 3 else {"x"})


def test_new_constants_of_an_old_body_are_nodes() -> None:
    """Its initializers would have to be inputs, which a branch of an If has not."""
    body = """g (float[N,4,H,W] x, bool c) => (float[N,4,A,B] y) {
        y = If (c) <then_branch = t () => (float[N,4,H,W] a) { z = Conv (x, w) a = BatchNormalization (z, p_s, p_b, p_m, p_v) },
                    else_branch = e () => (float[N,4,H,W] b) { b = Relu (x) }> }"""
    proto = model(body, {"w": (4, 4, 1, 1), **batch_norm("p", 4)}, ir_version=3, opset=8)
    folded, _ = fold_and_check(proto, oracle=False)
    branch = folded.graph.node[0].attribute[0].g
    assert ([node.op_type for node in branch.node], len(branch.initializer)) == (["Constant", "Constant", "Conv"], 0)


def test_the_scale_of_a_quantized_weight_changes_once() -> None:
    body = "d = DequantizeLinear (q, s)\n z = Conv (x, d)"
    search = attempt("backward", body, **QUANTIZED, s=SCALES[0])
    conv = search.context.model.graph[1]
    for later in (search.plan, Plan(search.context)):
        with pytest.raises(Refused, match="has been changed already"):
            later.scale(conv, 1, np.full((4, 1, 1, 1), 2.0), "weight")
        search.plan.commit()
