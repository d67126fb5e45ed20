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

FLOAT = onnx.TensorProto.FLOAT


@dataclasses.dataclass
class Builder:
    """Grows one graph; `value` is its last tensor, with `shape`. prefix: of the names inside a body."""

    generator: np.random.Generator
    prefix: str = ""
    value: str = "x"
    shape: tuple[int, ...] = (2, 4, 6, 6)
    nodes: list[onnx.NodeProto] = dataclasses.field(default_factory=list)
    initializers: list[onnx.TensorProto] = dataclasses.field(default_factory=list)

    def constant(self, array: np.ndarray) -> str:
        self.initializers.append(onnx.numpy_helper.from_array(array, f"c{len(self.initializers)}"))
        return self.initializers[-1].name

    def parameter(self, *shape: int, positive: bool = False) -> str:
        array = self.generator.standard_normal(shape).astype(np.float32)
        return self.constant(np.abs(array) + np.float32(0.5) if positive else array)

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def apply(self, op_type: str, *inputs: str, shape: tuple[int, ...] | None = None, **attributes: object) -> str:
        output, name = (f"{self.prefix}{kind}{len(self.nodes)}" for kind in "vn")
        self.nodes.append(onnx.helper.make_node(op_type, list(inputs), [output], name=name, **attributes))
        self.value, self.shape = output, shape or self.shape
        return output

    def either(self) -> bool:
        return bool(self.generator.integers(2))

    def from_here(self, *pieces: Callable[[Builder], object]) -> list[str]:
        """Apply each to the last tensor; return what they make."""
        start, made = (self.value, self.shape), []
        for piece in pieces:
            self.value, self.shape = start
            piece(self)
            made.append(self.value)
        return made


def norm(builder: Builder, positive: bool = False) -> None:
    channels = builder.shape[1]
    names = [builder.parameter(channels) for _ in range(3 - positive)]
    names = [builder.parameter(channels, positive=True), *names] if positive else names
    builder.apply("BatchNormalization", builder.value, *names, builder.parameter(channels, positive=True))


