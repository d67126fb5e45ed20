"""The one evaluator of nodes: onnx.reference with its wrong operators mended (`onnx_reference.py`), one node at a time.

Constants of the folder and of the proof, weights that an export computes ahead, and the affine forms of the proof all come
from here. What it answers is a table: an operator that is not in it, a type, or a form that differs from ONNX Runtime's, is
opaque to all of them. `tests/forms/evaluated.py` compares every form of the table with ONNX Runtime.

A node is evaluated in the types of its inputs, or in float64 (`rounded`): then each result is rounded once to the type
that the graph declares, so that a standard deviation that an exporter computes in the graph is not worse than one
computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.errors import MalformedModelError, UnsupportedModelError, first_line
from bnexport.graph.nodes import FLOAT_TYPES, Refused, get_int, get_ints, get_string, label

# Bound on what an operator may make of constants.
_LARGEST = 1 << 27
# Elements of an operand that may set sizes.
_NUMBERS_OF = 64
# The opsets whose forms have been compared; a later one counts as long as it does not change the operator.
FIRST_OPSET, LAST_OPSET = 7, 26


# Data types of raw bytes that NumPy reads as they are.
_STORED: dict[int, np.dtype] = {
    ir.DataType.FLOAT.value: np.dtype("<f4"),
    ir.DataType.DOUBLE.value: np.dtype("<f8"),
    ir.DataType.FLOAT16.value: np.dtype("<f2"),
}


def read_tensor(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return the tensor's values, checked against its declared shape."""
    try:
        if isinstance(tensor, ir.serde.TensorProtoTensor):
            # What `numpy` does for these types as well, in a tenth of the time; models hold many small vectors.
            proto = tensor.raw
            stored = _STORED.get(proto.data_type)
            if stored is not None and proto.HasField("raw_data"):
                return np.frombuffer(proto.raw_data, stored).reshape(proto.dims)
            return tensor.numpy()
        array = tensor.numpy()
    except (ValueError, TypeError, AssertionError) as error:
        raise MalformedModelError(f"tensor {tensor.name!r} cannot be read: {error}") from error
    # A tensor of the file has reshaped itself.
    if array.shape != tuple(tensor.shape.numpy()):
        raise MalformedModelError(f"tensor {tensor.name!r} has {array.shape} values, its shape says {tensor.shape}")
    return array


# The attributes that a Constant node may have, and the types of their numbers; a tensor brings its own.
_CONSTANTS: dict[str, tuple[ir.AttributeType, Any]] = {
    "value": (ir.AttributeType.TENSOR, None),
    "value_float": (ir.AttributeType.FLOAT, np.float32),
    "value_floats": (ir.AttributeType.FLOATS, np.float32),
    "value_int": (ir.AttributeType.INT, np.int64),
    "value_ints": (ir.AttributeType.INTS, np.int64),
}


def constant_tensor(node: ir.Node) -> ir.TensorProtocol:
    """Read a Constant node of any form; each carries exactly one attribute. Raises Refused."""
    if len(node.attributes) != 1:
        raise Refused("bad-attribute", f"{label(node)} has {len(node.attributes)} attributes, expected one")
    attribute = next(iter(node.attributes.values()))
    if attribute.is_ref():
        raise Refused("reference-attribute", f"{label(node)} is given by the function's caller")
    if attribute.name not in _CONSTANTS:
        raise Refused("type", f"{label(node)} holds {attribute.name}, expected numbers")
    kind, dtype = _CONSTANTS[attribute.name]
    if attribute.type is not kind:
        raise Refused("bad-attribute", f"{label(node)}'s {attribute.name} is of another type, expected {kind.name}")
    return attribute.as_tensor() if dtype is None else ir.tensor(np.asarray(attribute.value, dtype))


class NotEvaluated(UnsupportedModelError):
    """The evaluator does not answer for a node. code: as in a `Refused`."""

    def __init__(self, text: str, code: str = "not-constant") -> None:
        self.code = code
        super().__init__(text)


def _is_noop(node: ir.Node) -> bool:
    """Whether a reduction may be one over no axes."""
    given = "axes" in node.attributes or any(value is not None for value in node.inputs[1:])
    return not given and bool(get_int(node, "noop_with_empty_axes", 0))


