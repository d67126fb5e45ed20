"""Work grows with the size of the model and not with its square: ratios of two sizes, in calls of functions.

A ten times larger model may take up to `_NEAR_LINEAR` times as many; quadratic work would be a hundred times.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bnexport.folding.context import Options
from bnexport.folding.folder import Folding
from bnexport.model_io.read import open_source
from tests.support.onnx_text import model
from tests.support.work import counted

_NEAR_LINEAR = 20
CONV = "z{i} = Conv (v{i}, w{i}:4.4.1.1)"
BLOCK = """a{i} = Conv <pads=[1,1,1,1]> (v{i}, w{i}:4.4.3.3) b{i} = Norm (a{i}, a{i}+:4)
    c{i} = Conv (v{i}, u{i}:4.4.1.1) d{i} = Norm (c{i}, c{i}+:4) e{i} = Norm (v{i}, e{i}+:4)
    f{i} = Add (b{i}, d{i}) g{i} = Add (f{i}, e{i}) v{j} = Relu (g{i})"""
TRAINING = "v{j}, m{i}_new, s{i}_new = mmcv.MMCVSyncBatchNorm (z{i}, m{i}:4, s{i}_v:4, p{i}_s:4, p{i}_b:4)"
# What is repeated with i and j = i + 1; what becomes of its sites.
GROWING = {
    "chain": (f"{CONV} v{{j}} = Norm (z{{i}}, p{{i}}+:4)", "folded"),
    "ir-3": (f"{CONV} v{{j}} = Norm (z{{i}}, p{{i}}+:4)", "folded"),
    "shared": ("z{i} = Conv (v{i}, w:4.4.1.1) v{j} = Norm (z{i}, p+:4)", "folded"),
    "outputs": ("z{i} = Conv (v0, w:4.4.1.1) y{i} = Norm (z{i}, p{i}+:4)", "folded"),
    "kept": ("y{i} = Norm (v{i}, p{i}+:4) v{j} = Softmax (y{i})", "kept"),
    "run-of-norms": ("v{j} = Norm (v{i}, p:4)", "merged"),
    "written-out": ("r{i} = Softmax (v{i}) t{i} = Mul (r{i}, k{i}_s:4.1.1) v{j} = Add (t{i}, l{i}:4.1.1)", "kept"),
    "training": (f"{CONV} {TRAINING}", "folded"),
    "branches": (BLOCK, "folded"),
    "concat": ("z{i} = Conv (v0, w{i}:2.4.1.1)", "folded"),
    "concat-of-norms": ("z{i} = Norm (r, p{i}+:4)", "folded"),
    "one-sum": ("z{i} = Conv (v0, w{i}:4.4.1.1) v{j} = Add (z{i}, v{i})", "folded"),
}
# What stands before all of these, and behind them.
AROUND: dict[str, tuple[str, Callable[[str, int], str]]] = {
    "concat": ("", lambda parts, count: f"j = Concat <axis=1> ({parts}) v{count} = Norm (j, p+:{2 * count})"),
    "concat-of-norms": (
        "r = Relu (v0)",
        lambda parts, count: f"j = Concat <axis=1> ({parts}) v{count} = Conv (j, w:3.{4 * count}.1.1)",
    ),
}
HEADERS = {
    "ir-3": '<ir_version: 3, opset_import: ["": 9]>',
    "training": '<ir_version: 8, opset_import: ["": 17, "mmcv": 1]>',
}


def repeated(case: str, count: int) -> onnx.ModelProto:
    """Nodes for each number below `count`, on x; the outputs are the last value, and every one that nothing reads."""
    before, behind = AROUND.get(case, ("", lambda *_: ""))
    nodes = "\n".join(GROWING[case][0].format(i=i, j=i + 1) for i in range(count))
    nodes = f"{before} {nodes} {behind(', '.join(f'z{i}' for i in range(count)), count)}"
    outs = [f"y{i}" for i in range(count)] if case == "outputs" else [f"v{count}"]
    if case == "training":
        outs += [f"{name}{i}_new" for i in range(count) for name in "ms"]
    # One batch norm after the other would make the numbers infinite, or nothing.
    values = dict.fromkeys(("p_s", "p_v"), np.ones(4, np.float32)) if case == "run-of-norms" else {}
    text = f"g (float[N,4,2,2] v0) => ({', '.join(f'float[A,B,C,D] {name}' for name in outs)}) {{ {nodes} }}"
    version = 3 if case == "ir-3" else 8
    return model(text, values=values, header=HEADERS.get(case), ir_version=version)


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
    outcome = GROWING[case][1]
    (small, outcomes), (large, outcomes_of_large) = (engine_work(repeated(case, count)) for count in (40, 400))
    assert outcomes == outcomes_of_large == {outcome}
    assert large < _NEAR_LINEAR * small


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
