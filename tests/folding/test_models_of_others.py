"""The models and node cases of the onnx package: as they are where nothing folds, right where something does, no crash."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.reference
import onnxruntime
import pytest

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


@pytest.fixture
def _silent() -> Iterator[None]:
    """ONNX Runtime writes an error for each operator that it lacks."""
    onnxruntime.set_default_logger_severity(4)
    yield
    onnxruntime.set_default_logger_severity(2)


@pytest.mark.slow
@pytest.mark.usefixtures("_silent")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # cases with infinities
def test_node_cases_stay_as_they_are() -> None:
    """Single operators hold no batch norm. Between others they are in tests/forms."""
    from onnx.backend.test.case.node import collect_testcases

    cases, wrong = list(collect_testcases(None)), []
    for case in cases:
        result = fold(case.model, verify=False)
        if result.report.changed or not is_unchanged(case.model, to_proto(result.model)):
            wrong.append(case.name)
    assert wrong == []
    assert len(cases) > 1800
