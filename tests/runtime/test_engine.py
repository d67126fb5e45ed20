"""The door to the engines: what opens, what runs, and one failure."""

import numpy as np
import onnxruntime
import pytest

from bnexport.errors import UnsupportedModelError
from bnexport.model_io import as_model
from bnexport.runtime import engine
from bnexport.runtime.engine import ENGINES, EngineFailure, Serialised
from tests.support.onnx_text import model

X = np.array([-1, 2, 3], np.float32)


def serialised(body: str, **others: str) -> Serialised:
    return Serialised(model(f"g (float[3] x) => (float[K] y) {{ {body} }}").SerializeToString(), **others)


@pytest.mark.parametrize("name", ENGINES)
def test_it_runs_with_what_the_model_knows(name: str) -> None:
    opened = engine.open_as_written(serialised("y = Relu (x)"), engine=name)
    assert opened.name == name
    assert opened.run({"x": X, "unknown": X}, ["y"])[0].tolist() == [0, 2, 3]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    "body", ["y = NoSuchOperator (x)", "c = Constant <value = int64[1] {5}> ()\n y = Reshape (x, c)"]
)
def test_every_failure_is_one(name: str, body: str) -> None:
    with pytest.raises(EngineFailure, match=r"(ONNX Runtime|onnx\.reference) cannot (load|run) it: ") as caught:
        engine.open_as_written(serialised(body), engine=name).run({"x": X}, ["y"])
    assert isinstance(caught.value, UnsupportedModelError)
    assert caught.value.detail
    assert "\n" not in str(caught.value)


def test_a_library_that_is_missing_is_named() -> None:
    missing = serialised("y = mmcv.MMCVSyncBatchNorm (x)", no_library="no library here")
    with pytest.raises(EngineFailure, match=r"; no library here$"):
        engine.open_as_written(missing)


def test_a_model_of_ours_and_its_weights() -> None:
    proto = model("g (float[3] x) => (float[3] y) { y = Mul (x, w) }", values={"w": np.full(3, 2, np.float32)})
    opened = engine.open(as_model(proto))
    assert (opened.inputs, opened.outputs) == (["x"], ["y"])
    assert opened.run({"x": X})[0].tolist() == [-2, 4, 6]


def test_an_alarm_is_no_failure_of_the_engine() -> None:
    with pytest.raises(TimeoutError), engine.failures("ONNX Runtime", "run"):
        raise TimeoutError


def test_options() -> None:
    options = engine.default_options(threads=3, optimised=False)
    assert (options.intra_op_num_threads, options.log_severity_level) == (3, 4)
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert engine.label(ENGINES[0]) == f"onnxruntime {onnxruntime.__version__}"
