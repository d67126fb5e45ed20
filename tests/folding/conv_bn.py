"""A Conv with a batch norm behind it, the model of most traps."""

from __future__ import annotations

import onnx
import onnx.helper
import onnx.numpy_helper

from tests.support.onnx_text import (
    batch_norm,
    model,
)

BN = "y = BatchNormalization (z, p_s, p_b, p_m, p_v)"
CONV = "z = Conv (x, w)"
X4 = "float[N,6,H,W] x"


def conv_bn(
    between: str = CONV, *, inputs: str = X4, output: str = "float[N,8,A,B] y", channels: int = 8, **options: object
) -> onnx.ModelProto:
    shapes = {"w": (channels, 6, 1, 1), **batch_norm("p", channels), **options.pop("shapes", {})}  # type: ignore[dict-item]
    shapes = {name: shape for name, shape in shapes.items() if name not in options.get("values", {})}  # type: ignore[operator]
    norm = options.pop("norm", BN)
    return model(f"g ({inputs}) => ({output}) {{ {between}\n {norm} }}", shapes, **options)  # type: ignore[arg-type]
