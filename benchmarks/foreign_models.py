"""Small models for foreign_folds: patterns that tools fold, and models that tools are known to break."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.parser

from benchmarks import fold_models

_NORM = "y = BatchNormalization (z, p_s, p_b, p_m, p_v)"
_OUT = "float[A,B,C,D] y"
_X = "float[2,6,9,9] x"


def _vectors(prefix: str, channels: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}_{name}": (channels,) for name in "sbmv"}


def _model(
    body: str,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    ins: str = _X,
    out: str = _OUT,
    values: Mapping[str, np.ndarray] | None = None,
    dtype: str = "float32",
    opset: str = '"" : 17',
) -> onnx.ModelProto:
    """A graph in ONNX text; parameters are random, variances (_v) and scales (_s) positive."""
    generator = np.random.default_rng(1)
    if dtype == "float16":
        ins, out = ins.replace("float[", "float16["), out.replace("float[", "float16[")
    proto = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{opset}]> g ({ins}) => ({out}) {{ {body} }}")
    for name, shape in shapes.items():
        value = generator.standard_normal(shape)
        value = np.abs(value) + 0.5 if name[-2:] in ("_v", "_s") else value
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(dtype), name))
    for name, given in (values or {}).items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(given, name))
    return proto


def _conv(body: str = f"z = Conv <pads=[1,1,1,1]> (x, w)\n{_NORM}", **options: object) -> onnx.ModelProto:
    shapes = {"w": (8, 6, 3, 3), **_vectors("p", 8), **options.pop("shapes", {})}  # type: ignore[dict-item]
    gone = options.get("values", {})
    return _model(body, {name: shape for name, shape in shapes.items() if name not in gone}, **options)  # type: ignore[arg-type, operator]


def patterns() -> dict[str, onnx.ModelProto]:
    """What a right fold exists of."""
    two = {"ins": "float[N,6] x", "out": "float[N,8] y"}
    rows = {"ins": "float[N,5,6] x", "out": "float[N,8,5] y"}
    turned = "z = Transpose <perm=[0,2,1]> (t)\n" + _NORM
    return {
        "Conv": _conv(),
        "Conv 1-D": _model(
            f"z = Conv (x, w, b)\n{_NORM}",
            {"w": (8, 6, 3), "b": (8,), **_vectors("p", 8)},
            ins="float[2,6,9] x",
            out="float[A,B,C] y",
        ),
        "Conv 3-D, groups": _model(
            f"z = Conv <group=2> (x, w)\n{_NORM}",
            {"w": (8, 3, 2, 2, 2), **_vectors("p", 8)},
            ins="float[1,6,4,4,4] x",
            out="float[A,B,C,D,E] y",
        ),
        "depthwise Conv": _model(f"z = Conv <group=6> (x, w)\n{_NORM}", {"w": (6, 1, 3, 3), **_vectors("p", 6)}),
        "Conv, mean / std = 10,000": _conv(values={"p_m": np.full(8, 1e4, np.float32), "p_v": np.ones(8, np.float32)}),
        "Conv, float16": _conv(dtype="float16"),
        "Conv with a shared weight": _conv(
            "t = Conv (x, w)\nu = Conv (t, v)\nz = Conv (x, w)\nr = BatchNormalization (z, p_s, p_b, p_m, p_v)\n"
            "q = Conv (r, v)\ny = Add (q, u)",
            shapes={"v": (6, 8, 1, 1)},
        ),
        "ConvTranspose": _model(
            f"z = ConvTranspose <strides=[2,2]> (x, w)\n{_NORM}", {"w": (6, 8, 3, 3), **_vectors("p", 8)}
        ),
        "ConvTranspose, groups": _model(
            f"z = ConvTranspose <group=2> (x, w)\n{_NORM}", {"w": (6, 4, 3, 3), **_vectors("p", 8)}
        ),
        "ConvTranspose, Add": _model(
            f"t = ConvTranspose <strides=[2,2]> (x, w)\nz = Add (t, a)\n{_NORM}",
            {"w": (6, 8, 3, 3), "a": (1, 8, 1, 1), **_vectors("p", 8)},
        ),
        "Gemm": _model(f"z = Gemm <transB=1> (x, w, b)\n{_NORM}", {"w": (8, 6), "b": (8,), **_vectors("p", 8)}, **two),
        "MatMul": _model(f"z = MatMul (x, w)\n{_NORM}", {"w": (6, 8), **_vectors("p", 8)}, **two),
        "MatMul, Add": _model(
            f"t = MatMul (x, w)\nz = Add (t, b)\n{_NORM}", {"w": (6, 8), "b": (8,), **_vectors("p", 8)}, **two
        ),
        "MatMul, Transpose": _model(f"t = MatMul (x, w)\n{turned}", {"w": (6, 8), **_vectors("p", 8)}, **rows),
        "forward into Conv": _model(
            "z = BatchNormalization (x, p_s, p_b, p_m, p_v)\ny = Conv (z, w)", {"w": (8, 6, 3, 3), **_vectors("p", 6)}
        ),
        "ResNet-50": fold_models.resnet50(),
    }


def traps() -> dict[str, onnx.ModelProto]:
    """What tools are known to break, or may not touch."""
    square = {"w": (6, 8), **_vectors("p", 8)}
    training = "y = BatchNormalization <training_mode=1> (z, p_s, p_b, p_m, p_v)"
    overridable = _conv()
    overridable.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in overridable.graph.initializer
    )
    return {
        "MatMul, Transpose, rows = C": _model(
            f"t = MatMul (x, w)\nz = Transpose <perm=[1,0]> (t)\n{_NORM}",
            square,
            ins="float[8,6] x",
            out="float[8,8] y",
        ),
        "MatMul, Reshape": _model(
            f"t = MatMul (x, w)\nz = Reshape (t, c)\n{_NORM}",
            square,
            ins="float[16,6] x",
            out="float[2,8,8] y",
            values={"c": np.array([2, 8, 8])},
        ),
        "Conv, Mul along the last axis": _conv(
            "t = Conv (x, w)\ny = Mul (t, d)", ins="float[2,6,10,10] x", shapes={"d": (8,)}
        ),
        "Conv, training": _conv(f"z = Conv (x, w)\n{training}"),
        "Conv, is_test = 0, opset 6": _conv(
            "z = Conv (x, w)\ny = BatchNormalization <is_test=0> (z, p_s, p_b, p_m, p_v)", opset='"" : 6'
        ),
        "Conv, parameters that a caller may give": overridable,
        "BatchNormalization of another domain": _conv(
            "z = Conv (x, w)\ny = other.BatchNormalization (z, p_s, p_b, p_m, p_v)", opset='"" : 17, "other" : 1'
        ),
        "Conv, a weight overflows": _conv(
            values={
                "p_v": np.array([1e-36] + [1.0] * 7, np.float32),
                "p_s": np.array([1e38] + [1.0] * 7, np.float32),
                "p_m": np.zeros(8, np.float32),
                "w": np.concatenate([np.full((1, 6, 3, 3), 1e-3), np.ones((7, 6, 3, 3))]).astype(np.float32),
            }
        ),
        "Conv, a float16 weight overflows": _conv(
            dtype="float16",
            values={
                "p_s": np.array([3e4] + [1.0] * 7, np.float16),
                "p_v": np.ones(8, np.float16),
                "w": np.concatenate([np.full((1, 6, 3, 3), 4.0), np.ones((7, 6, 3, 3))]).astype(np.float16),
            },
        ),
        "Conv, read twice": _conv(f"z = Conv (x, w)\n{_NORM}\nq = Relu (z)", out=f"{_OUT}, float[E,F,G,H] q"),
        "Conv, Relu": _conv(f"t = Conv (x, w)\nz = Relu (t)\n{_NORM}"),
    }