_FLOATS = frozenset(FLOAT_TYPES)
_NUMBERS = _FLOATS | {"int32", "int64"}
_PLAIN = _NUMBERS | {"bool", "int8", "int16", "uint8", "uint16", "uint32", "uint64"}
_CASTS = frozenset(kind.value for kind in ir.DataType if kind.name.lower() in _PLAIN | {"float", "double"})
_REDUCTIONS = tuple(f"Reduce{kind}" for kind in ("L1", "L2", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"))
# What an operator is answered for: the types of its inputs, None for all.
ANSWERED: dict[str, frozenset[str] | None] = {
    **dict.fromkeys(("Concat", "ConstantOfShape", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity")),
    **dict.fromkeys(
        ("Reshape", "Shape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze")
    ),
    **dict.fromkeys(("DequantizeLinear", "Pad", "Where")),
    "QuantizeLinear": _FLOATS | {"int8", "uint8"},
    **dict.fromkeys(("Cast", "CastLike"), _PLAIN),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Max", "Min", "Pow", "Sum", "Mod", "Range"), _NUMBERS),
    **dict.fromkeys(("Equal", "Greater", "Less", "And", "Or", "Not"), _NUMBERS | {"bool"}),
    **dict.fromkeys(("Exp", "Log", "Reciprocal", "Sqrt", "Floor", "Ceil", "Clip", "Relu", "Sigmoid", "Tanh"), _FLOATS),
    **dict.fromkeys(("LeakyRelu", "Elu", "HardSigmoid", "PRelu", "Softplus", "BatchNormalization"), _FLOATS),
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "MatMul"), _FLOATS),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "GlobalMaxPool"), _FLOATS | {"int64"}),
    **dict.fromkeys(("Resize", "Upsample"), _FLOATS | {"int64"}),
    **dict.fromkeys(_REDUCTIONS, _FLOATS | {"int64"}),
}
# Forms of them that onnx.reference computes in another way than ONNX Runtime, or that no run has compared.
_OPAQUE: dict[str, Callable[[ir.Node], bool]] = {
    # The two place the windows in two ways.
    "AveragePool": lambda node: "auto_pad" in node.attributes and max(get_ints(node, "dilations") or (1,)) > 1,
    "Cast": lambda node: node.attributes["to"].as_int() not in _CASTS,
    "Resize": lambda node: get_string(node, "coordinate_transformation_mode", "") == "tf_crop_and_resize",
    **dict.fromkeys(_REDUCTIONS, _is_noop),
    "QuantizeLinear": lambda node: any(map(node.attributes.__contains__, ("block_size", "output_dtype", "precision"))),
    "DequantizeLinear": lambda node: any(map(node.attributes.__contains__, ("block_size", "output_dtype"))),
}


# Switches. What other numbers mean differs from operator to operator, and between runtimes.
FLAGS = frozenset(
    ("allowzero", "antialias", "ceil_mode", "count_include_pad", "exclude_outside", "keepdims", "noop_with_empty_axes")
    + ("storage_order", "training_mode", "transA", "transB")
)


