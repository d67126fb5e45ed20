"""The models and node cases of the onnx package: as they are where nothing folds, right where something does, no crash."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.reference
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


def test_models_without_batch_norms_stay_as_they_are() -> None:
    kept = [(path, result.model) for path in FILES if not (result := fold(path, verify=False)).report.changed]
    assert [path.name for path, model in kept if not is_unchanged(onnx.load(path), to_proto(model))] == []
    assert len(kept) > 100
    kinds = {path.relative_to(DATA).parts[0] for path in FILES}
    assert kinds == {"light", "simple", "pytorch-operator", "pytorch-converted"}


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
