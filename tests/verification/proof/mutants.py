"""Wrong folds: a folded model with one number, attribute, shape, axis, operand, output, version or reader changed.

A few mean the same all the same: `differs` asks ONNX Runtime.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from tests.support.onnx_text import make_inputs, run

Mutant = tuple[str, onnx.ModelProto]
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def mutants(good: onnx.ModelProto, seed: int = 0) -> Iterator[Mutant]:
    """Yield every change, with what it is; most of them change what the model computes."""
    generator = np.random.default_rng(seed)
    for index, tensor in enumerate(good.graph.initializer):
        if tensor.data_type in _FLOATS:
            for kind, change in _CHANGES.items():
                array = change(_array(tensor), generator)
                if array is not None:
                    yield f"{kind} of {tensor.name}", _with_array(good, index, array)
        else:
            array = onnx.numpy_helper.to_array(tensor).copy()
            array.reshape(-1)[generator.integers(array.size)] ^= 1
            yield f"a bit of {tensor.name}", _with_array(good, index, array)
        for shape in _other_shapes(tuple(tensor.dims)):
            array = _array(tensor).reshape(shape)
            yield f"{tensor.name} as {shape}", _with_array(good, index, array)
    for place in range(len(good.graph.node)):
        yield from _attributes(good, place)
        yield from _absent_attributes(good, place)
        yield from _operands(good, place)
        yield from _outputs(good, place)
        yield from _readers(good, place)
    for version in (12, 18):
        wrong = copy.deepcopy(good)
        wrong.opset_import[0].version = version
        yield f"opset {version}", wrong


def _other_shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Of as many elements: turned round, with an axis more, with one less."""
    for other in (shape[::-1], (1, *shape), (*shape, 1), shape[1:] if shape[:1] == (1,) else shape):
        if other != shape:
            yield other


def _absent_attributes(good: onnx.ModelProto, place: int) -> Iterator[Mutant]:
    """Give a node what its schema knows and it does not have: another value than the default."""
    node = good.graph.node[place]
    if node.domain:
        return
    schema = onnx.defs.get_schema(node.op_type, good.opset_import[0].version)
    given = {attribute.name for attribute in node.attribute}
    for name, declared in schema.attributes.items():
        if name in given or node.op_type == "Constant":
            continue
        default = onnx.helper.get_attribute_value(declared.default_value) if declared.default_value.name else None
        for value in _others(declared.type.name, name, default):
            wrong = copy.deepcopy(good)
            wrong.graph.node[place].attribute.append(onnx.helper.make_attribute(name, value))
            yield f"{name}={value} of {node.name}", wrong


def _others(kind: str, name: str, default: object) -> Iterator[object]:
    if kind == "INT":
        yield int(default or 0) + 1  # type: ignore[call-overload]
    elif kind == "FLOAT":
        yield float(default or 0.0) + 0.25  # type: ignore[arg-type]
    elif kind == "INTS":
        yield from ([2, 2], [1, 0, 0, 0]) if name in ("strides", "dilations", "pads") else ([1],)
    elif kind == "STRING":
        yield from {"auto_pad": ["SAME_UPPER", "VALID"], "mode": ["DCR", "CRD", "linear", "edge"]}.get(name, [])


def _operands(good: onnx.ModelProto, place: int) -> Iterator[Mutant]:
    """Two operands exchanged, one taken twice, an optional one left out."""
    node = good.graph.node[place]
    for first in range(len(node.input)):
        for second in range(first + 1, len(node.input)):
            if node.input[first] != node.input[second]:
                wrong = copy.deepcopy(good)
                names = list(node.input)
                names[first], names[second] = names[second], names[first]
                wrong.graph.node[place].input[:] = names
                yield f"operands {first} and {second} of {node.name}", wrong
                wrong = copy.deepcopy(good)
                wrong.graph.node[place].input[second] = node.input[first]
                yield f"operand {first} twice in {node.name}", wrong
    if len(node.input) > 1:
        wrong = copy.deepcopy(good)
        del wrong.graph.node[place].input[-1]
        yield f"{node.name} without its last operand", wrong


def _outputs(good: onnx.ModelProto, place: int) -> Iterator[Mutant]:
    """An output more, which nothing reads."""
    wrong = copy.deepcopy(good)
    wrong.graph.node[place].output.append("more")
    yield f"an output more of {good.graph.node[place].name}", wrong


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