class Signature:
    """A node under names of its own, i0, i1, ... -> o0, o1, ... Raises NotEvaluated where its schema does not have it."""

    def __init__(self, node: ir.Node, present: Sequence[bool], version: int) -> None:
        """present: which inputs are given. version: of the opset."""
        import onnx.checker
        import onnx.helper

        if any(attribute.is_ref() for attribute in node.attributes.values()):
            raise NotEvaluated(
                f"an attribute of {node.op_type} is given by the function's caller", "reference-attribute"
            )
        if any(each.name in FLAGS and each.value not in (0, 1) for each in node.attributes.values()):
            raise NotEvaluated(f"a switch of {node.op_type} is neither 0 nor 1", "unknown-attribute")
        try:
            self.node, self.proto = node, ir.serde.serialize_node(node)
        except ir.serde.SerdeError as error:  # an attribute that has no type
            raise NotEvaluated(f"{node.op_type} cannot be written", "bad-attribute") from error
        del self.proto.input[:], self.proto.output[:]
        self.proto.input.extend(f"i{index}" if given else "" for index, given in enumerate(present))
        self.proto.output.extend(f"o{index}" if value.name else "" for index, value in enumerate(node.outputs))
        context = type(onnx.checker.DEFAULT_CONTEXT)()
        context.ir_version, context.opset_imports = onnx.IR_VERSION, {"": version}
        try:
            onnx.checker.check_node(self.proto, context)
        except onnx.checker.ValidationError as error:
            raise NotEvaluated(f"{node.op_type}: {first_line(error)}", "unknown-attribute") from error
        self.imports = [onnx.helper.make_opsetid("", version)]
        self.schema = onnx.defs.get_schema(node.op_type, version)

    def shapes(self, inputs: Sequence[np.ndarray | None]) -> list[tuple[int, ...]]:
        """Return the shapes of the outputs that are not absent, as the schema infers them. Raises NotEvaluated."""
        import onnx

        # No schema has float64 everywhere; the sizes are those of float32.
        named = {
            f"i{index}": np.broadcast_to(np.float32(0), array.shape) if is_float(array) else array
            for index, array in enumerate(inputs)
            if array is not None
        }
        kinds = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in named.items()}
        types = {name: onnx.helper.make_tensor_type_proto(kinds[name], array.shape) for name, array in named.items()}
        numbers = {
            f"i{index}": onnx.numpy_helper.from_array(array.astype(np.float32) if is_float(array) else array)
            for index, array in enumerate(inputs)
            if array is not None and array.size <= _NUMBERS_OF
        }
        try:
            inferred = onnx.shape_inference.infer_node_outputs(
                self.schema, self.proto, types, numbers, opset_imports=self.imports
            )
        except onnx.shape_inference.InferenceError as error:
            raise NotEvaluated(f"the inputs of {self.node.op_type} do not fit: {first_line(error)[:200]}") from error
        except onnx.checker.ValidationError as error:
            raise NotEvaluated(f"{self.node.op_type}: {first_line(error)[:200]}", "type") from error
        shapes = [inferred[name].tensor_type.shape.dim for name in self.proto.output if name in inferred]
        if not all(dim.HasField("dim_value") for dims in shapes for dim in dims):
            raise NotEvaluated(f"the sizes that {self.node.op_type} makes are not known")
        return [tuple(dim.dim_value for dim in dims) for dims in shapes]


