"""Random graphs out of all pieces: before and after must agree, and nothing may be left without a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.onnx_text import assert_near, batch_norms, run


@dataclasses.dataclass
class Builder:
    """Grows one graph; `value` is its last tensor, with `shape`. prefix: of the names inside a body."""

    generator: np.random.Generator
    prefix: str = ""
    value: str = "x"
    shape: tuple[int, ...] = (2, 4, 6, 6)
    nodes: list[onnx.NodeProto] = dataclasses.field(default_factory=list)
    initializers: list[onnx.TensorProto] = dataclasses.field(default_factory=list)

    def parameter(self, *shape: int, positive: bool = False) -> str:
        array = self.generator.standard_normal(shape).astype(np.float32)
        name = f"c{len(self.initializers)}"
        self.initializers.append(
            onnx.numpy_helper.from_array(np.abs(array) + np.float32(0.5) if positive else array, name)
        )
        return name

    def integers(self, *values: int) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers.append(onnx.numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def apply(self, op_type: str, *inputs: str, shape: tuple[int, ...] | None = None, **attributes: object) -> str:
        output = f"{self.prefix}v{len(self.nodes)}"
        name = f"{self.prefix}n{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(op_type, list(inputs), [output], name=name, **attributes))
        self.value, self.shape = output, shape or self.shape
        return output


def norm(builder: Builder) -> None:
    channels = builder.shape[1]
    names = [builder.parameter(channels) for _ in range(3)]
    builder.apply("BatchNormalization", builder.value, *names, builder.parameter(channels, positive=True))


def conv(builder: Builder, *, groups: int = 1, size: int = 1, pad: int = 0) -> None:
    n, channels, h, w = builder.shape
    weight = builder.parameter(6 * groups, channels // groups, size, size)
    bias = [builder.parameter(6 * groups)] if builder.generator.integers(2) else []
    shape = (n, 6 * groups, h - size + 1 + 2 * pad, w - size + 1 + 2 * pad)
    builder.apply("Conv", builder.value, weight, *bias, shape=shape, group=groups, pads=[pad] * 4)


def transposed(builder: Builder) -> None:
    n, channels, h, w = builder.shape
    shape = (n, 4, h, w)
    builder.apply("ConvTranspose", builder.value, builder.parameter(channels, 2, 1, 1), shape=shape, group=2)


def constant_sum(builder: Builder) -> None:
    shapes = [(builder.shape[1], 1, 1), (1, builder.shape[1], 1, 1), (1,), builder.shape[1:]]
    builder.apply("Add", builder.value, builder.parameter(*shapes[builder.generator.integers(len(shapes))]))


def constant_product(builder: Builder) -> None:
    shapes = [(builder.shape[1], 1, 1), (1,), (builder.shape[3],)]
    builder.apply("Mul", builder.parameter(*shapes[builder.generator.integers(len(shapes))]), builder.value)


def branches(builder: Builder) -> None:
    """Two convolutions of one value, joined by a sum or side by side."""
    source, shape = builder.value, builder.shape
    conv(builder)
    first, result = builder.value, builder.shape
    builder.value, builder.shape = source, shape
    conv(builder)
    if builder.generator.integers(2):
        builder.apply("Add", first, builder.value)
    else:
        builder.apply("Concat", first, builder.value, axis=1, shape=(result[0], 2 * result[1], *result[2:]))


def residual(builder: Builder) -> None:
    source = builder.value
    channels = builder.shape[1]
    builder.apply("Conv", builder.value, builder.parameter(channels, channels, 3, 3), pads=[1] * 4)
    norm(builder)
    builder.apply("Add", builder.value, source)


def pooled(builder: Builder) -> None:
    op_type = ["AveragePool", "MaxPool"][builder.generator.integers(2)]
    extra = {"count_include_pad": int(builder.generator.integers(2))} if op_type == "AveragePool" else {}
    builder.apply(op_type, builder.value, kernel_shape=[3, 3], pads=[1] * 4, **extra)


def positions(builder: Builder) -> None:
    """A linear map over channels that have been moved to the end, and back."""
    n, channels, h, w = builder.shape
    builder.apply("Transpose", builder.value, perm=[0, 2, 3, 1])
    builder.apply("MatMul", builder.value, builder.parameter(channels, 6))
    if builder.generator.integers(2):
        builder.apply("Add", builder.value, builder.parameter(6))
    builder.apply("Transpose", builder.value, perm=[0, 3, 1, 2], shape=(n, 6, h, w))


def flattened(builder: Builder) -> None:
    n, channels, h, w = builder.shape
    builder.apply("Reshape", builder.value, builder.integers(0, channels, -1))
    if builder.generator.integers(2):
        names = [builder.parameter(channels) for _ in range(3)]
        builder.apply("BatchNormalization", builder.value, *names, builder.parameter(channels, positive=True))
    builder.apply("Reshape", builder.value, builder.integers(n, channels, h, w))


def split(builder: Builder) -> None:
    """Both halves of the channels, or of the rows, through a convolution each, and together again."""
    n, channels, h, w = builder.shape
    axis = int(builder.generator.integers(1, 3)) if h % 2 == 0 else 1
    half = (n, channels // 2, h, w) if axis == 1 else (n, channels, h // 2, w)
    first, second = f"v{len(builder.nodes)}a", f"v{len(builder.nodes)}b"
    builder.nodes.append(
        onnx.helper.make_node("Split", [builder.value], [first, second], name=f"n{len(builder.nodes)}", axis=axis)
    )
    outputs = []
    for part in (first, second):
        builder.value, builder.shape = part, half
        conv(builder)
        outputs.append(builder.value)
    builder.apply("Concat", *outputs, axis=2, shape=(n, 6, 2 * builder.shape[2], w))


def sliced(builder: Builder) -> None:
    """The inner channels, and all columns but the last. Later pieces need an even number of channels."""
    if builder.generator.integers(2):
        norm(builder)
    n, channels, h, w = builder.shape
    if channels < 4 or w < 3:
        return
    starts, ends, axes = (builder.integers(*values) for values in ((1, 0), (channels - 1, -1), (1, 3)))
    builder.apply("Slice", builder.value, starts, ends, axes, shape=(n, channels - 2, h, w - 1))


def padded(builder: Builder) -> None:
    n, channels, h, w = builder.shape
    mode = ["constant", "edge", "reflect" if h > 1 and w > 1 else "edge"][builder.generator.integers(3)]
    builder.apply(
        "Pad", builder.value, builder.integers(0, 0, 1, 0, 0, 0, 1, 1), shape=(n, channels, h + 2, w + 1), mode=mode
    )


def pre_activation(builder: Builder) -> None:
    """A residual sum, a batch norm with positive scales, an activation, and a padded convolution."""
    source, channels = builder.value, builder.shape[1]
    builder.apply("Conv", builder.value, builder.parameter(channels, channels, 3, 3), pads=[1] * 4)
    builder.apply("Add", builder.value, source)
    names = [builder.parameter(channels) for _ in range(2)]
    builder.apply(
        "BatchNormalization",
        builder.value,
        builder.parameter(channels, positive=True),
        *names,
        builder.parameter(channels, positive=True),
    )
    builder.apply(["Relu", "LeakyRelu"][builder.generator.integers(2)], builder.value)
    conv(builder, size=3, pad=1)


def readers(builder: Builder) -> None:
    """A batch norm that several operators read."""
    builder.apply("Relu", builder.value)
    norm(builder)
    source, shape = builder.value, builder.shape
    conv(builder)
    first, result = builder.value, builder.shape
    builder.value, builder.shape = source, shape
    builder.apply("GlobalAveragePool", builder.value, shape=(*shape[:2], 1, 1))
    conv(builder)
    builder.apply("Add", first, builder.value, shape=result)


PIECES = {
    "norm": norm,
    "conv": conv,
    "conv-3x3-padded": lambda builder: conv(builder, size=3, pad=1),
    "conv-2-groups": lambda builder: conv(builder, groups=2),
    "conv-transpose": transposed,
    "relu": lambda builder: builder.apply("Relu", builder.value),
    "identity": lambda builder: builder.apply("Identity", builder.value),
    "constant-sum": constant_sum,
    "constant-product": constant_product,
    "branches": branches,
    "residual": residual,
    "pooled": pooled,
    "positions": positions,
    "flattened": flattened,
    "split": split,
    "sliced": sliced,
    "padded": padded,
    "pre-activation": pre_activation,
    "readers": readers,
}


def build(
    names: list[str],
    seed: int,
    tail: bool,
    pieces: Mapping[str, Callable[[Builder], object]] = PIECES,
    area: tuple[int | str, int | str] = (6, 6),
) -> onnx.ModelProto:
    builder = Builder(np.random.default_rng(seed))
    for name in names:
        pieces[name](builder)
    if tail:
        n, channels, h, w = builder.shape
        builder.apply("Flatten", builder.value, shape=(n, channels * h * w))
        builder.apply(
            "Gemm", builder.value, builder.parameter(5, channels * h * w), builder.parameter(5), transB=1, shape=(n, 5)
        )
        norm(builder)
    graph = onnx.helper.make_graph(
        builder.nodes,
        "random",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ("N", 4, *area))],
        [onnx.helper.make_tensor_value_info(builder.value, onnx.TensorProto.FLOAT, (None,) * len(builder.shape))],
        builder.initializers,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.lists(st.sampled_from(sorted(PIECES)), min_size=2, max_size=9), st.integers(0, 2**16), st.booleans())
def test_random_graphs(names: list[str], seed: int, tail: bool) -> None:
    proto = build([*names, "norm"], seed, tail)
    # The bound of a whole network, not that of the chance that everything cancels.
    result = fold(proto, verify=False)
    folded = to_proto(result.model)
    onnx.checker.check_model(folded)
    x = np.random.default_rng(seed).standard_normal((2, 4, 6, 6)).astype(np.float32)
    assert_near(run(folded, {"x": x})[0], run(proto, {"x": x})[0])
    kept = [site for site in result.report.sites if site.outcome == "kept" and site.op_type == "BatchNormalization"]
    merged = [site for site in result.report.sites if site.outcome == "merged"]
    assert batch_norms(folded) == len(merged) + sum(
        sum(node_is_norm(proto, name) for name in site.nodes) for site in kept
    )
    assert all(site.reason for site in kept)
    assert len(folded.graph.node) <= len(proto.graph.node)
    again = fold(folded, verify=False)
    assert batch_norms(to_proto(again.model)) == batch_norms(folded)


def node_is_norm(proto: onnx.ModelProto, name: str) -> bool:
    return next(node.op_type for node in proto.graph.node if node.name == name) == "BatchNormalization"


def test_the_pieces_do_fold() -> None:
    """The property above would hold for a folder that refuses everything."""
    folded = {name: len(fold(build(["conv", name, "norm"], 3, False), verify=False).report.folded) for name in PIECES}
    # A Relu, a product along the last axis, and a maximum before negative scales stop a batch norm.
    assert {name for name, count in folded.items() if count == 0} == {"relu", "constant-product", "pooled"}, folded


def test_graphs_inside_functions() -> None:
    """The same graphs as the body of a function that is called twice, with its parameters given by the caller."""
    for seed in range(12):
        names = list(np.random.default_rng(seed).choice(["conv", "norm", "identity", "residual", "relu"], 4))
        proto = build(["conv", "norm", *names, "norm"], seed, False)
        called = in_a_function(proto)
        folded = to_proto(fold(called, verify=False).model)
        onnx.checker.check_model(folded)
        assert batch_norms(folded) <= 2 * batch_norms(to_proto(fold(proto, verify=False).model))
        x = np.random.default_rng(seed).standard_normal((2, 4, 6, 6)).astype(np.float32)
        for got, expected in zip(run(folded, {"x": x}), run(called, {"x": x}), strict=True):
            assert_near(got, expected)


def in_a_function(proto: onnx.ModelProto) -> onnx.ModelProto:
    parameters = [tensor.name for tensor in proto.graph.initializer]
    output = proto.graph.output[0]
    function = onnx.helper.make_function(
        "local", "net", ["x", *parameters], [output.name], proto.graph.node, [onnx.helper.make_opsetid("", 17)]
    )
    second = onnx.helper.make_tensor_value_info("second", onnx.TensorProto.FLOAT, (None,) * 4)
    nodes = [
        onnx.helper.make_node("net", ["x", *parameters], [name], domain="local", name=f"call_{name}")
        for name in (output.name, "second")
    ]
    graph = onnx.helper.make_graph(
        nodes, "called", list(proto.graph.input), [output, second], list(proto.graph.initializer)
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("local", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=8)
