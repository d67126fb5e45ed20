"""Work grows with the size of the model and not with its square: ratios of two sizes, in calls of functions.

A ten times larger model may take up to `_NEAR_LINEAR` times as many; quadratic work would be a hundred times.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx_ir as ir
import pytest

from bnexport.folding import fold
from bnexport.folding.context import Options
from bnexport.folding.folder import Folding
from bnexport.model_io import to_proto
from bnexport.model_io.read import open_source
from tests.support.onnx_text import assert_near, batch_norms, fold_and_check, make_inputs, model, operators, run
from tests.support.work import counted

FLOAT = onnx.TensorProto.FLOAT
_NEAR_LINEAR = 20


class Text:
    """Nodes and initializers of one graph."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._generator = np.random.default_rng(0)

    def parameter(self, name: str, *shape: int) -> str:
        array = np.abs(self._generator.standard_normal(shape)).astype(np.float32) + np.float32(0.5)
        self.initializers.append(onnx.numpy_helper.from_array(array, name))
        return name

    def node(self, op_type: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(onnx.helper.make_node(op_type, inputs, [output], name=f"node {output}", **attributes))
        return output

    def norm(self, value: str, output: str, channels: int, name: str | None = None) -> str:
        prefix = name or output
        if name is None or f"{name}.s" not in {tensor.name for tensor in self.initializers[:4]}:
            for part in "sbmv":
                self.parameter(f"{prefix}.{part}", channels)
        return self.node("BatchNormalization", [value, *(f"{prefix}.{part}" for part in "sbmv")], output)

    def model(self, outputs: list[str], ir_version: int = 8, opset: int = 17) -> onnx.ModelProto:
        inputs = [onnx.helper.make_tensor_value_info("x", FLOAT, ("N", 4, 2, 2))]
        if ir_version < 4:
            inputs += [
                onnx.helper.make_tensor_value_info(tensor.name, FLOAT, tuple(tensor.dims))
                for tensor in self.initializers
            ]
        infos = [onnx.helper.make_tensor_value_info(name, FLOAT, (None,) * 4) for name in outputs]
        graph = onnx.helper.make_graph(self.nodes, "g", inputs, infos, self.initializers)
        opsets = [onnx.helper.make_opsetid("", opset)]
        return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)


def chain(count: int) -> onnx.ModelProto:
    """Conv and batch norm, one after the other."""
    text, value = Text(), "x"
    for index in range(count):
        value = text.node("Conv", [value, text.parameter(f"w{index}", 4, 4, 1, 1)], f"z{index}")
        value = text.norm(value, f"y{index}", 4)
    return text.model([value])


def ir_3(count: int) -> onnx.ModelProto:
    """The same where every initializer is an input."""
    proto = chain(count)
    proto.ir_version = 3
    proto.opset_import[0].version = 9
    for tensor in proto.graph.initializer:
        proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, FLOAT, tuple(tensor.dims)))
    return proto


def shared(count: int) -> onnx.ModelProto:
    """One weight and one set of statistics for all."""
    text, value = Text(), "x"
    text.parameter("w", 4, 4, 1, 1)
    for index in range(count):
        value = text.node("Conv", [value, "w"], f"z{index}")
        value = text.norm(value, f"y{index}", 4, name="all")
    return text.model([value])


def outputs(count: int) -> onnx.ModelProto:
    """Every batch norm makes an output of the model."""
    text = Text()
    text.parameter("w", 4, 4, 1, 1)
    names = []
    for index in range(count):
        value = text.node("Conv", ["x", "w"], f"z{index}")
        names.append(text.norm(value, f"y{index}", 4))
    return text.model(names)


def run_of_norms(count: int) -> onnx.ModelProto:
    """One batch norm after the other, which become one."""
    text, value = Text(), "x"
    ones = onnx.numpy_helper.from_array(np.ones(4, np.float32))
    for index in range(count):
        value = text.norm(value, f"y{index}", 4, name="all")
    for tensor in (text.initializers[0], text.initializers[3]):
        name = tensor.name
        tensor.CopyFrom(ones)
        tensor.name = name
    return text.model([value])


def kept(count: int) -> onnx.ModelProto:
    """Nothing can be folded."""
    text, value = Text(), "x"
    for index in range(count):
        value = text.node("Softmax", [text.norm(value, f"y{index}", 4)], f"r{index}")
    return text.model([value])


