"""One-node models of our operators, as bytes, and feeds for them."""

import ctypes
import os

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from bnexport import schema, tolerances
from bnexport.native import capi
from bnexport.native.library import register
from tests.support.kernel_reference import DTYPES, statistics_dtype

ELEMENT_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float64": TensorProto.DOUBLE,
}
FORWARD_INPUTS = ("input", "running_mean", "running_var", "weight", "bias")
FORWARD_OUTPUTS = ("output", "running_mean_out", "running_var_out", "saved_mean", "saved_invstd")
GRAD_INPUTS = ("grad_output", "input", "weight", "saved_mean", "saved_invstd")
GRAD_OUTPUTS = ("grad_input", "", "", "grad_weight", "grad_bias")


def node_model(
    operator: schema.Operator,
    *,
    inputs,
    outputs,
    dtype="float32",
    domain=schema.DOMAIN,
    name="bn1",
    ranks=4,
    opset=17,
    **attributes,
) -> bytes:
    """`inputs`, `outputs`: names in order, "" where absent. `ranks`: number of data dimensions, all dynamic."""
    data, statistics = ELEMENT_TYPES[dtype], ELEMENT_TYPES[tolerances.STATISTICS_TYPE[dtype]]

    def info(value: str, index: int, values: tuple[schema.Value, ...]) -> onnx.ValueInfoProto:
        if index < len(values) and values[index].type == "T":
            return helper.make_tensor_value_info(value, data, [None] * ranks)
        return helper.make_tensor_value_info(value, statistics, [None])

    node = helper.make_node(operator.name, list(inputs), list(outputs), name=name, domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        "one_node",
        [info(value, index, operator.inputs) for index, value in enumerate(inputs) if value],
        [info(value, index, operator.outputs) for index, value in enumerate(outputs) if value],
    )
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()


def forward_model(**options) -> bytes:
    return node_model(schema.SYNC_BATCH_NORM, **({"inputs": FORWARD_INPUTS, "outputs": FORWARD_OUTPUTS} | options))


def grad_model(**options) -> bytes:
    return node_model(schema.SYNC_BATCH_NORM_GRAD, **({"inputs": GRAD_INPUTS, "outputs": GRAD_OUTPUTS} | options))


def session(model: bytes, *, threads: int = 0, training: bool = False) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    # Under sanitizers each tensor is a block of its own.
    options.enable_cpu_mem_arena = "libasan" not in os.environ.get("LD_PRELOAD", "")
    register(options, training=training)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(model: bytes | ort.InferenceSession, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Feeds and outputs by name; bfloat16 goes through OrtValue, which numpy feeds do not support."""
    s = session(model) if isinstance(model, bytes) else model
    wanted = {i.name: feeds[i.name] for i in s.get_inputs()}
    names = [output.name for output in s.get_outputs()]
    if not any(value.dtype == ml_dtypes.bfloat16 for value in wanted.values()):
        return dict(zip(names, s.run(names, wanted), strict=True))

    def held(array: np.ndarray) -> ort.OrtValue:
        if array.dtype != ml_dtypes.bfloat16:
            return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
        bits = np.ascontiguousarray(array).view(np.uint16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)

    binding, values = s.io_binding(), {name: held(value) for name, value in wanted.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    # Outputs of bfloat16 have the shape of the data, and are written where NumPy reads them.
    shape = next(value.shape for value in wanted.values() if value.dtype == ml_dtypes.bfloat16)
    narrow = {each.name: np.zeros(shape, np.uint16) for each in s.get_outputs() if each.type == "tensor(bfloat16)"}
    for name in names:
        if name in narrow:
            values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(narrow[name], TensorProto.BFLOAT16)
            binding.bind_ortvalue_output(name, values[name])
        else:
            binding.bind_output(name)
    s.run_with_iobinding(binding)
    found = zip(names, binding.get_outputs(), strict=True)
    return {name: narrow[name].view(ml_dtypes.bfloat16) if name in narrow else value.numpy() for name, value in found}


@capi.ALL_GATHER
def echo(_, send, receive, count, error, capacity):
    """The exchange of two processes that hold the same data."""
    for rank in range(2):
        ctypes.memmove(receive + 8 * count * rank, send, 8 * count)
    return 0


def forward_feeds(rng: np.random.Generator, shape, dtype="float32", *, mean=0.0, std=1.0) -> dict[str, np.ndarray]:
    C, S = shape[1], statistics_dtype(dtype)
    return {
        "input": (rng.normal(size=shape) * std + mean).astype(DTYPES[dtype]),
        "running_mean": rng.normal(size=C).astype(S),
        "running_var": (rng.random(C) + 0.5).astype(S),
        "weight": rng.normal(size=C).astype(S),
        "bias": rng.normal(size=C).astype(S),
    }
