"""Changes of one place of a model; most of them change what it computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from tests.support.onnx_text import make_inputs, run

Generator = np.random.Generator
Change = Callable[[onnx.ModelProto, Generator], str | None]
# Operators that look alike: one takes the other's place where the attributes allow it.
RELATIVES = (
    ("Relu", "LeakyRelu", "Elu", "Sigmoid", "Tanh", "Identity", "Neg", "Softplus", "HardSwish", "Abs", "Selu", "ThresholdedRelu"),
    ("AveragePool", "MaxPool", "LpPool"),
    ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"),
    ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "PRelu", "Pow"),
    ("ReduceMean", "ReduceMax", "ReduceSum", "ReduceMin", "ReduceL2"),
    ("Softmax", "LogSoftmax", "Hardmax"),
    ("Conv", "ConvTranspose"),
    ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"),
)  # fmt: skip
_WORDS = {
    "mode": ("constant", "reflect", "edge", "nearest", "linear", "cubic"),
    "auto_pad": ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"),
    "coordinate_transformation_mode": ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"),
    "nearest_mode": ("round_prefer_floor", "ceil", "floor", "round_prefer_ceil"),
}


# Each change takes a model, changes it in one place, and says how; None where there is no place for it.
CHANGES: dict[str, Change] = {}


def on_model(change: Change) -> Change:
    CHANGES[change.__name__] = change
    return change


def on_node(wanted: Callable[[onnx.NodeProto, onnx.ModelProto], bool] = lambda node, _: bool(node.input)) -> Any:
    """Register a change of one of the nodes that are `wanted`."""

    def register(change: Callable[..., str | None]) -> Change:
        def changed(model: onnx.ModelProto, generator: Generator) -> str | None:
            nodes = [node for graph in _graphs(model.graph) for node in graph.node if wanted(node, model)]
            return change(model, generator, nodes[generator.integers(len(nodes))]) if nodes else None

        changed.__name__ = change.__name__
        return on_model(changed)

    return register


def on_tensor(wanted: Callable[[onnx.TensorProto], bool]) -> Any:
    """Register a change of the array of one initializer; it returns the new array with words, or None."""

    def register(change: Callable[..., tuple[np.ndarray, str] | None]) -> Change:
        def changed(model: onnx.ModelProto, generator: Generator) -> str | None:
            tensors = [tensor for tensor in model.graph.initializer if wanted(tensor)]
            if not tensors:
                return None
            tensor = tensors[generator.integers(len(tensors))]
            array = onnx.numpy_helper.to_array(tensor)
            new, words = change(model, generator, tensor.name, array.copy()) or (array, "")
            if new.shape == array.shape and new.tobytes() == array.tobytes():
                return None
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(new), tensor.name))
            return words

        changed.__name__ = change.__name__
        return on_model(changed)

    return register


@on_node(lambda node, model: bool(_schema(model, node)))
def attribute(model: onnx.ModelProto, generator: Generator, node: onnx.NodeProto) -> str | None:
    """Change an attribute, or write out one that has its default."""
    declared, kinds = _schema(model, node), onnx.defs.OpSchema.AttrType
    name = str(generator.choice(sorted(declared)))
    value = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}.get(name)
    new: Any = None
    if declared[name] == kinds.INT:
        new = int(value or 0) + int(generator.choice([-1, 1, 2]))
    elif declared[name] == kinds.FLOAT:
        new = float(generator.choice([0.5, 2.0, -1.0, 1.1])) * (float(value) if value else 0.1)
    elif declared[name] == kinds.INTS:
        new = list(value or [1] * int(generator.choice([1, 2, 4])))
        if generator.integers(2):
            generator.shuffle(new)
        elif new:
            new[generator.integers(len(new))] += int(generator.choice([-1, 1]))
    elif declared[name] == kinds.STRING:
        new = str(generator.choice(_WORDS.get(name, ("none",))))
    if new is None or new == value:
        return None
    _keep(node, lambda each: each.name != name)
    node.attribute.append(onnx.helper.make_attribute(name, new))
    return f"{node.op_type}.{name} from {value} to {new}"


@on_node(lambda node, _: bool(node.attribute))
def dropped(_: onnx.ModelProto, generator: Generator, node: onnx.NodeProto) -> str | None:
    """Leave out an attribute."""
    index = int(generator.integers(len(node.attribute)))
    text = f"{node.op_type} without {node.attribute[index].name}"
    del node.attribute[index]
    return text


@on_node(lambda node, _: len(node.input) > 1 or node.op_type == "If")
def exchanged(_: onnx.ModelProto, generator: Generator, node: onnx.NodeProto) -> str | None:
    """Exchange two operands, or the branches of an If."""
    if node.op_type == "If":
        for branch in node.attribute:
            branch.name = {"then_branch": "else_branch", "else_branch": "then_branch"}[branch.name]
        return "branches"
    first, second = (int(each) for each in generator.choice(len(node.input), 2, replace=False))
    if node.input[first] == node.input[second]:
        return None
    node.input[first], node.input[second] = node.input[second], node.input[first]
    return f"operands {first} and {second} of {node.op_type}"


@on_node(lambda node, model: bool(node.input) and node.output[0] not in _results(model))
def bypassed(model: onnx.ModelProto, _: Generator, node: onnx.NodeProto) -> str | None:
    """Let the readers of a node read its input."""
    _read(model, node.output[0], node.input[0])
    return f"without {node.op_type}"


@on_node()
def doubled(model: onnx.ModelProto, _: Generator, node: onnx.NodeProto) -> str | None:
    """Apply a node twice."""
    text, twin = f"{node.op_type} twice", copy.deepcopy(node)
    twin.name = f"{node.name}_twice"
    graph, place = _home(model, node)
    node.output[0] = twin.input[0] = f"{node.output[0]}_once"
    graph.node.insert(place + 1, twin)
    return text


@on_node(lambda node, _: any(node.op_type in family for family in RELATIVES))
def replaced(model: onnx.ModelProto, generator: Generator, node: onnx.NodeProto) -> str | None:
    """Put a relative in the place of a node."""
    family = next(family for family in RELATIVES if node.op_type in family)
    other = str(generator.choice([each for each in family if each != node.op_type]))
    text = f"{other} for {node.op_type}"
    node.op_type = other
    known = _schema(model, node)
    _keep(node, lambda each: each.name in known)
    return text


@on_node()
def narrowed(model: onnx.ModelProto, generator: Generator, node: onnx.NodeProto) -> str | None:
    """Cast a value to a narrower type and back."""
    kinds = onnx.TensorProto
    kind = int(generator.choice([kinds.FLOAT16, kinds.BFLOAT16, kinds.INT32, kinds.INT8, kinds.BOOL, kinds.INT64]))
    index = int(generator.integers(len(node.input)))
    name = node.input[index]
    if not name or any(each.name == name and each.data_type != kinds.FLOAT for each in model.graph.initializer):
        return None
    graph, place = _home(model, node)
    graph.node.insert(place, onnx.helper.make_node("Cast", ["narrow"], ["widened"], name="widened", to=kinds.FLOAT))
    graph.node.insert(place, onnx.helper.make_node("Cast", [name], ["narrow"], name="narrow", to=kind))
    graph.node[place + 2].input[index] = "widened"
    return f"{node.op_type} reads {onnx.TensorProto.DataType.Name(kind)} at {index}"


@on_model
def opset(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Declare another opset, without conversion."""
    own = model.opset_import[0].version
    version = int(generator.choice([each for each in (8, 9, 11, 12, 13, 14, 15, 16, 18, 19, 21) if each != own]))
    model.opset_import[0].version = version
    return f"opset {version}"


