"""Random graphs, folded in every way and then changed in one place; ONNX Runtime says whether the change means something."""

from __future__ import annotations

import collections
import concurrent.futures
import concurrent.futures.process
import dataclasses
import gc
import multiprocessing
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference

from bnexport import tolerances, verify
from bnexport.folding import fold
from bnexport.folding.report import FoldReport
from bnexport.model_io import to_proto
from bnexport.tolerances import UNIT_ROUNDOFF
from bnexport.verification.verdict import Verification
from tests.folding.test_random_graphs import PIECES, Builder, build
from tests.forms.engine import Engine, Refused
from tests.support.claims import prove_claims
from tests.verification.changes import several
from tests.verification.computed_pieces import COMPUTED, constant

SCALES = (1.0, 1 / 64, 8.0, 64.0)
# The last one is larger than any size at which a proof may evaluate.
SHAPES = ((2, 4, 6, 6), (1, 4, 6, 6), (3, 4, 6, 6), (211, 4, 6, 6))
AREAS = ((2, 4, 6, 6), (1, 4, 9, 5), (3, 4, 6, 211), (1, 4, 211, 6), (211, 4, 7, 6))
# To confirm that a candidate does not run where the source does.
MORE = [(n, 4, h, w) for n in (1, 3) for h in range(5, 9) for w in range(5, 9)]
# In units of the table's bound: what is certainly no rounding, and what is certainly rounding of a fold that is right.
CLEAR = 8.0
SAME = 1 / 64


def _gate(builder: Builder) -> None:
    source, shape = builder.value, builder.shape
    builder.apply("GlobalAveragePool", source, shape=(*shape[:2], 1, 1))
    builder.apply("Conv", builder.value, builder.parameter(shape[1], shape[1], 1, 1))
    builder.apply("Sigmoid", builder.value)
    builder.apply("Mul", source, builder.value, shape=shape)


def _enlarged(builder: Builder) -> None:
    n, channels, h, w = builder.shape
    if h <= 12:
        factors = constant(builder, np.array([1, 1, 2, 2], np.float32))
        mode = ["nearest", "linear", "cubic"][builder.generator.integers(3)]
        builder.apply("Resize", builder.value, "", factors, shape=(n, channels, 2 * h, 2 * w), mode=mode)


def _averaged(builder: Builder) -> None:
    n, channels, h, w = builder.shape
    axis = int(builder.generator.integers(2, 4))
    shape = (n, channels, *(1 if place == axis else size for place, size in ((2, h), (3, w))))
    operator = ["ReduceMean", "ReduceMax"][builder.generator.integers(2)]
    builder.apply(operator, builder.value, axes=[axis], keepdims=1, shape=shape)


def _unary(op_type: str, **attributes: object) -> Callable[[Builder], object]:
    return lambda builder: builder.apply(op_type, builder.value, **attributes)


EXTRA: dict[str, Callable[[Builder], object]] = {
    "gate": _gate,
    "enlarged": _enlarged,
    "averaged": _averaged,
    "prelu": lambda builder: builder.apply("PRelu", builder.value, builder.parameter(builder.shape[1], 1, 1)),
    "elu": _unary("Elu"),
    "tanh": _unary("Tanh"),
    "clip": lambda builder: builder.apply("Clip", builder.value, builder.parameter(), ""),
    "softmax": _unary("Softmax", axis=1),
    "dropout": _unary("Dropout"),
    "leaky": _unary("LeakyRelu", alpha=0.2),
    "negated": _unary("Neg"),
    "squares": lambda builder: builder.apply("Mul", builder.value, builder.value),
    "total": lambda builder: builder.apply("Sum", builder.value, builder.parameter(builder.shape[1], 1, 1)),
    **COMPUTED,
}


def graph(seed: int) -> onnx.ModelProto:
    """Make a random graph of opset 17; half of them are of any height and width."""
    generator = np.random.default_rng(seed)
    pieces = {**PIECES, **EXTRA}
    names = [str(name) for name in generator.choice(sorted(pieces), generator.integers(1, 6))]
    names.insert(int(generator.integers(len(names) + 1)), str(generator.choice(sorted(COMPUTED))))
    area: tuple[int | str, int | str] = ("H", "W") if generator.integers(2) else (6, 6)
    tail = bool(generator.integers(2)) and area == (6, 6)
    model = build([*names, "norm"], seed, tail, pieces, area)
    _declare(model, generator)
    return model


def _declare(model: onnx.ModelProto, generator: np.random.Generator) -> None:
    """Declare shapes of values: of none, of those that inference finds, or of some of them wrongly."""
    way = ("absent", "true", "stale")[generator.integers(3)]
    if way == "absent":
        return
    found = onnx.shape_inference.infer_shapes(model).graph.value_info
    for value in found:
        dims = value.type.tensor_type.shape.dim
        if way == "stale" and dims and not generator.integers(3):
            if generator.integers(2):
                dims[int(generator.integers(len(dims)))].dim_value = int(generator.choice([1, 2, 7, 64]))
            elif generator.integers(2):
                dims.add().dim_value = 1
            else:
                del dims[-1]
        model.graph.value_info.append(value)


# Outputs of one run, or None where the model does not run on its inputs.
Outputs = list[np.ndarray] | None


def _outputs(model: bytes, samples: list[dict[str, np.ndarray]]) -> list[Outputs]:
    """Run a model on each sample; None of it where no engine loads it."""
    try:
        engine = Engine(onnx.ModelProto.FromString(model))
    except Refused:
        return []
    found: list[Outputs] = []
    for sample in samples:
        try:
            found.append(engine.run(sample))
        except Refused:
            found.append(None)
    return found


