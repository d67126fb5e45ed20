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


def attribute(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Change an attribute, or write out one that has its default."""
    node = _node(model, generator, lambda node: bool(_schema(model, node)))
    if node is None:
        return None
    declared = _schema(model, node)
    name = str(generator.choice(sorted(declared)))
    given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    kinds = onnx.defs.OpSchema.AttrType
    value = given.get(name)
    if declared[name] == kinds.INT:
        new: Any = int(value or 0) + int(generator.choice([-1, 1, 2]))
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
    else:
        return None
    if new == value:
        return None
    kept = [each for each in node.attribute if each.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, new)])
    return f"{node.op_type}.{name} from {value} to {new}"


def dropped(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Leave out an attribute."""
    node = _node(model, generator, lambda node: bool(node.attribute))
    if node is None:
        return None
    index = int(generator.integers(len(node.attribute)))
    text = f"{node.op_type} without {node.attribute[index].name}"
    del node.attribute[index]
    return text


def exchanged(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Exchange two operands, or the branches of an If."""
    node = _node(model, generator, lambda node: len(node.input) > 1 or node.op_type == "If")
    if node is None:
        return None
    if node.op_type == "If":
        for branch in node.attribute:
            branch.name = {"then_branch": "else_branch", "else_branch": "then_branch"}[branch.name]
        return "branches"
    first, second = (int(each) for each in generator.choice(len(node.input), 2, replace=False))
    if node.input[first] == node.input[second]:
        return None
    node.input[first], node.input[second] = node.input[second], node.input[first]
    return f"operands {first} and {second} of {node.op_type}"


def bypassed(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Let the readers of a node read its input."""
    outputs = {value.name for graph in _graphs(model.graph) for value in graph.output}
    node = _node(model, generator, lambda node: bool(node.input) and node.output[0] not in outputs)
    if node is None:
        return None
    _read(model, node.output[0], node.input[0])
    return f"without {node.op_type}"


def doubled(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Apply a node twice."""
    node = _node(model, generator, lambda node: bool(node.input))
    if node is None:
        return None
    text = f"{node.op_type} twice"
    twin = copy.deepcopy(node)
    twin.name = f"{node.name}_twice"
    first = f"{node.output[0]}_once"
    graph, place = _home(model, node)
    node.output[0] = first
    twin.input[0] = first
    graph.node.insert(place + 1, twin)
    return text


def replaced(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Put a relative in the place of a node."""
    node = _node(model, generator, lambda node: any(node.op_type in family for family in RELATIVES))
    if node is None:
        return None
    family = next(family for family in RELATIVES if node.op_type in family)
    other = str(generator.choice([each for each in family if each != node.op_type]))
    text = f"{other} for {node.op_type}"
    node.op_type = other
    known = _schema(model, node)
    kept = [each for each in node.attribute if each.name in known]
    del node.attribute[:]
    node.attribute.extend(kept)
    return text


def narrowed(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Cast a value to a narrower type and back."""
    kinds = onnx.TensorProto
    kind = int(generator.choice([kinds.FLOAT16, kinds.BFLOAT16, kinds.INT32, kinds.INT8, kinds.BOOL, kinds.INT64]))
    node = _node(model, generator, lambda node: bool(node.input))
    if node is None:
        return None
    index = int(generator.integers(len(node.input)))
    name = node.input[index]
    given = {tensor.name: tensor for tensor in model.graph.initializer}
    if not name or (name in given and given[name].data_type != kinds.FLOAT):
        return None
    graph, place = _home(model, node)
    casts = [
        onnx.helper.make_node("Cast", [name], ["narrow"], name="narrow", to=kind),
        onnx.helper.make_node("Cast", ["narrow"], ["widened"], name="widened", to=kinds.FLOAT),
    ]
    for offset, cast in enumerate(casts):
        graph.node.insert(place + offset, cast)
    node.input[index] = "widened"
    return f"{node.op_type} reads {onnx.TensorProto.DataType.Name(kind)} at {index}"


def opset(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Declare another opset, without conversion."""
    own = model.opset_import[0].version
    version = int(generator.choice([each for each in (8, 9, 11, 12, 13, 14, 15, 16, 18, 19, 21) if each != own]))
    model.opset_import[0].version = version
    return f"opset {version}"


def moved(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Let an operand be another value."""
    node = _node(model, generator, lambda node: bool(node.input))
    if node is None:
        return None
    graph, place = _home(model, node)
    values = ["x", *(name for each in list(graph.node)[:place] for name in each.output)]
    values += [tensor.name for tensor in model.graph.initializer]
    index = int(generator.integers(len(node.input)))
    other = str(generator.choice(values))
    if other == node.input[index]:
        return None
    node.input[index] = other
    return f"operand {index} of {node.op_type} is {other}"


def outputs(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Give a node another number of outputs."""
    several = ("Split", "Dropout", "MaxPool", "BatchNormalization")
    node = _node(model, generator, lambda node: node.op_type in several)
    if node is None:
        return None
    if node.op_type == "Split" and len(node.output) > 1 and generator.integers(2):
        dropped_output = node.output.pop()
        _read(model, dropped_output, node.output[0])
    else:
        node.output.append(f"{node.output[0]}_more")
    return f"{node.op_type} with {len(node.output)} outputs"


def shaped(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Give a constant another shape. Not axes and sizes: a matrix of them makes ONNX Runtime abort."""
    floats = [tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    tensors = [tensor for tensor in floats if tensor.dims and np.prod(tensor.dims) > 1]
    if not tensors:
        return None
    tensor = tensors[generator.integers(len(tensors))]
    array = onnx.numpy_helper.to_array(tensor)
    ways = (
        lambda: array[None],
        lambda: array[..., None],
        lambda: array.reshape(-1),
        lambda: array.T,
        lambda: np.swapaxes(array, -1, -2) if array.ndim > 1 else array,
        array.squeeze,
        lambda: array[:1],
        lambda: np.concatenate([array, array]),
    )
    new = np.ascontiguousarray(ways[generator.integers(len(ways))]())
    if new.shape == array.shape and np.array_equal(new, array):
        return None
    text = f"{tensor.name} from {list(array.shape)} to {list(new.shape)}"
    tensor.CopyFrom(onnx.numpy_helper.from_array(new, tensor.name))
    return text


def nudged(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Move one element by four units in the last place of the largest of its row, or of a vector."""
    tensor, array = _floats(model, generator)
    if tensor is None or not array.size:
        return None
    rows = array.reshape(len(array), -1) if array.ndim > 1 else array.reshape(1, -1)
    row = rows[generator.integers(len(rows))]
    largest = np.abs(row.astype(np.float64)).max()
    if not largest or not np.isfinite(largest):
        return None
    unit = 2.0 ** (np.floor(np.log2(largest)) - ml_dtypes.finfo(array.dtype).nmant)
    place = generator.integers(row.size)
    row[place] = (row[place].astype(np.float64) + 4 * unit).astype(array.dtype)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return f"last digits of {tensor.name}"


def permuted(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Exchange two rows or columns of a constant, or two of its axes that have one size: an error that no shape shows."""
    tensor, array = _floats(model, generator)
    if tensor is None:
        return None
    square = [axis for axis in range(array.ndim - 1) if array.shape[axis] == array.shape[axis + 1] > 1]
    if square and generator.integers(2):
        axis = square[generator.integers(len(square))]
        new = np.ascontiguousarray(np.swapaxes(array, axis, axis + 1))
    else:
        axes = [axis for axis, size in enumerate(array.shape) if size > 1]
        if not axes:
            return None
        axis = axes[generator.integers(len(axes))]
        new = array.copy()
        first, second = generator.choice(array.shape[axis], 2, replace=False)
        order = list(range(array.shape[axis]))
        order[first], order[second] = order[second], order[first]
        new = np.take(array, order, axis)
    if np.array_equal(new, array):
        return None
    tensor.CopyFrom(onnx.numpy_helper.from_array(new, tensor.name))
    return f"{tensor.name} along axis {axis}"


def _floats(model: onnx.ModelProto, generator: Generator) -> tuple[onnx.TensorProto, np.ndarray] | tuple[None, None]:
    """Choose an initializer of floats; return it with a copy of its array."""
    kinds = (*(getattr(onnx.TensorProto, name) for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE")),)
    found = [tensor for tensor in model.graph.initializer if tensor.data_type in kinds]
    if not found:
        return None, None
    tensor = found[generator.integers(len(found))]
    return tensor, onnx.numpy_helper.to_array(tensor).copy()


def scaled(model: onnx.ModelProto, generator: Generator) -> str | None:
    """Multiply a constant, or one of its elements."""
    tensors = [tensor for tensor in model.graph.initializer if np.prod(tensor.dims, dtype=int)]
    if not tensors:
        return None
    tensor = tensors[generator.integers(len(tensors))]
    array = onnx.numpy_helper.to_array(tensor).copy()
    reader = next(
        (node.op_type for graph in _graphs(model.graph) for node in graph.node if tensor.name in node.input), "nothing"
    )
    place = np.unravel_index(generator.integers(array.size), array.shape) if generator.integers(2) else ...
    if array.dtype.kind in "fV":
        factor = array.dtype.type(generator.choice([1.01, -1.0, 2.0, 0.5]))
        array[place] = array[place] * factor
    else:
        array[place] = array[place] + generator.choice([-1, 1])
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return f"{'an element' if place is not ... else 'all'} of {tensor.name}, read by {reader}"


CHANGES: dict[str, Change] = {
    each.__name__: each
    for each in (
        *(attribute, dropped, exchanged, bypassed, doubled, replaced, narrowed, opset, moved, outputs, shaped, scaled),
        *(nudged, permuted),
    )
}


def _node(
    model: onnx.ModelProto, generator: Generator, wanted: Callable[[onnx.NodeProto], bool]
) -> onnx.NodeProto | None:
    nodes = [node for graph in _graphs(model.graph) for node in graph.node if wanted(node)]
    return nodes[generator.integers(len(nodes))] if nodes else None


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
                if one.shape != two.shape:
                    return True
                size = np.abs(one.astype(np.float64)).max(initial=0.0)
                bound = 1e-4 if one.dtype == np.float32 else 0.05
                if np.abs(one.astype(np.float64) - two.astype(np.float64)).max(initial=0.0) > bound * size:
                    return True
    return False


def several(good: onnx.ModelProto, generator: Generator, count: int) -> Iterator[tuple[str, str, onnx.ModelProto]]:
    """Yield copies with one change each, as long as they are new."""
    seen: set[str] = set()
    for _ in range(count):
        found = change(good, generator)
        if found is not None and found[1] not in seen:
            seen.add(found[1])
            yield found


def change(good: onnx.ModelProto, generator: Generator) -> tuple[str, str, onnx.ModelProto] | None:
    """Return a changed copy with the kind and words; None where this kind of change finds no place."""
    wrong = copy.deepcopy(good)
    kind = str(generator.choice(sorted(CHANGES)))
    text = CHANGES[kind](wrong, generator)
    return None if text is None else (kind, text, wrong)