@on_node()
def moved(model: onnx.ModelProto, generator: Generator, node: onnx.NodeProto) -> str | None:
    """Let an operand be another value."""
    graph, place = _home(model, node)
    values = ["x", *(name for each in list(graph.node)[:place] for name in each.output)]
    index = int(generator.integers(len(node.input)))
    other = str(generator.choice(values + [tensor.name for tensor in model.graph.initializer]))
    if other == node.input[index]:
        return None
    node.input[index] = other
    return f"operand {index} of {node.op_type} is {other}"


@on_node(lambda node, _: node.op_type in ("Split", "Dropout", "MaxPool", "BatchNormalization"))
def outputs(model: onnx.ModelProto, generator: Generator, node: onnx.NodeProto) -> str | None:
    """Give a node another number of outputs."""
    if node.op_type == "Split" and len(node.output) > 1 and generator.integers(2):
        dropped_output = node.output.pop()
        _read(model, dropped_output, node.output[0])
    else:
        node.output.append(f"{node.output[0]}_more")
    return f"{node.op_type} with {len(node.output)} outputs"


@on_tensor(lambda tensor: tensor.data_type == onnx.TensorProto.FLOAT and bool(tensor.dims) and np.prod(tensor.dims) > 1)
def shaped(_: onnx.ModelProto, generator: Generator, name: str, array: np.ndarray) -> tuple[np.ndarray, str]:
    """Give a constant another shape. Not axes and sizes: a matrix of them makes ONNX Runtime abort."""
    swapped = np.swapaxes(array, -1, -2) if array.ndim > 1 else array
    ways = (array[None], array[..., None], array.reshape(-1), array.T, swapped, array.squeeze(), array[:1])
    new = (*ways, np.concatenate([array, array]))[generator.integers(len(ways) + 1)]
    return new, f"{name} from {list(array.shape)} to {list(new.shape)}"


@on_tensor(lambda tensor: tensor.data_type in _FLOATS)
def nudged(_: onnx.ModelProto, generator: Generator, name: str, array: np.ndarray) -> tuple[np.ndarray, str] | None:
    """Move one element by four units in the last place of the largest of its row, or of a vector."""
    if not array.size:
        return None
    rows = array.reshape(len(array), -1) if array.ndim > 1 else array.reshape(1, -1)
    row = rows[generator.integers(len(rows))]
    largest = np.abs(row.astype(np.float64)).max()
    if not largest or not np.isfinite(largest):
        return None
    unit = 2.0 ** (np.floor(np.log2(largest)) - ml_dtypes.finfo(array.dtype).nmant)
    place = generator.integers(row.size)
    row[place] = (row[place].astype(np.float64) + 4 * unit).astype(array.dtype)
    return array, f"last digits of {name}"