def written_out(count: int) -> onnx.ModelProto:
    """Mul and Add behind what takes nothing in."""
    text, value = Text(), "x"
    for index in range(count):
        value = text.node("Softmax", [value], f"r{index}")
        value = text.node("Mul", [value, text.parameter(f"k{index}", 4, 1, 1)], f"t{index}")
        value = text.node("Add", [value, text.parameter(f"l{index}", 4, 1, 1)], f"y{index}")
    return text.model([value])


def training(count: int) -> onnx.ModelProto:
    """Sync batch norms in training, whose statistics are outputs of the model."""
    text, value, names = Text(), "x", []
    for index in range(count):
        value = text.node("Conv", [value, text.parameter(f"w{index}", 4, 4, 1, 1)], f"z{index}")
        for part in "mvsb":
            text.parameter(f"{index}.{part}", 4)
        text.nodes.append(
            onnx.helper.make_node(
                "MMCVSyncBatchNorm",
                [value, *(f"{index}.{part}" for part in "mvsb")],
                [f"y{index}", f"{index}.m.new", f"{index}.v.new"],
                name=f"norm {index}",
                domain="mmcv",
            )
        )
        value = f"y{index}"
        names += [f"{index}.m.new", f"{index}.v.new"]
    proto = text.model([value])
    for name in names:
        proto.graph.output.append(onnx.helper.make_tensor_value_info(name, FLOAT, (4,)))
    proto.opset_import.append(onnx.helper.make_opsetid("mmcv", 1))
    return proto


def branches(count: int) -> onnx.ModelProto:
    """Blocks of a 3x3, a 1x1 and an identity, each with its batch norm."""
    text, value = Text(), "x"
    for index in range(count):
        large = text.node("Conv", [value, text.parameter(f"w{index}", 4, 4, 3, 3)], f"a{index}", pads=[1, 1, 1, 1])
        small = text.node("Conv", [value, text.parameter(f"v{index}", 4, 4, 1, 1)], f"b{index}")
        parts = [text.norm(part, f"{part}.n", 4) for part in (large, small)]
        total = text.node("Add", [*parts], f"t{index}")
        total = text.node("Add", [total, text.norm(value, f"c{index}", 4)], f"u{index}")
        value = text.node("Relu", [total], f"r{index}")
    return text.model([value])


def one_sum(count: int) -> onnx.ModelProto:
    """A single sum of many convolutions of one value."""
    text, value = Text(), "x"
    for index in range(count):
        part = text.node("Conv", ["x", text.parameter(f"w{index}", 4, 4, 1, 1)], f"z{index}")
        value = text.node("Add", [part, value], f"y{index}")
    return text.model([value])


GROWING: dict[str, tuple[Callable[[int], onnx.ModelProto], str]] = {
    "chain": (chain, "folded"),
    "ir-3": (ir_3, "folded"),
    "shared": (shared, "folded"),
    "outputs": (outputs, "folded"),
    "kept": (kept, "kept"),
    "run-of-norms": (run_of_norms, "merged"),
    "written-out": (written_out, "kept"),
    "training": (training, "folded"),
    "branches": (branches, "folded"),
    "one-sum": (one_sum, "folded"),
}


def engine_work(proto: onnx.ModelProto) -> tuple[int, set[str]]:
    """Calls of the engine alone, and what became of the sites."""
    ir_model = open_source(proto).model

    def work() -> set[str]:
        folding = Folding(ir_model, Options())
        folding.convert()
        folding.fold()
        return {site.outcome for site in folding.sites}

    return counted(work)


@pytest.mark.parametrize("case", GROWING)
def test_ten_times_the_size(case: str) -> None:
    make, outcome = GROWING[case]
    (small, outcomes), (large, outcomes_of_large) = (engine_work(make(count)) for count in (40, 400))
    assert outcomes == outcomes_of_large == {outcome}
    assert large < _NEAR_LINEAR * small


@pytest.mark.slow
@pytest.mark.parametrize("case", GROWING)
def test_ten_thousand(case: str) -> None:
    make, outcome = GROWING[case]
    (small, _), (large, outcomes) = (engine_work(make(count)) for count in (1000, 10_000))
    assert outcomes == {outcome}
    assert large < _NEAR_LINEAR * small