class NodeEvaluator:
    """One node, ready to be run on several sets of inputs. Raises NotEvaluated where it is not answered for."""

    def __init__(self, node: ir.Node, present: Sequence[bool], version: int) -> None:
        """present: which inputs are given. version: of the opset."""
        from bnexport.graph.onnx_reference import MendedEvaluator

        if node.domain or node.op_type not in ANSWERED or version < FIRST_OPSET:
            raise NotEvaluated(f"{node.op_type} of opset {version} is not evaluated")
        self._node, self._signature = node, Signature(node, present, version)
        if self._signature.schema.since_version > LAST_OPSET or (
            node.op_type in _OPAQUE and _OPAQUE[node.op_type](node)
        ):
            raise NotEvaluated(f"this form of {node.op_type} is not evaluated", "bad-attribute")
        import onnx.helper

        proto = self._signature.proto
        given, self._outputs = ([name for name in names if name] for names in (proto.input, proto.output))
        try:
            alone = onnx.helper.make_function(
                "bnexport", "node", given, self._outputs, [proto], self._signature.imports
            )
            self._evaluator = MendedEvaluator(alone)
        except Exception as error:  # it raises whatever an operator raises
            raise NotEvaluated(f"{node.op_type} cannot be run: {first_line(error)[:200]}") from error

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs, None for an absent one. inputs: arrays; None for an absent one. Raises NotEvaluated."""
        kind, types = self._node.op_type, ANSWERED[self._node.op_type]
        feeds = {f"i{index}": array for index, array in enumerate(inputs) if array is not None}
        if types is not None and not all(array.dtype.name in types for array in feeds.values()):
            raise NotEvaluated(f"{kind} of {inputs[0].dtype} is not evaluated", "type")
        if types is not None and (inputs[0] is None or not inputs[0].size):  # ONNX Runtime sums nothing in several ways
            raise NotEvaluated(f"{kind} of no elements is not evaluated")
        if kind == "Resize" and not _is_even(self._node, *inputs):
            raise NotEvaluated("a Resize to a size that is rounded, or to 1, is not evaluated")
        # What a Slice makes is never more, and no older schema infers it.
        size = max(map(math.prod, self._signature.shapes(inputs)), default=math.inf) if kind != "Slice" else 0
        if size > _LARGEST:
            raise NotEvaluated(f"{kind} of constants makes {size:.3g} elements, {_LARGEST:.3g} are taken", "too-large")
        try:
            with np.errstate(all="ignore"):
                results = dict(zip(self._outputs, self._evaluator.run(None, feeds, attributes={}), strict=True))
        except Exception as error:
            raise NotEvaluated(f"{kind} cannot be run: {first_line(error)[:200]}") from error
        return [results.get(f"o{index}") for index in range(len(self._node.outputs))]


def evaluate(node: ir.Node, inputs: Sequence[Any], version: int) -> list[Any]:
    """Return the outputs of `node` for these inputs, in their types. Raises NotEvaluated."""
    return NodeEvaluator(node, [array is not None for array in inputs], version)(inputs)


def rounded(node: ir.Node, inputs: Sequence[Any], version: int) -> list[Any]:
    """Return the outputs, computed in float64 and rounded to the type of the float inputs. Raises NotEvaluated."""
    if node.op_type in ("Cast", "CastLike"):
        return evaluate(node, inputs, version)
    floats = {array.dtype for array in inputs if array is not None and is_float(array)}
    if len(floats) > 1 and node.op_type != "Pow":
        raise NotEvaluated(f"{node.op_type} has operands of different types", "type")
    results = evaluate(node, [None if array is None else widened(array) for array in inputs], version)
    own = next((array.dtype for array in inputs if array is not None and is_float(array)), None)
    return [each.astype(own) if own is not None and is_float(each) else each for each in map(np.asarray, results)]


def expression(
    wanted: ir.Value,
    arrays: dict[ir.Value, np.ndarray],
    stored: Callable[[ir.Value], np.ndarray | None],
    run: Callable[[ir.Node, list[np.ndarray | None]], list[np.ndarray]],
) -> np.ndarray:
    """Return the value of an expression of stored tensors, of any depth; what it is made of is added to `arrays`.

    Raises NotEvaluated.
    """

    def known(value: ir.Value) -> np.ndarray | None:
        return arrays[value] if value in arrays else stored(value)

    pending = [wanted]
    while pending and wanted not in arrays:
        node = pending[-1].producer()
        if node is None:
            raise NotEvaluated(f"the constant {pending[-1].name!r} has no numbers")
        operands = [None if each is None else known(each) for each in node.inputs]
        missing = [
            each for each, array in zip(node.inputs, operands, strict=True) if each is not None and array is None
        ]
        pending += missing
        if not missing:
            results = run(node, operands)
            arrays.update(zip(node.outputs, map(np.asarray, results), strict=False))
            pending.pop()
    return arrays[wanted]


def is_float(array: np.ndarray) -> bool:
    return array.dtype.name in _FLOATS


def widened(array: np.ndarray) -> np.ndarray:
    """Return floats as float64, everything else as it is."""
    return array.astype(np.float64) if is_float(array) else array


def _is_even(node: ir.Node, data: np.ndarray, *sizes: np.ndarray | None) -> bool:
    """Whether a Resize has whole sizes, and makes none 1; sizes: what it has behind the data."""
    axes = get_ints(node, "axes") or range(data.ndim)
    if not sizes or not all(-data.ndim <= axis < data.ndim for axis in axes):
        return False
    scales, targets = sizes[:2][-1], sizes[2] if len(sizes) > 2 else None
    given = np.asarray([data.shape[axis] for axis in axes])
    factors = scales is not None and scales.size
    stated = scales if factors else targets
    if stated is None or stated.shape != given.shape:
        return False
    wanted = given * stated if factors else stated
    return bool(np.all(wanted == np.round(wanted)) and np.all((wanted > 1) | (given == 1)))