@on_tensor(lambda tensor: tensor.data_type in _FLOATS)
def permuted(_: onnx.ModelProto, generator: Generator, name: str, array: np.ndarray) -> tuple[np.ndarray, str] | None:
    """Exchange two rows or columns of a constant, or two of its axes that have one size: an error that no shape shows."""
    square = [axis for axis in range(array.ndim - 1) if array.shape[axis] == array.shape[axis + 1] > 1]
    axes = square if square and generator.integers(2) else [axis for axis, size in enumerate(array.shape) if size > 1]
    if not axes:
        return None
    axis = axes[generator.integers(len(axes))]
    if axes is square:
        new = np.swapaxes(array, axis, axis + 1)
    else:
        order = np.arange(array.shape[axis])
        first, second = generator.choice(array.shape[axis], 2, replace=False)
        order[[first, second]] = order[[second, first]]
        new = np.take(array, order, axis)
    return new, f"{name} along axis {axis}"


@on_tensor(lambda tensor: bool(np.prod(tensor.dims, dtype=int)))
def scaled(model: onnx.ModelProto, generator: Generator, name: str, array: np.ndarray) -> tuple[np.ndarray, str]:
    """Multiply a constant, or one of its elements."""
    readers = (node.op_type for graph in _graphs(model.graph) for node in graph.node if name in node.input)
    place = np.unravel_index(generator.integers(array.size), array.shape) if generator.integers(2) else ...
    if array.dtype.kind in "fV":
        array[place] = array[place] * array.dtype.type(generator.choice([1.01, -1.0, 2.0, 0.5]))
    else:
        array[place] = array[place] + generator.choice([-1, 1])
    return array, f"{'an element' if place is not ... else 'all'} of {name}, read by {next(readers, 'nothing')}"


_FLOATS = tuple(getattr(onnx.TensorProto, name) for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"))


def _keep(node: onnx.NodeProto, wanted: Callable[[onnx.AttributeProto], bool]) -> None:
    """Leave out the attributes that are not wanted."""
    kept = [each for each in node.attribute if wanted(each)]
    del node.attribute[:]
    node.attribute.extend(kept)


def _results(model: onnx.ModelProto) -> set[str]:
    return {value.name for graph in _graphs(model.graph) for value in graph.output}


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the bodies of its nodes."""
    yield graph
    for node in graph.node:
        for each in node.attribute:
            if each.HasField("g"):
                yield from _graphs(each.g)


def _home(model: onnx.ModelProto, node: onnx.NodeProto) -> tuple[onnx.GraphProto, int]:
    """Return the graph of a node, and its place there."""
    return next((graph, list(graph.node).index(node)) for graph in _graphs(model.graph) if node in graph.node)


def _schema(model: onnx.ModelProto, node: onnx.NodeProto) -> dict[str, Any]:
    try:
        found = onnx.defs.get_schema(node.op_type, model.opset_import[0].version).attributes
    except onnx.defs.SchemaError:
        return {}
    return {name: declared.type for name, declared in found.items()}


def _read(model: onnx.ModelProto, name: str, other: str) -> None:
    for node in (node for graph in _graphs(model.graph) for node in graph.node):
        for index, read in enumerate(node.input):
            if read == name:
                node.input[index] = other


def differs(first: onnx.ModelProto, second: onnx.ModelProto) -> bool:
    """Whether ONNX Runtime runs both, and gives other numbers for batches of 1 and 3 at some scale of the inputs."""
    for batch in (1, 3):
        for scale in (0.01, 1.0, 30.0):
            inputs = {name: scale * array for name, array in make_inputs(first, {"N": batch}, seed=batch).items()}
            try:
                got = [run(proto, inputs) for proto in (first, second)]
            except Exception:  # one of them does not run: nobody is misled
                continue
            for one, two in zip(*got, strict=True):
                wide, bound = one.astype(np.float64), 1e-4 if one.dtype == np.float32 else 0.05
                if one.shape != two.shape or np.abs(wide - two).max(initial=0.0) > bound * np.abs(wide).max(
                    initial=0.0
                ):
                    return True
    return False


def several(good: onnx.ModelProto, generator: Generator, count: int) -> Iterator[tuple[str, str, onnx.ModelProto]]:
    """Yield copies with one change each, with its kind and words, as long as they are new."""
    seen: set[str | None] = {None}
    for _ in range(count):
        wrong, kind = copy.deepcopy(good), str(generator.choice(sorted(CHANGES)))
        text = CHANGES[kind](wrong, generator)
        if text not in seen:
            seen.add(text)
            yield kind, str(text), wrong
