"""Every wrong fold is refuted, and every right one is proved, at all sizes: over all rules and types."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter

import ml_dtypes  # noqa: F401 - bfloat16 of numpy
import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime
import pytest

from bnexport.errors import BnexportError
from bnexport.folding import fold
from bnexport.folding.placing import Rule
from bnexport.folding.report import FoldReport
from bnexport.folding.rules import ALL
from bnexport.model_io import to_proto
from bnexport.verification.comparison import compare_output
from tests.folding.corpus import FOLDED
from tests.folding.test_random_graphs import PIECES, build
from tests.forms import placements
from tests.forms.engine import Refused as NotRun
from tests.forms.placements import Impossible
from tests.forms.session import computed, of_operator
from tests.support.claims import prove_claims
from tests.support.onnx_text import array_of, with_arrays
from tests.verification.changes import differs, several


@functools.cache
def models() -> dict[str, onnx.ModelProto]:
    """The folds of the corpus, those of the random graphs' pieces, and two in half precision."""
    found = {name: case.model() for name, case in FOLDED.items() if case.method == "proved" and not case.options}
    found |= {f"piece-{name}": build(["conv", name, "norm"], 3, tail=name in ("norm", "branches")) for name in PIECES}
    found |= {kind: in_half(FOLDED["trap-weight-of-two-convs"].model(), kind) for kind in ("float16", "bfloat16")}
    return {name: proto for name, proto in found.items() if folded(proto)[1].folded}


def in_half(proto: onnx.ModelProto, dtype: str) -> onnx.ModelProto:
    """The same model with every float32 in `dtype`."""
    for tensor in proto.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    kind = getattr(onnx.TensorProto, dtype.upper())
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = kind
    return proto


def folded(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, FoldReport]:
    result = fold(proto, verify=False)
    return to_proto(result.model), result.report


def uses(rule: Rule, proto: onnx.ModelProto) -> bool:
    return any(rule.name in site.rules for site in folded(proto)[1].folded)


def of_rule(rule: Rule) -> onnx.ModelProto:
    """Return a model that the rule folds: one of `models`, or the first form of its operators in tests/forms."""
    for proto in models().values():
        if uses(rule, proto):
            return proto
    for one in (each for op_type in rule.op_types for each in of_operator(op_type, 1, 8)):
        for place in (*one.places, "conv form gain", "gain form conv"):
            with contextlib.suppress(Impossible, NotRun):
                result = computed(one, one.case)
                proto = placements.build(one.op_type, one.case, place, one.shape, result, one.opset, one.seed)
                if uses(rule, proto):
                    return proto
    raise AssertionError(
        f"no form of {', '.join(rule.op_types)} in tests/forms is folded by {rule.name}: add one to `models`"
    )


def missed(name: str, proto: onnx.ModelProto, most: int) -> tuple[int, list[str]]:
    """Change the fold of a model in one place, up to `most` times; how often, and which changes were not refuted."""
    count, survivors = 0, []
    good, report = folded(proto)
    verdict = prove_claims(proto, good, report)
    assert verdict.status == "passed", (name, verdict.reason)
    for _, what, wrong in several(good, np.random.default_rng(0), most):
        count += 1
        try:
            status = prove_claims(proto, wrong, report).status
        except BnexportError as error:  # a refused file is no pass
            status = type(error).__name__
        if status == "passed" and differs(good, wrong):
            survivors.append(f"{name}: {what}")
    return count, survivors


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_some_wrong_folds_of_each_rule_are_refuted(rule: Rule) -> None:
    count, survivors = missed(rule.name, of_rule(rule), 4)
    assert survivors == []
    assert count >= 2


def test_each_right_fold_is_proved() -> None:
    for name in (*(f"piece-{each}" for each in PIECES), "float16", "bfloat16"):
        if name in models():
            good, report = folded(models()[name])
            verdict = prove_claims(models()[name], good, report)
            assert verdict.status == "passed", (name, verdict.reason)
            assert {proof.method for proof in verdict.sites} <= {"proved"}, (name, verdict.sites)


# Right folds that were called wrong: numbers that a scale near 1 leaves as they are in bfloat16; a constant shape that fits
# the declared sizes alone; a shift that was rounded once by each of two folds.
DOUBTED = {
    "bfloat16": (28, "conv-3x3-padded sliced pre-activation positions"),
    "bfloat16, a channel": (236, "branches residual conv"),
    "shape": (125, "positions pooled flattened"),
    "twice": (239, "norm conv-transpose positions flattened flattened"),
    "twice, cancelled": (
        285, "identity constant-product conv-3x3-padded constant-product conv-3x3-padded positions norm pooled"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOUBTED)
def test_a_right_fold_is_not_refuted(name: str) -> None:
    seed, pieces = DOUBTED[name]
    proto = build([*pieces.split(), "norm"], seed, tail=seed % 2 == 0)
    if name.startswith("bfloat16"):
        proto = in_half(proto, "bfloat16")
    good, report = folded(proto)
    assert report.changed
    verdict = prove_claims(proto, good, report)
    # What bfloat16 rounds may be more than a sixteenth of an output's largest coefficient.
    assert verdict.status in ("passed", "not_verified" if name.startswith("bfloat16") else "passed"), verdict
    assert {proof.method for proof in verdict.sites} == {"proved"} or not verdict.passed


@pytest.mark.slow
def test_all_wrong_folds_are_refuted() -> None:
    every = models() | {f"rule-{rule.name}": of_rule(rule) for rule in ALL}
    found = [missed(name, proto, 40) for name, proto in every.items()]
    count, survivors = sum(each for each, _ in found), [it for _, each in found for it in each]
    print(f"{count} mutants, {len(survivors)} missed")
    assert survivors == []
    assert count >= 1000


@pytest.mark.slow
def test_no_right_fold_is_refuted() -> None:
    """Random graphs, as they are, with means of 1e5 standard deviations, and in half precision."""
    generator = np.random.default_rng(11)
    marks: Counter[str] = Counter()
    rejected, models = [], 0
    for seed in range(300):
        names = [str(name) for name in generator.choice(sorted(PIECES), generator.integers(2, 9))]
        for kind in ("plain", "far", "float16", "bfloat16"):
            proto = build([*names, "norm"], seed, tail=seed % 2 == 0)
            if kind == "far":  # the means of every batch norm at 10^5 standard deviations from 0
                norms = [node.input for node in proto.graph.node if node.op_type == "BatchNormalization"]
                proto = with_arrays(proto, {mean: 1e5 * np.sqrt(array_of(proto, var)) for _, _, _, mean, var in norms})
            elif kind != "plain":
                proto = in_half(proto, kind)
            good, report = folded(proto)
            if not report.changed:
                continue
            models += 1
            verdict = prove_claims(proto, good, report)
            marks.update(proof.method for proof in verdict.sites)
            if verdict.status == "failed" or any(not it.reason for it in verdict.sites if it.method != "proved"):
                rejected.append((seed, kind, verdict.reason))
    print(f"{models} folded models, {len(rejected)} rejected, sites: {dict(marks)}")
    assert rejected == []
    assert marks["proved"] > 0.9 * sum(marks.values())


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
