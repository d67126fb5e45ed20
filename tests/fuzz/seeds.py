"""Small models that fuzzing starts from, made of our own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
from onnx import TensorProto

from tests.support.onnx_text import model

DATA_BYTES = 8192
# Graphs in ONNX text behind their names.
_TEXTS = Path(__file__).with_name("seeds.txt").read_text()


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
    for name, text in re.findall(r"^# (\S+)\n([^#]+)", _TEXTS, re.MULTILINE):
        values = {"axes": np.array([0, 3])} if name == "constants" else None
        header = f'<ir_version: 8, opset_import: ["": {12 if name == "split" else 17}, "mmcv": 1]>'
        yield name, model(text, values=values, header=header).SerializeToString()
    floats = _outside()
    floats.graph.initializer[0].CopyFrom(TensorProto(name="w", data_type=1, dims=[64, 32], float_data=[0.5] * 2048))
    others = {"bodies": _bodies(), "called": _called(), "outside": _outside(), "float-data": floats}
    yield from ((name, proto.SerializeToString()) for name, proto in others.items())
