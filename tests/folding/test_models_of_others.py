"""The models and node cases of the onnx package: as they are where nothing folds, right where something does, no crash.

A node case is one operator with weights and data. Between a convolution and a batch norm, on either side, it shows
whether a map passes through the operator as a rule says; what folds is compared with what was there.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.reference
import onnxruntime
import pytest

from bnexport import tolerances
from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.onnx_text import assert_near, batch_norms, run

DATA = Path(onnx.__file__).parent / "backend/test/data"
FILES = sorted(path for kind in ("light", "simple", "pytorch-*") for path in (DATA.glob(f"{kind}/**/*.onnx")))
FLOAT = onnx.TensorProto.FLOAT


def plain(graph: onnx.GraphProto) -> bytes:
    """Serialised, and an empty domain that is written out is one that is left out."""
    text = str(graph)
    return re.sub(r"^ *domain: \"\"\n", "", text, flags=re.MULTILINE).encode()


def is_unchanged(source: onnx.ModelProto, result: onnx.ModelProto) -> bool:
    return plain(source.graph) == plain(result.graph) and len(source.functions) == len(result.functions)


def test_the_files_are_there() -> None:
    kinds = Counter(path.relative_to(DATA).parts[0] for path in FILES)
    assert set(kinds) == {"light", "simple", "pytorch-operator", "pytorch-converted"} and len(FILES) > 100


def test_models_without_batch_norms_stay_as_they_are() -> None:
    changed, seen = [], 0
    for path in FILES:
        source = onnx.load(path)
        result = fold(path, verify=False)
        if not result.report.changed:
            seen += 1
            if not is_unchanged(source, to_proto(result.model)):
                changed.append(path.name)
    assert changed == []
    assert seen > 100


LIGHT = ["densenet121", "inception_v2", "resnet50", "shufflenet"]


@pytest.mark.parametrize("name", LIGHT)
def test_networks_give_what_the_package_says(name: str) -> None:
    """Their weights are made in the graph; the output for one image is in the package."""
    source = onnx.load(DATA / f"light/light_{name}.onnx")
    result = fold(source, verify=False)
    folded = to_proto(result.model)
    assert len(result.report.folded) > 40
    assert batch_norms(folded) < batch_norms(source)
    (image,) = [value for value in source.graph.input if value.name not in {it.name for it in source.graph.initializer}]
    shape = [dim.dim_value for dim in image.type.tensor_type.shape.dim]
    # As the package's own test makes it.
    data = np.linspace(0, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    for seed, feed in enumerate((data, np.random.default_rng(0).standard_normal(shape).astype(np.float32))):
        (got,), (before,) = (run(model, {image.name: feed}) for model in (folded, source))
        assert_near(got, before)
        if seed == 0:
            recorded = onnx.TensorProto.FromString((DATA / f"light/light_{name}_output_0.pb").read_bytes())
            expected = onnx.numpy_helper.to_array(recorded)
            np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=2e-3, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class Sandwich:
    """A node case of which input `data` is fed and all others are constants, with what stands around it."""

    case: Any
    data: int

    def models(self) -> Iterator[tuple[str, onnx.ModelProto, dict[str, np.ndarray]]]:
        source = self.case.model
        versions = [it.version for it in source.opset_import if it.domain == ""]
        feeds = list(self.case.data_sets[0][0]) if self.case.data_sets else []
        feeds = [onnx.numpy_helper.to_array(it) if isinstance(it, onnx.TensorProto) else it for it in feeds]
        if not versions or versions[0] < 7 or self.data >= len(feeds) or len(feeds) != len(source.graph.input):
            return
        if not all(isinstance(it, np.ndarray) for it in feeds) or feeds[self.data].dtype != np.float32:
            return
        x, inside = feeds[self.data], channels_of(feeds[self.data].shape)
        outside = channels_of(shape_of(source.graph.output[0]))
        name, result = source.graph.input[self.data].name, source.graph.output[0].name
        if name == result:
            return
        for place in ("after", "before"):
            if (outside if place == "after" else inside) is None:
                continue
            proto = onnx.ModelProto()
            proto.CopyFrom(source)
            proto.ir_version = 10
            graph = proto.graph
            for index, (value, array) in enumerate(zip(source.graph.input, feeds, strict=True)):
                if index != self.data:
                    graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
            del graph.input[:]
            graph.input.append(source.graph.input[self.data])
            nodes, before, after = list(graph.node), [], []
            builder = Builder(graph, positive=self.data == 0)
            if inside is not None:
                rename(nodes, name, name + " mapped", "input")
                make = builder.norm if place == "before" else builder.mix
                before.append(make(name, name + " mapped", x.shape))
            if outside is not None:
                rename(nodes, result, result + " raw", "output")
                rename(nodes, result, result + " raw", "input")
                make = builder.norm if place == "after" else builder.mix
                after.append(make(result + " raw", result, shape_of(source.graph.output[0])))
            del graph.node[:]
            graph.node.extend([*before, *nodes, *after])
            yield place, proto, {name: x}


@dataclasses.dataclass
class Builder:
    graph: onnx.GraphProto
    positive: bool
    generator: np.random.Generator = dataclasses.field(default_factory=lambda: np.random.default_rng(0))

    def constant(self, name: str, array: np.ndarray) -> str:
        self.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def norm(self, source: str, target: str, shape: tuple[int, ...]) -> onnx.NodeProto:
        random, count = self.generator, shape[1]
        signs = 1 if self.positive else random.choice([-1, 1], count)
        values = (random.uniform(0.5, 2, count) * signs, *random.normal(size=(2, count)), random.uniform(0.5, 2, count))
        names = [self.constant(f"{target}.{part}", value) for part, value in zip("sbmv", values, strict=True)]
        return onnx.helper.make_node("BatchNormalization", [source, *names], [target], name="norm")

    def mix(self, source: str, target: str, shape: tuple[int, ...]) -> onnx.NodeProto:
        """A product with a square matrix, or a 1x1 convolution."""
        count, rest = shape[1], len(shape) - 2
        weight = self.generator.normal(size=(count, count, *[1] * rest)) / np.sqrt(count)
        names = [self.constant(f"{target}.w", weight)]
        if not rest:
            return onnx.helper.make_node("MatMul", [source, *names], [target], name="mix")
        names.append(self.constant(f"{target}.b", self.generator.normal(size=count)))
        return onnx.helper.make_node("Conv", [source, *names], [target], name="mix")


def channels_of(shape: tuple[int, ...] | None) -> int | None:
    return shape[1] if shape is not None and len(shape) >= 2 and shape[1] > 0 else None


def shape_of(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    tensor = value.type.tensor_type
    if tensor.elem_type != FLOAT or not tensor.HasField("shape"):
        return None
    return tuple(dim.dim_value for dim in tensor.shape.dim)


def rename(nodes: list[onnx.NodeProto], old: str, new: str, side: str) -> None:
    for node in nodes:
        names = getattr(node, side)
        for index, name in enumerate(names):
            if name == old:
                names[index] = new


def evaluate(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[Any]:
    """ONNX Runtime's outputs, or the reference implementation's for an opset that ONNX Runtime does not know yet."""
    try:
        return run(proto, feeds)
    except Exception:
        return onnx.reference.ReferenceEvaluator(proto).run(None, feeds)


def difference(proto: onnx.ModelProto, folded: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> str:
    """What is wrong with the folded model; values that were not finite are not looked at."""
    for one, two in zip(evaluate(proto, feeds), evaluate(folded, feeds), strict=True):
        if not isinstance(one, np.ndarray) or one.dtype != np.float32:
            continue
        if one.shape != two.shape:
            return f"shape {two.shape}, expected {one.shape}"
        finite = np.isfinite(one)
        bound = 4 * tolerances.model("float32", one[finite]).atol
        if not (np.abs(one - two)[finite] <= bound).all():
            return f"differs by {np.abs(one - two)[finite].max():.2g}, allowed {bound:.2g}"
    return ""


# Modules of onnx.backend.test.case.node: operators with a rule, and a few without. All of them take 7 s to import.
SOME = [
    *("add", "averagepool", "batch_normalization", "concat", "conv", "convtranspose", "depthtospace", "div", "dropout",
        "flatten"),
    *("gemm", "globalaveragepool", "globalmaxpool", "identity", "leakyrelu", "matmul", "maxpool", "mul", "pad",
        "prelu"),
    *("reducemean", "relu", "reshape", "resize", "slice", "spacetodepth", "split", "squeeze", "sub", "transpose"),
    *("unsqueeze", "upsample", "gru", "if_", "softmax", "topk"),
]  # fmt: skip
LEAN = 4  # cases of one operator by default


@dataclasses.dataclass
class Tally:
    """Node cases folded alone and between others, folds by operator, and what was wrong."""

    alone: int = 0
    between: int = 0
    folds: Counter[str] = dataclasses.field(default_factory=Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def add(self, case: Any) -> None:
        result = fold(case.model, verify=False)
        self.alone += 1
        if result.report.changed or not is_unchanged(case.model, to_proto(result.model)):
            self.wrong.append(f"{case.name}: changed")
        for data in (0, 1):
            for place, proto, feeds in Sandwich(case, data).models():
                result = fold(proto, verify=False)
                self.between += 1
                if not result.report.folded:
                    continue
                self.folds[operator_of(case)] += 1
                problem = difference(proto, to_proto(result.model), feeds)
                if problem:
                    self.wrong.append(f"{case.name}, input {data}, norm {place}: {problem}")


def operator_of(case: Any) -> str:
    return case.model.graph.node[-1].op_type


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    """ONNX Runtime writes an error for each operator that it lacks."""
    onnxruntime.set_default_logger_severity(4)
    yield
    onnxruntime.set_default_logger_severity(2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # cases with infinities
def test_node_cases() -> None:
    """Alone: unchanged. Between others: right."""
    import onnx.backend.test.case.node as package

    for name in SOME:
        importlib.import_module(f"{package.__name__}.{name}")
    tally, seen = Tally(), Counter[str]()
    for case in package._NodeTestCases:
        seen[operator_of(case)] += 1
        if seen[operator_of(case)] <= LEAN:
            tally.add(case)
    print(tally)
    assert tally.wrong == []
    assert len(tally.folds) >= 26
    assert sum(tally.folds.values()) > 90


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_node_case() -> None:
    from onnx.backend.test.case.node import collect_testcases

    tally = Tally()
    for case in collect_testcases(None):
        tally.add(case)
    print(tally)
    assert tally.wrong == []
    assert tally.alone > 1800 and len(tally.folds) > 25 and sum(tally.folds.values()) > 250
