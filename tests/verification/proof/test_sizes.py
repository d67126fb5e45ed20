"""What is proved at small sizes holds at all: one model for each rule, run at many sizes in ONNX Runtime."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest

from bnexport.folding.rules import ALL
from bnexport.verification.comparison import compare_output
from tests.folding.corpus import FOLDED
from tests.support.claims import prove_claims
from tests.support.onnx_text import array_of, with_arrays
from tests.verification.proof.test_mutants import folded, models, of_rule

SIZES = ("N", "H", "W", "L")
# Half types have few runs in ONNX Runtime's CPU kernels.
HALF = ("float16", "bfloat16", "number-half", "branches-half")


def with_free_sizes(proto: onnx.ModelProto, batch_alone: bool = False) -> onnx.ModelProto:
    """The model with every size of its input free but the channels', or that of the batch alone."""
    free = copy.deepcopy(proto)
    for axis, dimension in enumerate(free.graph.input[0].type.tensor_type.shape.dim):
        if axis == 0 or (axis != 1 and not batch_alone):
            dimension.dim_param = SIZES[axis if axis == 0 else axis - 1]
    for output in free.graph.output:
        for axis, dimension in enumerate(output.type.tensor_type.shape.dim):
            dimension.dim_param = f"out{axis}"
    return free


def session(proto: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def compared(name: str, proto: onnx.ModelProto, count: int, batch_alone: bool = False) -> tuple[int, set[str]]:
    """Prove the fold of one model with free sizes, then run both at `count` random ones; those that ran, and the rules."""
    source = with_free_sizes(proto, batch_alone)
    good, report = folded(source)
    verdict = prove_claims(source, good, report)
    assert verdict.status != "failed", (name, verdict)
    if verdict.status != "passed":  # a constant of the declared sizes
        return 0, set()
    engines = session(source), session(good)
    generator = np.random.default_rng(sum(map(ord, name)))
    dims = source.graph.input[0].type.tensor_type.shape.dim
    ran = 0
    for _ in range(8 * count):
        if ran == count:
            break
        shape = [each.dim_value or int(generator.integers(1, 4 if axis == 0 else 40)) for axis, each in enumerate(dims)]
        feed = {source.graph.input[0].name: generator.standard_normal(shape).astype(np.float32)}
        try:
            expected = engines[0].run(None, feed)
        except Exception:  # a size that the original does not take
            continue
        got = engines[1].run(None, feed)
        ran += 1
        for one, two in zip(expected, got, strict=True):
            assert one.shape == two.shape, (name, shape)
            assert not one.size or compare_output(name, [one], [two], "float32").passed, (name, shape)
    return ran, {rule for site in report.folded for rule in site.rules}


@pytest.mark.parametrize(
    "name", ["producer-resize-scales", "trap-max-pool", "producer-conv-transpose-1d-groups-3", "padded-behind-sum"]
)
def test_some_sizes(name: str) -> None:
    assert compared(name, FOLDED[name].model(), 4)[0]


@pytest.mark.slow
def test_fifty_sizes_for_each_rule() -> None:
    ran: Counter[str] = Counter()
    proved = 0
    every = {**models(), **{rule.name: of_rule(rule) for rule in ALL}}
    for name, source in every.items():
        if name in HALF:
            continue
        count, rules = compared(name, source, 50)
        if count < 50:  # it needs its sizes, as a normalisation of the last axis does
            count, rules = compared(name, source, 50, batch_alone=True)
        ran.update(dict.fromkeys(rules, count))
        proved += count > 0
    print(f"{proved} of {len(every)} models with free sizes, runs by rule: {dict(ran)}")
    # A deformable convolution has inputs whose sizes belong together.
    assert {rule.name for rule in ALL} - {"batch_norm", "deform_conv"} <= {
        name for name, count in ran.items() if count >= 50
    }


@pytest.mark.parametrize("size", [5, 64])
def test_branches_of_any_declared_size_are_proved(size: int) -> None:
    """64 x 64 are too many variables: what holds at each remainder of small sizes holds there."""
    source = FOLDED["branches-sizes-1-3-5"].model()
    for value in (*source.graph.input, *source.graph.output):
        for dimension in value.type.tensor_type.shape.dim[2:]:
            dimension.dim_value = size
    good, report = folded(source)
    verdict = prove_claims(source, good, report)
    assert [site.method for site in verdict.sites] == ["proved"]
    weight = max(good.graph.initializer, key=lambda tensor: len(tensor.dims)).name
    array = array_of(good, weight)
    array.flat[-1] += 0.01
    assert prove_claims(source, with_arrays(good, {weight: array}), report).status == "failed"