def concat(count: int) -> onnx.ModelProto:
    """`count` convolutions joined along the channels and normalised together."""
    text = Text()
    parts = [text.node("Conv", ["x", text.parameter(f"w{index}", 2, 4, 1, 1)], f"z{index}") for index in range(count)]
    text.node("Concat", parts, "joined", axis=1)
    return text.model([text.norm("joined", "y", 2 * count)])


def concat_forward(count: int) -> onnx.ModelProto:
    """`count` batch norms of something that takes nothing in, joined, before one convolution."""
    text = Text()
    text.node("Relu", ["x"], "r")
    parts = [text.norm("r", f"n{index}", 4) for index in range(count)]
    text.node("Concat", parts, "joined", axis=1)
    return text.model([text.node("Conv", ["joined", text.parameter("w", 3, 4 * count, 1, 1)], "y")])


@pytest.mark.parametrize("make", [concat, concat_forward])
def test_concat_of_hundreds(make: Callable[[int], onnx.ModelProto]) -> None:
    proto = make(400)
    result = fold(proto, verify=False)
    folded = to_proto(result.model)
    assert batch_norms(folded) == 0
    inputs = make_inputs(proto)
    assert_near(run(folded, inputs)[0], run(proto, inputs)[0])
    small, large = (engine_work(make(count))[0] for count in (40, 400))
    assert large < _NEAR_LINEAR * small


def test_bodies_in_bodies() -> None:
    """As many If nodes as a file can nest, each in the branch of the one before, with a batch norm in every branch."""
    depth = 30
    inner = "o{n} = Conv (x, w)\n y{n} = BatchNormalization (o{n}, p_s, p_b, p_m, p_v)"

    def branch(level: int) -> str:
        if level == depth:
            return f"leaf () => (float[N,4,A,B] yt) {{ {inner.format(n='t')} }}"
        return f"""level{level} () => (float[N,4,A,B] s{level}) {{
            s{level} = If (c) <then_branch = {branch(level + 1)},
                else_branch = other{level} () => (float[N,4,A,B] ye{level}) {{ {inner.format(n=f"e{level}")} }}> }}"""

    body = f"g (float[N,4,H,W] x, bool c) => (float[N,4,A,B] s0) {{ {branch(0).split('{', 1)[1]}"
    shapes = {"w": (4, 4, 1, 1), **{f"p_{part}": (4,) for part in "sbmv"}}
    folded, result = fold_and_check(model(body, shapes), oracle=False)
    assert len(result.report.folded) == depth + 1
    assert operators(folded) == ["If"]


def test_deeper_than_a_file() -> None:
    """A hundred levels, in memory only."""
    names = ("w", "s", "b", "m", "v")
    arrays = [np.ones((4, 4, 1, 1), np.float32), *(np.full(4, 0.5, np.float32) for _ in range(4))]
    x = ir.Value(name="x", shape=ir.Shape(("N", 4, 2, 2)), type=ir.TensorType(ir.DataType.FLOAT))
    c = ir.Value(name="c", shape=ir.Shape(()), type=ir.TensorType(ir.DataType.BOOL))
    parameters = [
        ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in zip(names, arrays, strict=True)
    ]

    def conv_norm(level: int, side: str) -> ir.Graph:
        conv = ir.Node("", "Conv", [x, parameters[0]], name=f"conv {level} {side}")
        norm = ir.Node("", "BatchNormalization", [conv.outputs[0], *parameters[1:]], name=f"norm {level} {side}")
        return ir.Graph([], norm.outputs, nodes=[conv, norm], name=f"body {level} {side}")

    graph = conv_norm(100, "then")
    for level in reversed(range(100)):
        branches = [ir.AttrGraph("then_branch", graph), ir.AttrGraph("else_branch", conv_norm(level, "else"))]
        choice = ir.Node("", "If", [c], branches, name=f"if {level}")
        graph = ir.Graph([], choice.outputs, nodes=[choice], name=f"level {level}")
    nodes, outputs = list(graph), list(graph.outputs)
    graph.outputs.clear()
    graph.remove(nodes)
    top = ir.Graph([x, c], outputs, nodes=nodes, initializers=parameters, opset_imports={"": 17}, name="main")
    folding = Folding(ir.Model(top, ir_version=8), Options())
    folding.convert()
    folding.fold()
    assert {site.outcome for site in folding.sites} == {"folded"}
    assert len(folding.sites) == 101
