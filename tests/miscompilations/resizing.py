"""Mistakes with Resize and Upsample."""

from __future__ import annotations

from tests.miscompilations.mistake import OURS, Mistake, floats, ints

_DOUBLED = "float[N,1,4,4] x => float[N,1,8,8] y"
_SCALES = floats([1, 1, 2, 2])

MISTAKES: list[Mistake] = [
    Mistake("resize_in_front_of_transpose", "microsoft/onnxruntime#9870", "Transpose, Resize",
        "A Transpose moves behind a Resize, whose scales stay as they were.", graph="float[N,4,4,4] x => float[N,A,B,C] y",
        values={"s": floats([1, 2, 2, 1]), "r": floats([1, 1, 2, 2])}, original="t = Transpose <perm=[0,2,3,1]> (x) y = Resize "
        '<mode="nearest"> (t, , s)', wrong='t = Resize <mode="nearest"> (x, , s) y = Transpose <perm=[0,2,3,1]> (t)',
        right='t = Resize <mode="nearest"> (x, , r) y = Transpose <perm=[0,2,3,1]> (t)'),
    Mistake("resize_to_constant_sizes", OURS, "Resize", "Scales became the sizes that they give at one size of the input.",
        graph="float[2,1,H,32] x => float[2,1,A,64] y", values={"s": _SCALES, "n": ints(2, 1, 64, 64)},
        original='y = Resize <mode="nearest"> (x, , s)', wrong='y = Resize <mode="nearest"> (x, , , n)'),
    Mistake("resize_10_to_11", "onnx/onnx#8480", "Resize", "The conversion to opset 11 keeps no attribute for what opset 10 always did.",
        graph=_DOUBLED, values={"s": _SCALES, "roi": floats([])}, opset=10, original='y = Resize <mode="linear"> (x, s)',
        wrong='y = Resize <mode="linear"> (x, roi, s)', wrong_opset=11, right='y = Resize <mode="linear", '
        'coordinate_transformation_mode="asymmetric"> (x, roi, s)', right_opset=11),
    Mistake("upsample_nearest", "apache/tvm#20415", "Upsample", "The nearest element is found by rounding, where Upsample takes the "
        "floor.", graph=_DOUBLED, values={"s": _SCALES}, opset=9, original='y = Upsample <mode="nearest"> (x, s)',
        wrong='y = Resize <mode="nearest", nearest_mode="round_prefer_ceil", coordinate_transformation_mode="asymmetric"> (x, , s)',
        wrong_opset=13, right='y = Resize <mode="nearest", nearest_mode="floor", coordinate_transformation_mode="asymmetric"> (x, , s)',
        right_opset=13),
    Mistake("upsample_linear", "Xilinx/onnx-mlir#318", "Upsample", "An Upsample becomes a Resize with half-pixel coordinates instead of "
        "asymmetric ones.", graph=_DOUBLED, values={"s": _SCALES}, opset=9, original='y = Upsample <mode="linear"> (x, s)',
        wrong='y = Resize <mode="linear", coordinate_transformation_mode="half_pixel"> (x, , s)', wrong_opset=13,
        right='y = Resize <mode="linear", coordinate_transformation_mode="asymmetric"> (x, , s)', right_opset=13),
    Mistake("align_corners", "onnx/tensorflow-onnx#1144", "Resize", "align_corners is never set.", graph=_DOUBLED,
        values={"s": _SCALES, "n": ints(8, 8)}, original='y = Resize <mode="linear", coordinate_transformation_mode="align_corners"> (x, '
        ", s)", wrong='y = Resize <mode="linear", coordinate_transformation_mode="asymmetric"> (x, , s)'),
]  # fmt: skip
