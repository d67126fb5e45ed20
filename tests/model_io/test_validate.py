"""Each thing that `validate` refuses, by itself and at its exact bound, in a model that it accepts otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.helper as make
import onnx.numpy_helper
import onnx.parser
import pytest

from bnexport.errors import MalformedModelError, ModelError, UnsafeModelError, UnsupportedModelError
from bnexport.model_io import DEFAULT_LIMITS
from bnexport.model_io.validate import MendableError, all_nodes, printable, tensor_bytes, tensors, validate

T = onnx.TensorProto
INVALID = b"\xff"


def tensor(name: str = "w", dims: tuple[int, ...] = (2, 3), dtype: int = T.FLOAT, **fields: object) -> onnx.TensorProto:
    made = T(name=name, dims=dims, data_type=dtype)
    for field, value in fields.items():
        getattr(made, field).extend(value) if isinstance(value, list) else setattr(made, field, value)
    return made


EXAMPLE = """<ir_version: 8, opset_import: ["": 17, "local": 1]>
    main (float[N] x, bool c) => (float z) <float[2,3] w = {0, 0, 0, 0, 0, 0}> {
        [constant] k = Constant <value = float[2] {1.0, 2.0}> ()
        [if] y = If (c) <
            then_branch = then () => (float t) <float[1] inner = {1}> { [add] t = Add (x, inner) },
            else_branch = else () => (float e) { [same] e = Identity (x) }>
        [call] z = local.F (y) }
    <opset_import: ["": 17], domain: "local"> F (a) => (b) { k = Constant <value = float {0.0}> () b = Add (a, k) }"""


def example() -> onnx.ModelProto:
    """An If with a body on either side, a function and its call, and a tensor in every place that holds one."""
    return onnx.parser.parse_model(EXAMPLE)


def changed(change: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    proto = example()
    change(proto)
    return proto


def weight(**fields: object) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        proto.graph.initializer[0].CopyFrom(tensor(**fields))  # type: ignore[arg-type]

    return change


def body_of(proto: onnx.ModelProto) -> onnx.GraphProto:
    return next(it.g for it in proto.graph.node[1].attribute if it.name == "then_branch")


def attribute(proto: onnx.ModelProto, **fields: object) -> onnx.AttributeProto:
    made = proto.graph.node[0].attribute.add(name="more")
    for field, value in fields.items():
        target = getattr(made, field)
        if isinstance(value, list):
            target.extend(value)
        elif hasattr(target, "CopyFrom"):
            target.CopyFrom(value)
        else:
            setattr(made, field, value)
    return made


def recursive(*calls: tuple[str, str]) -> Callable[[onnx.ModelProto], None]:
    """Functions by name, each of which calls another."""

    def change(proto: onnx.ModelProto) -> None:
        for name, callee in calls:
            node = make.make_node(callee, ["a"], ["b"], domain="local")
            proto.functions.append(make.make_function("local", name, ["a"], ["b"], [node], []))

    return change


def default(value: onnx.TensorProto) -> Callable[[onnx.ModelProto], None]:
    """An attribute of the function with a tensor as its default."""

    def change(proto: onnx.ModelProto) -> None:
        proto.functions[0].attribute_proto.append(make.make_attribute("size", value))

    return change


EXTERNAL = {"data_location": T.EXTERNAL, "external_data": [onnx.StringStringEntryProto(key="location", value="w")]}

REFUSED: dict[str, tuple[Callable[[onnx.ModelProto], object], type[ModelError], str]] = {
    "no graph": (lambda p: p.ClearField("graph"), MalformedModelError, "no graph or IR version"),
    "no IR version": (lambda p: setattr(p, "ir_version", 0), MalformedModelError, "no graph or IR version"),
    "no opset": (lambda p: p.ClearField("opset_import"), MalformedModelError, "no opset is declared"),
    "training_info": (lambda p: p.training_info.add(), MendableError, "training_info, which cannot be kept"),
    "function twice": (lambda p: p.functions.append(p.functions[0]), MalformedModelError,
        "function local:F is defined twice"),
    "function that calls itself": (recursive(("G", "G")), UnsafeModelError, "function local:G calls itself"),
    "functions that call each other": (recursive(("G", "H"), ("H", "K"), ("K", "G")), UnsafeModelError,
        "function local:[GHK] calls itself"),
    "functions that call each other, called by another": (recursive(("G", "H"), ("H", "K"), ("K", "H")),
        UnsafeModelError, "function local:[HK] calls itself"),
    "no type": (weight(dtype=T.UNDEFINED), MalformedModelError, "tensor 'w' has no data type$"),
    "unknown type": (weight(dtype=99), MalformedModelError, "tensor 'w' has the unknown data type 99$"),
    "negative dimension": (weight(dims=(2, -1)), MalformedModelError, r"a negative dimension: \(2, -1\)"),
    "33 dimensions": (weight(dims=(1,) * 33, raw_data=bytes(4)), UnsupportedModelError,
        "33 dimensions, expected at most 32"),
    "a tebibyte": (weight(dims=(2**39,)), UnsafeModelError, "declares 2199023255552 bytes.*tensor_bytes"),
    "segment": (lambda p: p.graph.initializer[0].segment.SetInParent(), UnsupportedModelError, "stored in segments"),
    "external strings": (weight(dtype=T.STRING, **EXTERNAL), UnsafeModelError, "strings cannot be external data"),
    "data twice": (weight(raw_data=bytes(24), **EXTERNAL), MalformedModelError, "twice, inside and outside"),
    "raw data too short": (weight(raw_data=bytes(23)), MalformedModelError, r"carries 23 .*, expected 24$"),
    "raw data too long": (weight(raw_data=bytes(25)), MalformedModelError, r"carries 25 .*, expected 24$"),
    "nested sparse": (lambda p: body_of(p).sparse_initializer.add(), UnsupportedModelError,
        "graph 'then' has sparse initializers"),
    "sparse attribute": (lambda p: attribute(p, sparse_tensor=onnx.SparseTensorProto(dims=[1])), UnsupportedModelError,
        "sparse tensor"),
    "sparse attributes": (lambda p: attribute(p, sparse_tensors=[onnx.SparseTensorProto()]), UnsupportedModelError,
        "sparse tensor"),
    "attribute without its tensor": (lambda p: attribute(p, type=onnx.AttributeProto.TENSOR), MalformedModelError,
        "'more' is said to be a tensor"),
    "attribute twice": (lambda p: p.graph.node[0].attribute.append(p.graph.node[0].attribute[0]), MalformedModelError,
        "graph 'main': Constant has the attribute 'value' twice"),
    "bad tensor in an attribute": (lambda p: attribute(p, t=tensor(raw_data=b"")), MalformedModelError,
        "carries 0 .*, expected 24"),
    "bad tensor in a list": (lambda p: attribute(p, tensors=[tensor(raw_data=b"")]), MalformedModelError,
        "carries 0 .*, expected 24"),
    "bad tensor in a body": (lambda p: body_of(p).initializer[0].dims.append(2), MalformedModelError,
        "'inner'.* carries 1 .*, expected 2"),
    "bad tensor in a function": (lambda p: p.functions[0].node[0].attribute[0].t.dims.append(2), MalformedModelError,
        "carries 1 .*, expected 2"),
    "bad default": (default(tensor(raw_data=b"")), MalformedModelError, "carries 0 .*, expected 24"),
    "external default": (default(tensor(**EXTERNAL)), UnsafeModelError, "the default of 'size' is external data"),
    "no outputs": (lambda p: p.graph.node.add(op_type="Relu", name="r"), MalformedModelError,
        "Relu 'r' has no outputs"),
    "no outputs, long domain": (lambda p: p.graph.node.add(op_type="Relu", domain="ai.onnx"), MalformedModelError,
        "has no outputs"),
    "undefined input": (lambda p: p.graph.node[2].input.append("nowhere"), MendableError,
        "F 'call' reads 'nowhere', which nothing"),
    "input defined later": (lambda p: p.graph.node[0].input.append("z"), MendableError,
        "Constant 'constant' reads 'z'"),
    "name of a closed body": (lambda p: p.graph.node[2].input.append("t"), MendableError, "F 'call' reads 't'"),
    "name of the caller in a function": (lambda p: p.functions[0].node[1].input.append("x"), MendableError,
        "Add '' reads 'x'"),
    "name of another function": (lambda p: p.functions.append(make.make_function("local", "G", ["c"], ["d"],
        [make.make_node("Add", ["c", "k"], ["d"])], [])), MendableError, "Add '' reads 'k'"),
    "undefined output": (lambda p: p.graph.output.add(name="gone"), MalformedModelError,
        "graph 'main': output 'gone' is produced by no node"),
    "output of a body from outside": (lambda p: body_of(p).output.add(name="x"), MalformedModelError,
        "graph 'then': output 'x' is a value of an outer graph"),
    "undefined output of a function": (lambda p: p.functions[0].output.append("gone"), MalformedModelError,
        "local:F: output 'gone' is produced by no node"),
    "output of a node twice": (lambda p: p.graph.node[2].output.append("y"), MalformedModelError,
        "the name 'y' is defined twice"),
    "output of a node that is an input": (lambda p: p.graph.node[2].output.append("x"), MalformedModelError,
        "the name 'x' is defined twice"),
    "name that was captured": (lambda p: body_of(p).node.add(op_type="Relu", input=["t"], output=["x"]),
        MalformedModelError, "graph 'then': the name 'x' is defined twice"),
    "input twice": (lambda p: p.graph.input.append(p.graph.input[0]), MalformedModelError, "input 'x' appears twice"),
    "input without a name": (lambda p: p.graph.input.add(), MalformedModelError, "graph 'main': input without a name"),
    "initializer twice": (lambda p: p.graph.initializer.append(p.graph.initializer[0]), MendableError,
        "initializer 'w' appears twice"),
    "output twice": (lambda p: p.graph.output.append(p.graph.output[0]), MalformedModelError, "output 'z' appears twice"),
    "input of a function twice": (lambda p: p.functions[0].input.append("a"), MalformedModelError,
        "function local:F: input 'a' appears twice"),
}  # fmt: skip


def test_the_example_is_accepted() -> None:
    assert validate(example(), DEFAULT_LIMITS) == []


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    change, error, message = REFUSED[case]
    with pytest.raises(ModelError, match=message) as caught:
        validate(changed(change), DEFAULT_LIMITS)
    assert type(caught.value) is error


IN_FIELDS: dict[str, Callable[[onnx.ModelProto], object]] = {
    "floats": weight(float_data=[0.0] * 6),
    "complex numbers": weight(dtype=T.COMPLEX64, float_data=[0.0] * 12),
    "doubles": weight(dtype=T.DOUBLE, double_data=[0.0] * 6),
    "complex doubles": weight(dtype=T.COMPLEX128, double_data=[0.0] * 12),
    "int64": weight(dtype=T.INT64, int64_data=[0] * 6),
    "uint32": weight(dtype=T.UINT32, uint64_data=[0] * 6),
    "uint64": weight(dtype=T.UINT64, uint64_data=[0] * 6),
    "strings": weight(dtype=T.STRING, string_data=[b""] * 6),
    "bytes in int32_data": weight(dtype=T.UINT8, int32_data=[0] * 6),
    "halves in int32_data": weight(dtype=T.FLOAT16, int32_data=[0] * 6),
    "half bytes, rounded up": weight(dims=(5,), dtype=T.INT4, int32_data=[0] * 3),
}

ACCEPTED: dict[str, Callable[[onnx.ModelProto], object]] = {
    "32 dimensions": weight(dims=(1,) * 32, raw_data=bytes(4)),
    "a dimension of 0": weight(dims=(0, 3), raw_data=b""),
    "a scalar": weight(dims=(), raw_data=bytes(4)),
    **IN_FIELDS,
    "external": weight(**EXTERNAL),
    "two overloads": lambda p: p.functions.append(
        make.make_function("local", "F", ["a"], ["b"], [make.make_node("Relu", ["a"], ["b"])], [], overload="2")),
    "functions that share one": recursive(("G", "F"), ("H", "F"), ("K", "G")),
    # 2 ** 50 ways from the first to the last.
    "functions that share many": lambda p: p.functions.extend(make.make_function("local", f"{name}{level}", ["a"], [*"bc"],
        [make.make_node(f"{other}{level + 1}", ["a"], [to], domain="local") for other, to in ("Gb", "Hc")], [])
        for level in range(50) for name in "GH"),
    "no outputs in another domain": lambda p: p.graph.node.add(op_type="Print", input=["z"], domain="debug"),
    "absent input and output": lambda p: p.graph.node.add(op_type="A", input=["", "z"], output=["", "o"], domain="d"),
    "an initializer that is an input": lambda p: p.graph.input.add(name="w"),
    "a name of the outside, defined inside": lambda p: body_of(p).node.add(op_type="Relu", input=["t"], output=["y"]),
    "a tensor that the caller gives": lambda p: attribute(p, type=onnx.AttributeProto.TENSOR, ref_attr_name="size"),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case: str) -> None:
    external = validate(changed(ACCEPTED[case]), DEFAULT_LIMITS)
    assert [it.name for it in external] == (["w"] if case == "external" else [])


@pytest.mark.parametrize("case", IN_FIELDS)
@pytest.mark.parametrize("more", [1, -1])
def test_one_value_too_many_or_too_few(case: str, more: int) -> None:
    proto = changed(ACCEPTED[case])
    (values,) = (value for field, value in proto.graph.initializer[0].ListFields() if field.name.endswith("_data"))
    values.append(values[0]) if more == 1 else values.pop()
    with pytest.raises(MalformedModelError, match="expected"):
        validate(proto, DEFAULT_LIMITS)


# What the example holds, counted by hand.
NODES = 3 + 1 + 1 + 1 + 1 + 1 + 2 + 1  # nodes and one for each graph or function: main, then, else, F
TENSORS = 4  # w, inner, and a constant in main and in F
VALUES = (3 + (0 + 1 + 1) + (1 + 1 + 2) + (1 + 1)) + (1 + (2 + 1)) + (1 + (1 + 1)) + ((1 + 1) + (0 + 1 + 1) + (2 + 1))


@pytest.mark.parametrize(("limit", "needed"), [("nodes", NODES), ("tensors", TENSORS), ("values", VALUES)])
def test_counts_at_their_limit(limit: str, needed: int) -> None:
    validate(example(), dataclasses.replace(DEFAULT_LIMITS, **{limit: needed}))
    message = f"the model has more than {needed - 1} {limit}; .*{limit}="
    with pytest.raises(UnsafeModelError, match=message):
        validate(example(), dataclasses.replace(DEFAULT_LIMITS, **{limit: needed - 1}))


LISTS = {"ints": (7, [1]), "floats": (6, [1.0]), "strings": (8, [b""]), "type_protos": (14, [onnx.TypeProto()])}
VALUES_OF = {
    **{
        name: (lambda p, name=name: attribute(p, type=LISTS[name][0], **{name: LISTS[name][1] * 10}), 11)
        for name in LISTS
    },
    "one number": (lambda p: attribute(p, type=onnx.AttributeProto.INT, i=1), 1),
    "value_info": (lambda p: p.graph.value_info.add(name="y"), 1),
    "an attribute of a function": (lambda p: p.functions[0].attribute.append("size"), 1),
    "an input of a function": (lambda p: p.functions[0].input.append("more"), 1),
}


@pytest.mark.parametrize("case", VALUES_OF)
def test_what_counts_as_a_value(case: str) -> None:
    change, more = VALUES_OF[case]
    proto = changed(change)
    validate(proto, dataclasses.replace(DEFAULT_LIMITS, values=VALUES + more))
    with pytest.raises(UnsafeModelError, match="values"):
        validate(proto, dataclasses.replace(DEFAULT_LIMITS, values=VALUES + more - 1))


def test_depth_at_its_limit() -> None:
    validate(example(), dataclasses.replace(DEFAULT_LIMITS, graph_depth=2))
    with pytest.raises(UnsafeModelError, match=r"graph 'then': graphs are nested deeper than 1; .*graph_depth="):
        validate(example(), dataclasses.replace(DEFAULT_LIMITS, graph_depth=1))
    node = make.make_node("If", ["a"], ["o"], then_branch=body_of(example()))
    proto = changed(lambda p: p.functions[0].node.append(node))
    proto.functions[0].node[-1].attribute[0].g.node[0].input[0] = "a"
    del proto.graph.node[1]
    proto.graph.node[1].input[0] = "x"
    validate(proto, dataclasses.replace(DEFAULT_LIMITS, graph_depth=2))
    with pytest.raises(UnsafeModelError, match="nested deeper"):
        validate(proto, dataclasses.replace(DEFAULT_LIMITS, graph_depth=1))


def put(proto: Any, path: str, text: str) -> None:
    """Set the field at a path of names and indices; + adds an entry, which is the text itself where it is one."""
    *parents, last = path.split(".")
    for part in parents:
        proto = proto.add() if part == "+" else proto[int(part)] if part.isdigit() else getattr(proto, part)
    proto.append(text) if last == "+" else setattr(proto, last, text)


# Where names stand.
NAMES = {
    "graph.node": "2.op_type 2.domain 0.name 2.output.+ 0.attribute.0.name 0.attribute.+.ref_attr_name",
    "graph": "input.+.name initializer.0.name",
    "opset_import": "1.domain",
    "functions.0": "name domain input.+ attribute.+ attribute_proto.+.name",
}


def places(table: dict[str, str]) -> list[str]:
    return [f"{start}.{path}" for start, paths in table.items() for path in paths.split()]


@pytest.mark.parametrize("place", places(NAMES))
def test_names_at_their_limit(place: str) -> None:
    limits = dataclasses.replace(DEFAULT_LIMITS, name_length=20)
    validate(changed(lambda p: put(p, place, "n" * 20)), limits)
    with pytest.raises(UnsafeModelError, match=r"a name has 21 characters, 'n+'.*name_length="):
        validate(changed(lambda p: put(p, place, "n" * 21)), limits)


def broken(proto: onnx.ModelProto, marker: str) -> onnx.ModelProto:
    """The model with a text that is no UTF-8 in the place of the marker."""
    data = proto.SerializeToString()
    assert data.count(marker.encode()) == 1
    return onnx.ModelProto.FromString(data.replace(marker.encode(), INVALID * len(marker)))


MARK = "marker"
# Where other texts stand.
TEXTS = {
    "graph": "name doc_string metadata_props.+.value quantization_annotation.+.tensor_name"
    " quantization_annotation.+.quant_parameter_tensor_names.+.value",
    "graph.node": "0.doc_string 2.overload 0.metadata_props.+.value 0.attribute.+.doc_string 0.attribute.0.t.name",
    "graph.initializer.0": "doc_string metadata_props.+.value",
    "functions.0": "doc_string overload metadata_props.+.value",
    "metadata_props": "+.value",
}
MODEL = ["producer_name", "producer_version", "domain", "doc_string"]


@pytest.mark.parametrize("place", [*places(NAMES), *places(TEXTS), *MODEL])
def test_texts_that_are_no_utf_8(place: str) -> None:
    no_utf_8(changed(lambda p: put(p, place, MARK)))


def test_a_location_that_is_no_utf_8() -> None:
    pair = onnx.StringStringEntryProto(key="key", value=MARK)
    outside = tensor("v", data_location=T.EXTERNAL, external_data=[pair])
    no_utf_8(changed(lambda p: p.graph.initializer.append(outside)))


def no_utf_8(proto: onnx.ModelProto) -> None:
    validate(proto, DEFAULT_LIMITS)
    with pytest.raises(MalformedModelError, match="is not valid UTF-8") as caught:
        validate(broken(proto, MARK), DEFAULT_LIMITS)
    assert len(str(caught.value)) <= 200


def test_bytes_of_a_tensor() -> None:
    def nbytes(*dims: int, dtype: int = T.FLOAT, bound: int = 2**40) -> int:
        return tensor_bytes(tensor(dims=dims, dtype=dtype), dataclasses.replace(DEFAULT_LIMITS, tensor_bytes=bound))

    assert (nbytes(2, 3), nbytes(), nbytes(0, 3)) == (24, 4, 0)
    assert nbytes(5, dtype=T.STRING) == 5
    assert [nbytes(count, dtype=T.INT4) for count in (1, 2, 3)] == [1, 1, 2]
    assert nbytes(3, dtype=T.BOOL) == 3
    assert nbytes(2, 3, bound=24) == 24
    with pytest.raises(UnsafeModelError, match="'w' declares 24 bytes, the limit is 23"):
        nbytes(2, 3, bound=23)


def test_every_tensor_is_found() -> None:
    found = [onnx.numpy_helper.to_array(it).size for it in tensors(example())]
    assert found == [6, 2, 1, 1]
    proto = changed(lambda p: attribute(p, tensors=[tensor("l", (3,)), tensor("l", (4,))]))
    assert [int(np.prod(it.dims)) for it in tensors(proto)] == [6, 2, 3, 4, 1, 1]
    loop = changed(lambda p: attribute(p, graphs=[body_of(p)]))
    assert len(list(tensors(loop))) == 5


def test_every_node_is_found() -> None:
    assert [node.op_type for node in all_nodes(example().graph.node)] == ["Constant", "If", "Add", "Identity", "F"]
    several = changed(lambda p: attribute(p, graphs=[body_of(p), body_of(p)]))
    assert [node.op_type for node in all_nodes(several.graph.node)][:3] == ["Constant", "Add", "Add"]


def test_messages_are_one_printable_line() -> None:
    assert printable("a\nb\x1b[31m\u202ec") == "a?b?[31m?c"
    assert printable("n" * 700) == "n" * 600
    proto = changed(lambda p: p.graph.node[2].input.append("no\nwhere\x1b"))
    with pytest.raises(MalformedModelError, match=r"reads 'no\\nwhere\\x1b'"):
        validate(proto, DEFAULT_LIMITS)
