"""Small models that fuzzing starts from, made of our own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
from onnx import TensorProto

from tests.support.onnx_text import model

DATA_BYTES = 8192
_WIDER = "g (float[N,6,H,W] x) => (float[N,8,A,B] y)"
# Graphs in ONNX text.
_TEXTS: dict[str, str] = {
    "conv": f"{_WIDER} {{ z = Conv <pads = [1, 1, 1, 1]> (x, w:8.6.3.3, b:8) t = Norm (z, p:8) y = Relu (t) }}",
    "transposed": f"{_WIDER} {{ z = ConvTranspose <group = 2> (x, w:6.4.2.2) y = Norm (z, p:8) }}",
    "before": f"{_WIDER} {{ z = Norm (x, p:6) y = Conv (z, w:8.6.1.1) }}",
    "gemm": "g (float[N,6] x) => (float[N,8] y) { z = Gemm <transB = 1> (x, w:8.6, b:8) y = Norm (z, p:8) }",
    "split": """g (float[N,6,H,W] x) => (float[N,6,A,B] y) { z = Conv (x, w:6.6.1.1) a, c = Split <axis = 1> (z)
        s = Concat <axis = 1> (c, a) y = Norm (s, p:6) }""",
    "scaled": f"""{_WIDER} {{ z = Conv (x, w:8.6.1.1)
        k = Constant <value = float[1, 8, 1, 1] {{1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}}> () m = Mul (z, k) t = Norm (m, p:8)
        a = Add (t, k) y = Relu (a) }}""",
    "shared": f"""{_WIDER} {{ z = Conv (x, w:8.6.1.1) v = Conv (x, w) t = Norm (z, p:8) u = Norm (v, p)
        y = Add (t, u) }}""",
    "decomposed": """g (float[N,8,H,W] x) => (float[N,8,H,W] y) { c = Sub (x, p_m:1.8.1.1)
        e = Constant <value = float {0.00001}> () v = Add (p_v:1.8.1.1, e) r = Sqrt (v) d = Div (c, r)
        s = Mul (d, p_s:1.8.1.1) y = Add (s, p_b:1.8.1.1) }""",
    "training": """g (float[N,8,H,W] x) => (float[N,8,H,W] y, float[8] m, float[8] v) {
        y, m, v = Norm <training_mode = 1> (x, p:8) }""",
    "constants": """g (float[N,4,H,W] x) => (float[N,4,H,W] y) { n = Constant <value_ints = [1, 4, 1, 1]> ()
        k = ConstantOfShape <value = float[1] {2.0}> (n) t = Reshape (k, n) u = Unsqueeze (q:4.1, axes) s = Mul (t, u)
        y = Mul (x, s) }""",
    "sync": f"""{_WIDER} {{ z = Conv (x, w:8.6.3.3) y = mmcv.MMCVSyncBatchNorm
        <eps = 0.001, group = "world", group_size = 2> (z, p_m:8, p_v:8, p_s:8, p_b:8) }}""",
    "sync-inference": f"""{_WIDER} {{ z = Conv (x, w:8.6.3.3) y = mmcv.MMCVSyncBatchNorm
        <training_mode = 0, momentum = 0.1> (z, p_m:8, p_v:8, p_s:8, p_b:8) }}""",
}  # fmt: skip


def _bodies() -> onnx.ModelProto:
    """Tensors, nodes and batch norms in bodies, functions, lists and attributes."""
    proto = model("""g (float[N,6,H,W] x, bool c) => (float[N,8,A,B] y) { z = Conv (x, w:8.6.1.1) y = If (c) <
        then_branch = a () => (float[N,8,A,B] t) { t = Norm (z, p:8) },
        else_branch = b () => (float[N,8,A,B] e) { e = Relu (z) }> }""")
    tensor = onnx.numpy_helper.from_array(np.arange(300, dtype=np.float32), "c")
    proto.graph.node[0].attribute.add(name="more", type=onnx.AttributeProto.TENSORS, tensors=[tensor])
    entry = proto.graph.quantization_annotation.add(tensor_name="w")
    entry.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="p_s")
    for holder in (proto, proto.graph.node[0]):
        holder.metadata_props.add(key="author", value="fuzz")
    return proto


def _called() -> onnx.ModelProto:
    proto = model(
        "g (float[N,6,H,W] x) => (float[N,8,A,B] y) { y = local.block <epsilon = 0.001> (x, w:8.6.1.1, s:8, b:8, m:8, v_v:8) }",
        header='<ir_version: 8, opset_import: ["": 17, "local": 1]>',
    )
    proto.functions.append(
        onnx.parser.parse_function("""<domain: "local", opset_import: ["": 17]>
        block <epsilon> (x, w, s, b, m, v) => (y) { z = Conv (x, w)
            y = BatchNormalization <epsilon: float = @epsilon> (z, s, b, m, v) }""")
    )
    return proto


def _outside() -> onnx.ModelProto:
    """Its weight lies in the file `data`, of DATA_BYTES bytes."""
    proto = model("g (float[N,64] x) => (float[N,32] y) { y = Gemm (x, w:64.32) }")
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "data", "offset": "0", "length": str(DATA_BYTES)}.items():
        tensor.external_data.add(key=key, value=value)
    return proto


def models() -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each model to load, inspect, fold and save."""
    for name, text in _TEXTS.items():
        values = {"axes": np.array([0, 3])} if name == "constants" else None
        header = f'<ir_version: 8, opset_import: ["": {12 if name == "split" else 17}, "mmcv": 1]>'
        yield name, model(text, values=values, header=header).SerializeToString()
    floats = _outside()
    floats.graph.initializer[0].CopyFrom(TensorProto(name="w", data_type=1, dims=[64, 32], float_data=[0.5] * 2048))
    others = {"bodies": _bodies(), "called": _called(), "outside": _outside(), "float-data": floats}
    yield from ((name, proto.SerializeToString()) for name, proto in others.items())