def conv(builder: Builder, *, groups: int = 1, size: int = 1, pad: int = 0) -> None:
    n, channels, h, w = builder.shape
    weight = builder.parameter(6 * groups, channels // groups, size, size)
    bias = [builder.parameter(6 * groups)] if builder.either() else []
    shape = (n, 6 * groups, h - size + 1 + 2 * pad, w - size + 1 + 2 * pad)
    builder.apply("Conv", builder.value, weight, *bias, shape=shape, group=groups, pads=[pad] * 4)


def same(builder: Builder) -> None:
    """A convolution that keeps sizes and channels."""
    channels = builder.shape[1]
    builder.apply("Conv", builder.value, builder.parameter(channels, channels, 3, 3), pads=[1] * 4)


def transposed(builder: Builder) -> None:
    n, channels, h, w = builder.shape
    builder.apply("ConvTranspose", builder.value, builder.parameter(channels, 2, 1, 1), shape=(n, 4, h, w), group=2)


def constant_sum(builder: Builder) -> None:
    shapes = [(builder.shape[1], 1, 1), (1, builder.shape[1], 1, 1), (1,), builder.shape[1:]]
    builder.apply("Add", builder.value, builder.parameter(*shapes[builder.generator.integers(len(shapes))]))


def constant_product(builder: Builder) -> None:
    shapes = [(builder.shape[1], 1, 1), (1,), (builder.shape[3],)]
    builder.apply("Mul", builder.parameter(*shapes[builder.generator.integers(len(shapes))]), builder.value)


def branches(builder: Builder) -> None:
    """Two convolutions of one value, joined by a sum or side by side."""
    parts = builder.from_here(conv, conv)
    n, channels, *sizes = builder.shape
    if builder.either():
        builder.apply("Add", *parts)
    else:
        builder.apply("Concat", *parts, axis=1, shape=(n, 2 * channels, *sizes))


def residual(builder: Builder) -> None:
    source = builder.value
    same(builder)
    norm(builder)
    builder.apply("Add", builder.value, source)


def pooled(builder: Builder) -> None:
    op_type = ["AveragePool", "MaxPool"][builder.either()]
    extra = {"count_include_pad": int(builder.either())} if op_type == "AveragePool" else {}
    builder.apply(op_type, builder.value, kernel_shape=[3, 3], pads=[1] * 4, **extra)


def positions(builder: Builder) -> None:
    """A linear map over channels that have been moved to the end, and back."""
    n, channels, h, w = builder.shape
    builder.apply("Transpose", builder.value, perm=[0, 2, 3, 1])
    builder.apply("MatMul", builder.value, builder.parameter(channels, 6))
    if builder.either():
        builder.apply("Add", builder.value, builder.parameter(6))
    builder.apply("Transpose", builder.value, perm=[0, 3, 1, 2], shape=(n, 6, h, w))


def flattened(builder: Builder) -> None:
    n, channels, h, w = builder.shape
    builder.apply("Reshape", builder.value, builder.integers(0, channels, -1))
    if builder.either():
        norm(builder)
    builder.apply("Reshape", builder.value, builder.integers(n, channels, h, w))


def split(builder: Builder) -> None:
    """Both halves of the channels, or of the rows, through a convolution each, and together again."""
    n, channels, h, w = builder.shape
    axis = int(builder.generator.integers(1, 3)) if h % 2 == 0 else 1
    count = len(builder.nodes)
    parts, outputs = [f"v{count}a", f"v{count}b"], []
    builder.nodes.append(onnx.helper.make_node("Split", [builder.value], parts, name=f"n{count}", axis=axis))
    for part in parts:
        builder.value, builder.shape = part, (n, channels // 2, h, w) if axis == 1 else (n, channels, h // 2, w)
        conv(builder)
        outputs.append(builder.value)
    builder.apply("Concat", *outputs, axis=2, shape=(n, 6, 2 * builder.shape[2], w))


def sliced(builder: Builder) -> None:
    """The inner channels, and all columns but the last. Later pieces need an even number of channels."""
    if builder.either():
        norm(builder)
    n, channels, h, w = builder.shape
    if channels >= 4 and w >= 3:
        bounds = (builder.integers(*values) for values in ((1, 0), (channels - 1, -1), (1, 3)))
        builder.apply("Slice", builder.value, *bounds, shape=(n, channels - 2, h, w - 1))


def padded(builder: Builder) -> None:
    n, channels, h, w = builder.shape
    mode = ["constant", "edge", "reflect" if h > 1 and w > 1 else "edge"][builder.generator.integers(3)]
    pads = builder.integers(0, 0, 1, 0, 0, 0, 1, 1)
    builder.apply("Pad", builder.value, pads, shape=(n, channels, h + 2, w + 1), mode=mode)


def pre_activation(builder: Builder) -> None:
    """A residual sum, a batch norm with positive scales, an activation, and a padded convolution."""
    source = builder.value
    same(builder)
    builder.apply("Add", builder.value, source)
    norm(builder, positive=True)
    builder.apply(["Relu", "LeakyRelu"][builder.either()], builder.value)
    conv(builder, size=3, pad=1)


def averaged(builder: Builder) -> None:
    builder.apply("GlobalAveragePool", builder.value, shape=(*builder.shape[:2], 1, 1))
    conv(builder)


def readers(builder: Builder) -> None:
    """A batch norm that several operators read."""
    builder.apply("Relu", builder.value)
    norm(builder)
    n, _, *sizes = builder.shape
    builder.apply("Add", *builder.from_here(conv, averaged), shape=(n, 6, *sizes))


PIECES = {
    "norm": norm, "conv": conv, "conv-3x3-padded": lambda builder: conv(builder, size=3, pad=1),
    "conv-2-groups": lambda builder: conv(builder, groups=2), "conv-transpose": transposed,
    "relu": lambda builder: builder.apply("Relu", builder.value),
    "identity": lambda builder: builder.apply("Identity", builder.value),
    "constant-sum": constant_sum, "constant-product": constant_product, "branches": branches, "residual": residual,
    "pooled": pooled, "positions": positions, "flattened": flattened, "split": split, "sliced": sliced, "padded": padded,
    "pre-activation": pre_activation, "readers": readers,
}  # fmt: skip


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
        n, size = builder.shape[0], int(np.prod(builder.shape[1:]))
        builder.apply("Flatten", builder.value, shape=(n, size))
        weights = (builder.parameter(5, size), builder.parameter(5))
        builder.apply("Gemm", builder.value, *weights, transB=1, shape=(n, 5))
        norm(builder)
    inputs = [onnx.helper.make_tensor_value_info("x", FLOAT, ("N", 4, *area))]
    outputs = [onnx.helper.make_tensor_value_info(builder.value, FLOAT, (None,) * len(builder.shape))]
    graph = onnx.helper.make_graph(builder.nodes, "random", inputs, outputs, builder.initializers)
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
    norms = {node.name for node in proto.graph.node if node.op_type == "BatchNormalization"}
    assert batch_norms(folded) == len(merged) + sum(len(norms & {*site.nodes}) for site in kept)
    assert all(site.reason for site in kept)
    assert len(folded.graph.node) <= len(proto.graph.node)
    again = fold(folded, verify=False)
    assert batch_norms(to_proto(again.model)) == batch_norms(folded)


def test_the_pieces_do_fold() -> None:
    """The property above would hold for a folder that refuses everything."""
    folded = {name: len(fold(build(["conv", name, "norm"], 3, False), verify=False).report.folded) for name in PIECES}
    # A Relu, a product along the last axis, and a maximum before negative scales stop a batch norm.
    assert {name for name, count in folded.items() if count == 0} == {"relu", "constant-product", "pooled"}, folded
