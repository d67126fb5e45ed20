"""Models in ONNX text, their parameters from a seed, and a float64 oracle."""

import ast
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import onnx.reference
import onnx.reference.op_run
import onnx.shape_inference

from bnexport import tolerances
from bnexport.folding import FoldResult, fold
from bnexport.model_io import to_proto

FLOAT, DOUBLE = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
_NORM = re.compile(r"\bNorm\b([^(]*)\(([^(),]*), (\w+)(\+?)(?::(\d+))?\)")
_SHAPED = re.compile(r"\b(\w+):(-|\d+(?:\.\d+)*)")


def parameters(shapes: Mapping[str, tuple[int, ...]], seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Random parameters; a name that ends in _v is a variance, in _s a scale away from 0, in _g one above 0."""
    generator = np.random.default_rng(seed)
    values = {}
    for name, shape in shapes.items():
        value = generator.standard_normal(shape)
        if name.endswith("_v"):
            value = np.abs(value) + 0.5
        elif name.endswith("_s"):
            value = np.sign(value) * (np.abs(value) + 0.2)
        elif name.endswith("_g"):
            value = np.abs(value) + 0.2
        values[name] = value.astype(dtype)
    return values


def batch_norm(prefix: str, channels: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters p_s, p_b, p_m, p_v."""
    return {f"{prefix}_{name}": (channels,) for name in "sbmv"}


def model(
    body: str,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    values: Mapping[str, np.ndarray] | None = None,
    opset: int = 17,
    ir_version: int = 8,
    seed: int = 0,
    dtype: str = "float32",
    header: str | None = None,
) -> onnx.ModelProto:
    """`body` is a graph in ONNX text; the parameters become initializers.

    A parameter's first mention may give its shape: `w:8.6.3.3`, `k:-` of a scalar. `Norm (z, p:8)` is a batch norm with
    p_s, p_b, p_m and p_v, or, as `p+:8`, with scales p_g above 0. Outputs may lack their types.
    """
    header = header or f'<ir_version: {ir_version}, opset_import: ["": {opset}]>'
    body, written = _plain(body)
    shapes = {name: shape for name, shape in {**written, **(shapes or {})}.items() if name not in (values or {})}
    proto = onnx.parser.parse_model(f"{header}\n{body}")
    for name, value in {**parameters(shapes or {}, seed, dtype), **(values or {})}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        if ir_version < 4:
            proto.graph.input.append(
                onnx.helper.make_tensor_value_info(name, proto.graph.initializer[-1].data_type, value.shape)
            )
    if not all(value.HasField("type") for value in proto.graph.output):
        inferred = {value.name: value for value in onnx.shape_inference.infer_shapes(proto).graph.output}
        for value in proto.graph.output:
            value.CopyFrom(inferred[value.name])
            value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or FLOAT
            for dim in value.type.tensor_type.shape.dim:
                dim.ClearField("dim_param")
    return proto


def _plain(body: str) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return plain ONNX text, and the shapes that stood in it."""
    shapes: dict[str, tuple[int, ...]] = {}

    def norm(found: re.Match[str]) -> str:
        attributes, value, prefix, positive, channels = found.groups()
        names = [f"{prefix}_{part}" for part in ("gbmv" if positive else "sbmv")]
        shapes.update({name: (int(channels),) for name in names} if channels else {})
        return f"BatchNormalization{attributes}({value}, {', '.join(names)})"

    def shaped(found: re.Match[str]) -> str:
        name, sizes = found.groups()
        shapes[name] = () if sizes == "-" else tuple(map(int, sizes.split(".")))
        return name

    return _SHAPED.sub(shaped, _NORM.sub(norm, body)), shapes


def array_of(proto: onnx.ModelProto, name: str) -> np.ndarray:
    """Return a copy of an initializer."""
    return onnx.numpy_helper.to_array(next(each for each in proto.graph.initializer if each.name == name)).copy()


def with_arrays(proto: onnx.ModelProto, arrays: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """Return a copy with other numbers in some initializers."""
    changed = onnx.ModelProto.FromString(proto.SerializeToString())
    for tensor in changed.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(onnx.numpy_helper.from_array(arrays[tensor.name], tensor.name))
    return changed


def in_double(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with every float32 a float64."""
    double = onnx.ModelProto()
    double.CopyFrom(proto)
    _widen(double)
    return double


def _widen(message: Any) -> None:
    """Widen tensors, types, and what Cast and Constant make, in a message and those in it."""
    if isinstance(message, onnx.TensorProto):
        if message.data_type == FLOAT:
            values = onnx.numpy_helper.to_array(message).astype(np.float64)
            message.CopyFrom(onnx.numpy_helper.from_array(values, message.name))
        return
    if isinstance(message, onnx.TypeProto.Tensor) and message.elem_type == FLOAT:
        message.elem_type = DOUBLE
    for attribute in message.attribute if isinstance(message, onnx.NodeProto) else ():
        if message.op_type == "Cast" and attribute.name == "to" and attribute.i == FLOAT:
            attribute.i = DOUBLE
        if message.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            number = attribute.f if attribute.name == "value_float" else list(attribute.floats)
            value = onnx.numpy_helper.from_array(np.asarray(number, np.float64))
            attribute.CopyFrom(onnx.helper.make_attribute("value", value))
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if hasattr(value, "__len__") else [value]:
                _widen(each)


def exact(proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs in float64, by ONNX's reference implementation."""
    wide = {name: value.astype(np.float64) if value.dtype == np.float32 else value for name, value in inputs.items()}
    return onnx.reference.ReferenceEvaluator(in_double(proto), new_ops=[ConvTranspose]).run(None, wide)


class ConvTranspose(onnx.reference.op_run.OpRun):
    """PyTorch's; the reference implementation fails on groups. Pads must be symmetric."""

    def _run(self, x, w, b=None, auto_pad=None, dilations=None, group=None, kernel_shape=None,
             output_padding=None, output_shape=None, pads=None, strides=None):  # fmt: skip
        import torch

        dims = x.ndim - 2
        pads = pads or [0] * (2 * dims)
        assert pads[:dims] == pads[dims:]
        assert not output_shape
        assert auto_pad in (None, "NOTSET")
        function = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}[dims]
        arrays = [None if array is None else torch.tensor(array) for array in (x, w, b)]
        options = [
            strides or [1] * dims,
            pads[:dims],
            output_padding or [0] * dims,
            group or 1,
            dilations or [1] * dims,
        ]
        return (function(*arrays, *options).numpy(),)


def run(proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of ONNX Runtime, the graph as it is written."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(inputs))


def array(text: str) -> np.ndarray:
    """Read `[1,2]` of int64, `float32 1.5`, or one number for a shape, `int8 3*4.4.1.1`."""
    *dtype, numbers = text.rsplit(" ", 1)
    numbers, _, sizes = numbers.partition("*")
    values = np.array(ast.literal_eval(numbers), dtype[0] if dtype else np.int64)
    return np.full([int(size) for size in sizes.split(".")], values) if sizes else values


def make_inputs(proto: onnx.ModelProto, sizes: Mapping[str, int] | None = None, seed: int = 7) -> dict[str, np.ndarray]:
    """Inputs with 2 for N and 7 for every other free size, unless `sizes` says otherwise."""
    generator = np.random.default_rng(seed)
    given = {tensor.name for tensor in proto.graph.initializer}
    inputs = {}
    for value in proto.graph.input:
        if value.name in given:
            continue
        shape = []
        for dim in value.type.tensor_type.shape.dim:
            free = {"N": 2, **(sizes or {})}.get(dim.dim_param, 7)
            shape.append(free if dim.dim_param or not dim.HasField("dim_value") else dim.dim_value)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        inputs[value.name] = (
            generator.standard_normal(shape).astype(dtype) if dtype.kind == "f" else np.ones(shape, dtype)
        )
    return inputs


def operators(proto: onnx.ModelProto) -> list[str]:
    """Operator types of the main graph, in order."""
    return [node.op_type for node in proto.graph.node]


def batch_norms(proto: onnx.ModelProto) -> int:
    """BatchNormalization nodes anywhere in the model."""

    def count(nodes: list[onnx.NodeProto]) -> int:
        return sum(
            (node.op_type == "BatchNormalization" and node.domain == "")
            + sum(count(attribute.g.node) for attribute in node.attribute if attribute.HasField("g"))
            for node in nodes
        )

    return count(proto.graph.node) + sum(count(function.node) for function in proto.functions)


def assert_near(got: np.ndarray, expected: np.ndarray, what: str = "output") -> None:
    """Within the table's bound for a whole model."""
    assert got.shape == expected.shape, what
    name = str(got.dtype)
    bound = tolerances.model(name if name in tolerances.UNIT_ROUNDOFF else "float64", expected)
    error = np.abs(got.astype(np.float64) - expected.astype(np.float64))
    assert (error <= bound.atol + bound.rtol * np.abs(expected)).all(), f"{what}: {error.max()} > {bound}"


def passes_full_check(proto: onnx.ModelProto) -> bool:
    """Whether ONNX accepts the model with its shapes: those declared must be those inferred."""
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    return True


def fold_and_check(
    proto: onnx.ModelProto,
    *,
    left: int = 0,
    sizes: Mapping[str, int] | None = None,
    oracle: bool = True,
    **options: object,
) -> tuple[onnx.ModelProto, FoldResult]:
    """Folds; the result is valid, unchanged outside, has `left` batch norms, and is right to float64's eye."""
    untouched = proto.SerializeToString()
    inputs = make_inputs(proto, sizes)
    result = fold(proto, inputs=inputs, **options)  # type: ignore[arg-type]
    folded = to_proto(result.model)
    assert proto.SerializeToString() == untouched, "the source was modified"
    assert [value.name for value in folded.graph.output] == [value.name for value in proto.graph.output]
    assert batch_norms(folded) == left, [(site.nodes, site.reason) for site in result.report.sites]
    verified = options.get("verify", True)
    assert not (result.report.changed and verified) or result.report.verification.passed, result.report.verification
    onnx.checker.check_model(folded, full_check=passes_full_check(proto))
    expected = exact(proto, inputs) if oracle else run(proto, inputs)
    for value, got, reference in zip(folded.graph.output, run(folded, inputs), expected, strict=True):
        assert_near(got, reference, value.name)
    return folded, result


def assert_refused(
    proto: onnx.ModelProto,
    code: str,
    *,
    sizes: Mapping[str, int] | None = None,
    node: str | None = None,
    **options: object,
) -> None:
    """The batch norms stay, for the reason given, and nothing else changes."""
    result = fold(proto, inputs=make_inputs(proto, sizes), verify=False, **options)  # type: ignore[arg-type]
    sites = [site for site in result.report.sites if node is None or node in site.nodes]
    assert sites, "no site was reported"
    for site in sites:
        assert site.outcome == "kept", site
        assert code in [refusal.code for refusal in site.refusals], site.refusals
    folded = to_proto(result.model)
    assert batch_norms(folded) == batch_norms(proto)
    if all(site.outcome == "kept" for site in result.report.sites):
        before, after = ({each.name: each.raw_data for each in it.graph.initializer} for it in (proto, folded))
        assert before == after


def operators_of(result: FoldResult) -> list[str]:
    """Operator types of a folded model's main graph, in order."""
    return operators(to_proto(result.model))
