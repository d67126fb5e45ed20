"""Small models that fuzzing starts from, made of our own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
from onnx import TensorProto

from tests.support.onnx_text import batch_norm, model

_NORM = "BatchNormalization ({x}, p_s, p_b, p_m, p_v)"
_HEADS = ("g (float[N,6,H,W] x) => (float[N,8,A,B] y)", "g (float[N,6,H,W] x) => (float[N,6,A,B] y)")
# Graphs in ONNX text, and the shapes of their parameters.
_TEXTS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "conv": (f"{_HEADS[0]} {{ z = Conv <pads = [1, 1, 1, 1]> (x, w, b)\n t = {_NORM.format(x='z')}\n y = Relu (t) }}",
        {"w": (8, 6, 3, 3), "b": (8,), **batch_norm("p", 8)}),
    "transposed": (f"{_HEADS[0]} {{ z = ConvTranspose <group = 2> (x, w)\n y = {_NORM.format(x='z')} }}",
        {"w": (6, 4, 2, 2), **batch_norm("p", 8)}),
    "before": (f"{_HEADS[0]} {{ z = {_NORM.format(x='x')}\n y = Conv (z, w) }}",
        {"w": (8, 6, 1, 1), **batch_norm("p", 6)}),
    "gemm": (f"g (float[N,6] x) => (float[N,8] y) {{ z = Gemm <transB = 1> (x, w, b)\n y = {_NORM.format(x='z')} }}",
        {"w": (8, 6), "b": (8,), **batch_norm("p", 8)}),
    "split": (
        f"""{_HEADS[1]} {{ z = Conv (x, w)\n a, c = Split <axis = 1> (z)\n s = Concat <axis = 1> (c, a)
            y = {_NORM.format(x="s")} }}""",
        {"w": (6, 6, 1, 1), **batch_norm("p", 6)},
    ),
    "scaled": (
        f"""{_HEADS[0]} {{ z = Conv (x, w)\n k = Constant <value = float[1, 8, 1, 1]
            {{1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}}> ()\n m = Mul (z, k)\n t = {_NORM.format(x="m")}
            a = Add (t, k)\n y = Relu (a) }}""",
        {"w": (8, 6, 1, 1), **batch_norm("p", 8)},
    ),
    "shared": (
        f"""{_HEADS[0]} {{ z = Conv (x, w)\n v = Conv (x, w)\n t = {_NORM.format(x="z")}\n u = {_NORM.format(x="v")}
            y = Add (t, u) }}""",
        {"w": (8, 6, 1, 1), **batch_norm("p", 8)},
    ),
    "decomposed": (
        """g (float[N,8,H,W] x) => (float[N,8,H,W] y) { c = Sub (x, p_m)\n e = Constant <value = float {0.00001}> ()
            v = Add (p_v, e)\n r = Sqrt (v)\n d = Div (c, r)\n s = Mul (d, p_s)\n y = Add (s, p_b) }""",
        dict.fromkeys(batch_norm("p", 8), (1, 8, 1, 1)),
    ),
    "training": (
        f"""g (float[N,8,H,W] x) => (float[N,8,H,W] y, float[8] m, float[8] v) {{
            y, m, v = {_NORM.format(x="x").replace("(", "<training_mode = 1> (", 1)} }}""",
        batch_norm("p", 8),
    ),
    "constants": (
        """g (float[N,4,H,W] x) => (float[N,4,H,W] y) { n = Constant <value_ints = [1, 4, 1, 1]> ()
            k = ConstantOfShape <value = float[1] {2.0}> (n)\n t = Reshape (k, n)\n u = Unsqueeze (q, axes)
            s = Mul (t, u)\n y = Mul (x, s) }""",
        {"q": (4, 1)},
    ),
}  # fmt: skip


def _sync(inputs: str, attributes: str, functions: str = "") -> onnx.ModelProto:
    proto = model(
        f"""g (float[N,6,H,W] x) => (float[N,8,A,B] y) {{ z = Conv (x, w)
            y = mmcv.MMCVSyncBatchNorm <{attributes}> (z, {inputs}) }} {functions}""",
        {"w": (8, 6, 3, 3), **batch_norm("p", 8)},
        header='<ir_version: 8, opset_import: ["": 17, "mmcv": 1, "local": 1]>',
    )
    return proto


def _bodies() -> onnx.ModelProto:
    """Tensors, nodes and batch norms in bodies, functions, lists and attributes."""
    proto = model(
        f"""g (float[N,6,H,W] x, bool c) => (float[N,8,A,B] y) {{
            z = Conv (x, w)
            y = If (c) <
              then_branch = a () => (float[N,8,A,B] t) {{ t = {_NORM.format(x="z")} }},
              else_branch = b () => (float[N,8,A,B] e) {{ e = Relu (z) }}> }}""",
        {"w": (8, 6, 1, 1), **batch_norm("p", 8)},
    )
    proto.graph.node[0].attribute.add(name="more", type=onnx.AttributeProto.TENSORS).tensors.append(
        onnx.numpy_helper.from_array(np.arange(300, dtype=np.float32), "c")
    )
    entry = proto.graph.quantization_annotation.add(tensor_name="w")
    entry.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="p_s")
    proto.metadata_props.add(key="author", value="fuzz")
    proto.graph.node[0].metadata_props.add(key="from", value="here")
    return proto


def _called() -> onnx.ModelProto:
    proto = model(
        "g (float[N,6,H,W] x) => (float[N,8,A,B] y) { y = local.block <epsilon = 0.001> (x, w, p_s, p_b, p_m, p_v) }",
        {"w": (8, 6, 1, 1), **batch_norm("p", 8)},
        header='<ir_version: 8, opset_import: ["": 17, "local": 1]>',
    )
    function = proto.functions.add(name="block", domain="local")
    function.input.extend(["x", "w", "s", "b", "m", "v"])
    function.output.append("y")
    function.attribute.append("epsilon")
    function.opset_import.add(domain="", version=17)
    function.node.append(onnx.helper.make_node("Conv", ["x", "w"], ["z"]))
    node = onnx.helper.make_node("BatchNormalization", ["z", "s", "b", "m", "v"], ["y"])
    node.attribute.add(name="epsilon", type=onnx.AttributeProto.FLOAT, ref_attr_name="epsilon")
    function.node.append(node)
    return proto


def _outside() -> onnx.ModelProto:
    """Its weight lies in the file `data`, of DATA_BYTES bytes."""
    proto = model("g (float[N,64] x) => (float[N,32] y) { y = Gemm (x, w) }", {"w": (64, 32)})
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "data", "offset": "0", "length": "8192"}.items():
        tensor.external_data.add(key=key, value=value)
    return proto


DATA_BYTES = 8192


def models() -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each model to load, inspect, fold and save."""
    for name, (text, shapes) in _TEXTS.items():
        values = {"axes": np.array([0, 3])} if name == "constants" else None
        opset = 12 if name == "split" else 17
        yield name, model(text, shapes, values=values, opset=opset).SerializeToString()
    inputs = "p_m, p_v, p_s, p_b"
    yield "sync", _sync(inputs, 'eps = 0.001, group = "world", group_size = 2').SerializeToString()
    yield "sync-inference", _sync(inputs, "training_mode = 0, momentum = 0.1").SerializeToString()
    yield "bodies", _bodies().SerializeToString()
    yield "called", _called().SerializeToString()
    yield "outside", _outside().SerializeToString()
    floats = _outside()
    floats.graph.initializer[0].CopyFrom(TensorProto(name="w", data_type=1, dims=[64, 32], float_data=[0.5] * 2048))
    yield "float-data", floats.SerializeToString()
