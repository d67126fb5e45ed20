"""Models with one form and batch norms next to it: in front, behind, both; alone or with an operator that absorbs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from tests.folding.test_random_graphs import Builder
from tests.forms.case import Case, Data, Other, Shape

FLOAT = onnx.TensorProto.FLOAT
# A padded convolution takes no shift, a MatMul has its channels on the last axis.
PLACES: dict[str, tuple[str, ...]] = {
    "front": ("norm form", "norm form conv", "norm form padded", "norm form matmul"),
    "behind": ("form norm", "conv form norm", "matmul form norm", "padded form norm"),
    "both": ("norm form norm", "conv form norm conv", "norm form norm matmul", "conv norm form norm"),
    "sum": ("sum norm", "sum conv norm", "norm sum norm", "conv sum norm"),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """The output of a form that goes on, as an engine computes it."""

    shape: Shape
    dtype: np.dtype[Any]


class Impossible(Exception):
    """The operator next to the form does not take data of this rank."""


class _Chain(Builder):
    """Grows one model from its input to its output."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__(np.random.default_rng(seed), shape=shape)
        self.others: dict[str, Shape] = {}

    def add(self, op_type: str, inputs: list[str], outputs: int = 1, read: int = 0, **attributes: Any) -> None:
        number = len(self.nodes)
        names = [f"v{number}_{index}" for index in range(outputs)]
        node = onnx.helper.make_node(op_type, inputs, names, name=f"{op_type}_{number}")
        for name, value in attributes.items():
            # An empty list does not say that it is one of integers.
            kind = onnx.AttributeProto.INTS if isinstance(value, list) and not value else None
            node.attribute.append(onnx.helper.make_attribute(name, value, attr_type=kind))
        self.nodes.append(node)
        self.value = names[read]

    def needs(self, least: int, most: int = 9) -> None:
        if not least <= len(self.shape) <= most:
            raise Impossible

    def norm(self) -> None:
        self.needs(2)
        channels = self.shape[1]
        positive = self.generator.integers(2)
        scale = self.generator.standard_normal(channels)
        scale = np.abs(scale) + 0.25 if positive else np.sign(scale) * (np.abs(scale) + 0.25)
        var = self.constant((self.generator.random(channels) + 0.5).astype(np.float32))
        parameters = (self.constant(scale.astype(np.float32)), self.parameter(channels), self.parameter(channels))
        self.add("BatchNormalization", [self.value, *parameters, var])

    def gain(self) -> None:
        """A positive scale of each channel, which activations pass."""
        self.needs(2)
        scale = self.generator.random((self.shape[1], *[1] * (len(self.shape) - 2))) + 0.5
        self.add("Mul", [self.value, self.constant(scale.astype(np.float32))])

    def conv(self, size: int = 1) -> None:
        self.needs(3, 5)
        channels, dims = self.shape[1], len(self.shape) - 2
        parameters = (self.parameter(channels, channels, *[size] * dims), self.parameter(channels))
        self.add("Conv", [self.value, *parameters], pads=[size // 2] * (2 * dims))

    def padded(self) -> None:
        self.conv(3)

    def matmul(self) -> None:
        self.needs(2)
        self.add("MatMul", [self.value, self.parameter(self.shape[-1], self.shape[-1])])

    def sum(self, op_type: str, case: Case, result: Result) -> None:
        """The form, a convolution with its shape if it has one, and the form with other numbers, added up."""
        start, shape = self.value, self.shape
        self.form(op_type, case, result)
        terms = [self.value]
        if result.shape == shape and 3 <= len(shape) <= 5:
            self.value = start
            self.conv()
            terms.append(self.value)
        self.value, self.shape = start, shape
        other = [
            each * np.float32(0.5) if getattr(each, "dtype", None) == np.float32 else each for each in case.operands
        ]
        self.form(op_type, dataclasses.replace(case, operands=other), result)
        for term in terms:
            self.add("Add", [self.value, term])

    def form(self, op_type: str, case: Case, result: Result) -> None:
        names = []
        for operand in case.operands:
            if isinstance(operand, Data):
                names.append(self.value)
            elif isinstance(operand, Other):
                name = f"o{len(self.others)}"
                self.others[name] = operand.shape
                names.append(name)
            else:
                names.append("" if operand is None else self.constant(operand))
        self.add(op_type, names, case.outputs, case.read, **case.attributes)
        self.shape = result.shape
        if result.dtype != np.float32:
            self.add("Cast", [self.value], to=FLOAT)


def build(op_type: str, case: Case, place: str, shape: Shape, result: Result, opset: int, seed: int) -> onnx.ModelProto:
    """Make the model. Its sizes are declared as numbers, with a free batch, or with the channels alone.

    Raises Impossible.
    """
    chain = _Chain(shape, seed)
    for word in place.split():
        if word in ("form", "sum"):
            getattr(chain, word)(op_type, case, result)
        else:
            getattr(chain, word)()
    # The mean of a batch that happens to be empty is a limit of the folder, which docs/folding.md names.
    is_limit = op_type == "ReduceMean" and 0 in shape
    declared = _declared(shape, 0 if is_limit else seed % 3)
    return _finish(chain, declared, opset)


def _declared(shape: Shape, freedom: int) -> list[int | str]:
    free = {0: [], 1: [0], 2: [0, *range(2, len(shape))]}[freedom]
    return [f"d{axis}" if axis in free else size for axis, size in enumerate(shape)]


def bare(op_type: str, case: Case, shape: Shape, opset: int) -> tuple[onnx.ModelProto, Mapping[str, np.ndarray]]:
    """Make the model of the form alone, and inputs for it."""
    chain = _Chain(shape, 0)
    chain.form(op_type, case, Result(shape, np.dtype(np.float32)))
    proto = _finish(chain, shape, opset)
    return proto, feeds(proto, shape, 0)


def _finish(chain: _Chain, declared: Sequence[int | str], opset: int) -> onnx.ModelProto:
    inputs = [
        onnx.helper.make_tensor_value_info(name, FLOAT, size) for name, size in {"x": declared, **chain.others}.items()
    ]
    return finish(chain.nodes, inputs, [chain.value], chain.initializers, opset)


def finish(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[str],
    initializers: list[onnx.TensorProto],
    opset: int,
) -> onnx.ModelProto:
    """Make a model whose outputs have inferred types."""
    imports = [onnx.helper.make_opsetid("", opset)]
    version = max(8, onnx.helper.find_min_ir_version_for(imports))
    values = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = onnx.helper.make_graph(nodes, "form", inputs, values, initializers)
    proto = onnx.helper.make_model(graph, opset_imports=imports, ir_version=version)
    inferred = {each.name: each for each in onnx.shape_inference.infer_shapes(proto).graph.output}
    for value in proto.graph.output:
        kind = inferred[value.name].type.tensor_type.elem_type
        value.type.tensor_type.elem_type = kind or FLOAT
    return proto


def feeds(proto: onnx.ModelProto, shape: Shape, seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Make random inputs. shape: of `x`."""
    generator = np.random.default_rng(seed)
    made = {}
    for value in proto.graph.input:
        sizes = shape if value.name == "x" else [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        made[value.name] = np.asarray(scale * generator.standard_normal(sizes), np.float32)
    return made