def _array(tensor: onnx.TensorProto) -> np.ndarray:
    array = onnx.numpy_helper.to_array(tensor)
    return array.view(ml_dtypes.bfloat16) if tensor.data_type == onnx.TensorProto.BFLOAT16 else array


def _with_array(good: onnx.ModelProto, index: int, array: np.ndarray) -> onnx.ModelProto:
    wrong = copy.deepcopy(good)
    tensor = wrong.graph.initializer[index]
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return wrong


def _element(array: np.ndarray, generator: np.random.Generator) -> np.ndarray | None:
    """Off by four units in the last place of the channel's largest: the row of a matrix or kernel, a vector as a whole."""
    wrong = array.copy()
    rows = wrong.reshape(len(wrong), -1) if wrong.ndim > 1 else wrong.reshape(1, -1)
    row = rows[generator.integers(len(rows))]
    largest = np.abs(row.astype(np.float64)).max()
    if not largest:
        return None
    digits = ml_dtypes.finfo(array.dtype).nmant
    unit = 2.0 ** (np.floor(np.log2(largest)) - digits)
    place = generator.integers(row.size)
    row[place] = (row[place].astype(np.float64) + 4 * unit).astype(array.dtype)
    return wrong


def _swapped(array: np.ndarray, generator: np.random.Generator, axis: int = 0) -> np.ndarray | None:
    if array.ndim <= axis or array.shape[axis] < 2:
        return None
    first, second = generator.choice(array.shape[axis], 2, replace=False)
    order = list(range(array.shape[axis]))
    order[first], order[second] = order[second], order[first]
    wrong = np.take(array, order, axis)
    return None if np.array_equal(wrong, array) else wrong


def _turned(array: np.ndarray, generator: np.random.Generator) -> np.ndarray | None:
    """Two axes of one size exchanged: an error of the axis that no shape shows."""
    for axis in range(array.ndim - 1):
        if array.shape[axis] == array.shape[axis + 1] > 1:
            wrong = np.ascontiguousarray(np.swapaxes(array, axis, axis + 1))
            return None if np.array_equal(wrong, array) else wrong
    return None


_CHANGES: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray | None]] = {
    "element": _element,
    "rows": _swapped,
    "columns": lambda array, generator: _swapped(array, generator, 1),
    "axes": _turned,
}


def _attributes(good: onnx.ModelProto, place: int) -> Iterator[Mutant]:
    node = good.graph.node[place]
    for index, attribute in enumerate(node.attribute):
        values = None
        if attribute.type == onnx.AttributeProto.INT:
            values = (attribute.i + 1) % 2 if attribute.name in ("axis", "transA", "transB") else attribute.i + 1
        elif attribute.type == onnx.AttributeProto.FLOAT:
            values = attribute.f * 1.001
        elif attribute.type == onnx.AttributeProto.INTS:
            values = list(attribute.ints)
            if attribute.name == "perm":
                values[0], values[1] = values[1], values[0]
            else:
                values[0] += 1
        elif attribute.type == onnx.AttributeProto.STRING and attribute.s in (b"constant", b"edge", b"reflect"):
            values = "edge" if attribute.s == b"constant" else "constant"
        if values is None or values == onnx.helper.get_attribute_value(attribute):
            continue
        wrong = copy.deepcopy(good)
        wrong.graph.node[place].attribute[index].CopyFrom(onnx.helper.make_attribute(attribute.name, values))
        yield f"{attribute.name} of {node.name}", wrong


def _readers(good: onnx.ModelProto, place: int) -> Iterator[Mutant]:
    """Whatever reads a node of one input reads what is before it; operands that do not commute change places."""
    node = good.graph.node[place]
    given = {tensor.name for tensor in good.graph.initializer}
    data = [name for name in node.input if name and name not in given]
    if (
        len(data) == 1
        and node.output[0] not in {value.name for value in good.graph.output}
        and node.op_type != "Identity"
    ):
        wrong = copy.deepcopy(good)
        for other in wrong.graph.node:
            for index, name in enumerate(other.input):
                if name == node.output[0]:
                    other.input[index] = data[0]
        yield f"without {node.name}", wrong