class _Process:
    """A process for the engine, which aborts on some models; the next call starts another one."""

    def __init__(self) -> None:
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def outputs(self, model: onnx.ModelProto, samples: list[dict[str, np.ndarray]]) -> list[Outputs]:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(1, context)
        try:
            return self._pool.submit(_outputs, model.SerializeToString(), samples).result()
        except concurrent.futures.process.BrokenProcessPool:
            self._pool = None
            return []


PROCESS = _Process()


class Truth:
    """What a model computes, at four scales, also with one sign, and four or more sizes. sizes: instead of the usual ones."""

    def __init__(self, model: onnx.ModelProto, sizes: Iterable[tuple[int, ...]] = ()) -> None:
        generator = np.random.default_rng(5)
        free = bool(model.graph.input[0].type.tensor_type.shape.dim[2].dim_param)
        samples = [
            {"x": (scale * way(generator.standard_normal(shape))).astype(np.float32)}
            for shape in tuple(sizes) or (AREAS if free else SHAPES)
            for scale, way in (*((scale, np.asarray) for scale in SCALES), (8.0, np.abs), (-8.0, np.abs))
        ]
        outputs = PROCESS.outputs(model, samples)
        self.runs = [(sample, got) for sample, got in zip(samples, outputs) if got is not None]

    def compare(self, other: onnx.ModelProto, near: float = 1.0) -> str:
        """Say whether a model is "equal", "different", "unclear" or "refused"; near: by how much equal ones differ."""
        outputs = PROCESS.outputs(other, [sample for sample, _ in self.runs])
        if not outputs or outputs[0] is None:
            return "refused"
        worst = 0.0
        for (_, expected), got in zip(self.runs, outputs, strict=True):
            # It runs at one size at least.
            worst = np.inf if got is None else max(worst, *map(excess, expected, got))
        return "equal" if worst <= near else "different" if worst > CLEAR else "unclear"


def excess(expected: np.ndarray, got: np.ndarray) -> float:
    """Return the largest difference in units of the table's bound."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return np.inf
    if str(expected.dtype) not in UNIT_ROUNDOFF:
        return 0.0 if np.array_equal(expected, got) else np.inf
    wide, near = expected.astype(np.float64), got.astype(np.float64)
    if not np.array_equal(np.isfinite(wide), np.isfinite(near)):
        return np.inf
    finite = np.isfinite(wide)
    difference = float(np.abs(wide[finite] - near[finite]).max(initial=0.0))
    bound = tolerances.model(str(expected.dtype), wide).atol
    return 0.0 if not difference else difference / bound if bound else np.inf


@dataclasses.dataclass
class Result:
    """Counts of changed graphs. findings: kind, words and models."""

    different: int = 0
    equal: int = 0
    unclear: int = 0
    refused: int = 0
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    findings: list[tuple[str, str, onnx.ModelProto, onnx.ModelProto]] = dataclasses.field(default_factory=list)


def judge(source: onnx.ModelProto, report: FoldReport, wrong: onnx.ModelProto, truth: str) -> Iterator[str]:
    """Yield what `verify` says wrongly: "passed" of a different model, "failed" by default of an equal one."""
    ways: dict[str, Callable[[], Verification]] = {
        "by default": lambda: verify(source, wrong),
        "locally": lambda: verify(source, wrong, method="local"),
        "by its claims": lambda: prove_claims(source, wrong, report),
    }
    for name, judged in ways.items():
        try:
            verdict = judged()
        except Exception as error:
            if type(error).__module__ != "bnexport.errors":
                yield f"crash {name}: {type(error).__name__}: {error}"
            continue
        if truth == "different" and verdict.status == "passed":
            yield f"passed {name}: {verdict.summary()}"
        # Models that are equal at the usual sizes may differ at those that the verification tried.
        at = dict.fromkeys(size for (size,) in verdict.sizes) or MORE
        failed = truth == "equal" and verdict.status == "failed" and name == "by default"
        if failed and Truth(source, at).compare(wrong) not in ("different", "refused"):
            yield f"failed {name}: {verdict.reason}"


def run(count: int, seed: int, each: int = 12) -> Iterator[tuple[Result, str | None]]:
    """Judge folded and changed graphs until `count` are clear; yield the counts so far and each finding.

    each: candidates of one graph, of which the fold is the first one.
    """
    result = Result()
    while result.different + result.equal < count:
        source, generator, ways = graph(seed), np.random.default_rng((seed, 1)), np.random.default_rng((seed, 2))
        truth = Truth(source)
        seed += 1
        if not truth.runs:
            continue
        leftover = ("batch-norm", "conv", "arithmetic")[ways.integers(3)]
        folded = fold(source, verify=False, leftover=leftover, simplify=bool(ways.integers(2)))
        right = Truth(folded.model)
        if seed % 20 == 0:
            gc.collect()  # a call of the library leaves its cycles in the oldest generation
        for kind, text, wrong in (("fold", leftover, to_proto(folded.model)), *several(folded.model, generator, each)):
            if result.different + result.equal >= count:
                break
            meaning = truth.compare(wrong)
            if meaning == "equal" and right.compare(wrong, 0.0 if kind in ("scaled", "nudged") else SAME) != "equal":
                # A constant may differ by more than a fold rounds, and by less than the outputs of a network show.
                meaning = "unclear"
            setattr(result, meaning, getattr(result, meaning) + 1)
            if meaning not in ("different", "equal"):
                continue
            result.kinds[kind] += 1
            for finding in judge(source, folded.report, wrong, meaning):
                words = f"graph {seed - 1}, {kind}: {text}: {finding}"
                result.findings.append((finding.split(":")[0], words, source, wrong))
                yield result, words
    yield result, None
