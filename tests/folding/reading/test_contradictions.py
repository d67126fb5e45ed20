"""Sizes and ranks that contradict each other refuse the model; what is only unlikely does not."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from bnexport.cli import main
from bnexport.errors import MalformedModelError
from bnexport.folding import fold
from bnexport.folding.contradictions import refuse_contradictions
from bnexport.model_io import as_model
from tests.support.onnx_text import batch_norm, model

X = "float[N,6,H,W] x"
NORM = batch_norm("p", 8)
SYNC = '<ir_version: 8, opset_import: ["": 17, "mmcv": 1]>'

# (nodes, shapes, the message)
WRONG = {
    "seven-scales-behind-four-channels": (
        "z = Conv (x, w)\n y = BatchNormalization (z, p_s, p_b, p_m, p_v)",
        {"w": (4, 6, 3, 3), **batch_norm("p", 7)},
        "BatchNormalization node 'BatchNormalization -> y': scale 'p_s' has 7 elements, expected 4, "
        "the channels of input 'z'",
    ),
    "vectors-of-two-lengths": (
        "y = BatchNormalization (x, p_s, p_b, p_m, p_v)",
        {**batch_norm("p", 6), "p_m": (5,)},
        "mean 'p_m' has 5 elements, expected 6, the channels of input 'x'",
    ),
    "vectors-of-two-lengths-behind-unknown-channels": (
        "t = Reshape (x, s)\n y = BatchNormalization (t, p_s, p_b, p_m, p_v)",
        {**batch_norm("p", 6), "p_v": (5,)},
        "variance 'p_v' has 5 elements, expected 6, the channels of input 'p_s'",
    ),
    "a-matrix-of-means": (
        "y = BatchNormalization (x, p_s, p_b, p_m, p_v)",
        {**batch_norm("p", 6), "p_m": (6, 1)},
        r"mean 'p_m' has shape \(6, 1\), expected a value for each channel",
    ),
    "sync-batch-norm": (
        "z = Conv (x, w)\n y = mmcv.MMCVSyncBatchNorm (z, p_m, p_v, p_s, p_b)",
        {"w": (8, 6, 3, 3), **NORM, "p_s": (9,)},
        "MMCVSyncBatchNorm node .*: weight 'p_s' has 9 elements, expected 8, the channels of input 'z'",
    ),
    "through-activations-pools-and-sums": (
        """z = Conv (x, w)
        a = Add (z, c)
        r = Relu (a)
        m = MaxPool <kernel_shape = [2, 2]> (r)
        y = BatchNormalization (m, p_s, p_b, p_m, p_v)""",
        {"w": (4, 6, 3, 3), "c": (4, 1, 1), **NORM},
        "scale 'p_s' has 8 elements, expected 4, the channels of input 'm'",
    ),
    "inside-a-branch": (
        """y = If (b) <
            then_branch = t () => (o) {
                z = Conv (x, w)
                o = BatchNormalization (z, p_s, p_b, p_m, p_v) },
            else_branch = e () => (q) { q = Identity (x) }
        >""",
        {"w": (4, 6, 3, 3), **NORM},
        "scale 'p_s' has 8 elements, expected 4, the channels of input 'z'",
    ),
    "conv-channels": (
        "y = Conv (x, w)",
        {"w": (8, 5, 3, 3)},
        r"Conv node 'Conv -> y': input 'x' has 6 channels, expected 5 for 'w' of shape \(8, 5, 3, 3\) and group 1",
    ),
    "conv-groups": (
        "y = Conv <group = 3> (x, w)",
        {"w": (9, 3, 3, 3)},
        r"input 'x' has 6 channels, expected 9 for 'w' of shape \(9, 3, 3, 3\) and group 3",
    ),
    "conv-outputs-and-groups": (
        "y = Conv <group = 3> (x, w)",
        {"w": (8, 2, 3, 3)},
        "input 'w' has 8 elements along axis 0, expected a multiple of its group, 3",
    ),
    "conv-bias": ("y = Conv (x, w, b)", {"w": (8, 6, 3, 3), "b": (6,)}, "bias 'b' has 6 elements, expected 8"),
    "conv-rank": (
        "y = Conv (x, w)",
        {"w": (8, 6, 3)},
        r"input 'x' has rank 4, expected 3, the rank of 'w' of shape \(8, 6, 3\)",
    ),
    "conv-behind-conv": (
        "z = Conv (x, w)\n y = Conv (z, v)",
        {"w": (8, 6, 3, 3), "v": (4, 6, 1, 1)},
        "Conv -> y': input 'z' has 8 channels, expected 6",
    ),
    "transposed-conv": (
        "y = ConvTranspose <group = 2> (x, w, b)",
        {"w": (6, 4, 3, 3), "b": (4,)},
        "ConvTranspose node .*: bias 'b' has 4 elements, expected 8, the channels of input 'w'",
    ),
    "transposed-conv-channels": (
        "y = ConvTranspose (x, w)",
        {"w": (8, 6, 3, 3)},
        "input 'x' has 6 channels, expected 8",
    ),
    "gemm": (
        "y = Gemm <transB = 1> (f, w)",
        {"w": (6, 5)},
        r"Gemm node .*: input 'f' has 6 elements along axis 1, expected 5 for 'w' of shape \(6, 5\)",
    ),
    "gemm-constant": (
        "y = Gemm (f, w, c)",
        {"w": (6, 4), "c": (6,)},
        r"input 'c' ends in 6 elements, expected 1 or 4, the columns of 'w' of shape \(6, 4\)",
    ),
    "matmul": (
        "h = MatMul (f, w)\n y = MatMul (h, v)",
        {"w": (6, 4), "v": (2, 5, 3)},
        r"MatMul -> y': input 'h' has 4 elements along axis 1, expected 5 for 'v' of shape \(2, 5, 3\)",
    ),
}


def build(nodes: str, shapes: dict[str, tuple[int, ...]], **options: object) -> onnx.ModelProto:
    """`nodes` read x (N, 6, H, W), f (N, 6), a shape s and a condition b."""
    inputs = f"{X}, float[N,6] f, int64[K] s" + ("" if "b" in shapes else ", bool b")
    return model(f"g ({inputs}) => (float y) {{ {nodes} }}", shapes, header=SYNC, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("nodes", "shapes", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_contradiction_refuses_the_model(
    nodes: str, shapes: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(MalformedModelError, match=message):
        fold(build(nodes, shapes), tmp_path / "out.onnx", verify=False)
    assert not os.listdir(tmp_path)


def test_the_command_line_refuses_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    nodes, shapes, _ = WRONG["seven-scales-behind-four-channels"]
    onnx.save(build(nodes, shapes), tmp_path / "in.onnx")
    assert main(["fold", str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")]) == 3
    assert "scale 'p_s' has 7 elements, expected 4" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["in.onnx"]


# Nodes and shapes that some caller or runtime may have a use for.
POSSIBLE = {
    "declared-shapes-in-between": (
        "z = Conv (x, w)\n y = BatchNormalization (z, p_s, p_b, p_m, p_v)",
        {"w": (8, 6, 3, 3), **NORM},
        {"z": [None, 4, None, None]},
    ),
    "a-branch-for-another-rank": (
        "y = If (b) <then_branch = t () => (o) { o = Conv (x, w) }, else_branch = e () => (q) { q = Identity (x) }>",
        {"w": (8, 6, 3)},
        {},
    ),
    "a-foreign-namesake": ("y = mmcv.Conv (x, w)", {"w": (8, 5, 3, 3)}, {}),
    "gemm-constants-that-broadcast": ("y = Gemm (f, w, c)", {"w": (6, 4), "c": (1,)}, {}),
    "batched-matmul": ("y = MatMul (f, w)", {"w": (3, 6, 4)}, {}),
    "vector-times-matrix": ("y = MatMul (v, w)", {"w": (6, 4), "v": (6,)}, {}),
    "a-sum-that-widens-the-channels": (
        "z = Conv (x, w)\n a = Add (z, c)\n y = BatchNormalization (a, p_s, p_b, p_m, p_v)",
        {"w": (1, 6, 3, 3), "c": (8, 1, 1), **NORM},
        {},
    ),
    "absent-parameters": ("y = mmcv.MMCVSyncBatchNorm (x, , , p_s)", {"p_s": (6,)}, {}),
}


@pytest.mark.parametrize(("nodes", "shapes", "declared"), POSSIBLE.values(), ids=POSSIBLE.keys())
def test_what_may_be_right_is_not_refused(
    nodes: str, shapes: dict[str, tuple[int, ...]], declared: dict[str, list[int | None]]
) -> None:
    proto = build(nodes, shapes)
    for name, sizes in declared.items():
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, 1, sizes))
    refuse_contradictions(as_model(proto))


def test_one_value_for_each_position() -> None:
    """spatial=0, in opsets 1 to 8: the vectors are as long as a sample."""
    body = "g (float[N,6,2,2] x) => (float y) { y = BatchNormalization <spatial = 0> (x, p_s, p_b, p_m, p_v) }"
    shapes = dict.fromkeys(NORM, (6, 2, 2))
    refuse_contradictions(as_model(model(body, shapes, opset=7)))


def test_a_caller_may_override_an_initializer() -> None:
    """From IR version 4 on, what is an input as well; its declared shape is a promise, its value is not."""
    proto = build("y = Conv (x, w)", {"w": (8, 5, 3, 3)})
    proto.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, [None] * 4))
    refuse_contradictions(as_model(proto))
    proto.ir_version = 3
    with pytest.raises(MalformedModelError, match="input 'x' has 6 channels, expected 5"):
        refuse_contradictions(as_model(proto))


def test_arguments_of_a_function() -> None:
    """One body serves calls of several sizes; where a call is inlined, its sizes count."""
    function = """<domain: "local", opset_import: ["": 17]>
    block (x, w, s, b, m, v) => (y) { z = Conv (x, w)
    y = BatchNormalization (z, s, b, m, v) }"""
    header = '<ir_version: 8, opset_import: ["": 17, "local": 1]>'
    body = f"g ({X}) => (float y) {{ y = local.block (x, w, p_s, p_b, p_m, p_v) }}"
    for channels, right in ((8, True), (4, False)):
        proto = model(body, {"w": (channels, 6, 1, 1), **NORM}, header=header)
        proto.functions.append(onnx.parser.parse_function(function))
        refuse_contradictions(as_model(proto))
        if right:
            assert fold(proto, verify=False).report.folded
        else:
            with pytest.raises(MalformedModelError, match="has 8 elements, expected 4"):
                fold(proto, verify=False)


def test_models_of_the_onnx_package() -> None:
    """ONNX's own test models, valid every one."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data"
    paths = [
        path for kind in ("simple", "pytorch-converted", "pytorch-operator") for path in folder.glob(f"{kind}/*/*.onnx")
    ]
    assert len(paths) > 100
    for path in paths:
        refuse_contradictions(as_model(onnx.load(path)))


@pytest.mark.slow
def test_operators_of_the_standard() -> None:
    """ONNX's own examples of every operator; to make them takes ten seconds."""
    from onnx.backend.test.case.node import collect_testcases

    cases = collect_testcases(None)  # type: ignore[arg-type]
    assert len(cases) > 1000
    for case in cases:
        if isinstance(case.model, onnx.ModelProto):
            refuse_contradictions(ir.from_proto(case.model))


def test_names_are_printable() -> None:
    proto = build("y = Conv (x, w)", {"w": (8, 5, 3, 3)})
    for name in (proto.graph.input[0], proto.graph.node[0]):
        name.name = "x\x1b[2J"
    proto.graph.node[0].input[0] = "x\x1b[2J"
    with pytest.raises(MalformedModelError) as caught:
        refuse_contradictions(as_model(proto))
    assert str(caught.value).isprintable()
