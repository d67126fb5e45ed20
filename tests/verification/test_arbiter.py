"""The one judge and its arbiter, the model in float64: believed where it is right, and never against what inputs show."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference.op_run import OpRun

from bnexport import verify
from bnexport.errors import UnsupportedModelError, VerificationError
from bnexport.folding import fold
from bnexport.graph import onnx_reference
from bnexport.runtime.engine import Serialised, failures
from bnexport.verification import oracle
from bnexport.verification.comparison import SCALES, compare_output, compare_with_truth, is_same
from bnexport.verification.file_job import FileJob
from bnexport.verification.inputs import FeedGroup
from bnexport.verification.judge import Rules, judge
from bnexport.verification.oracle import PreciseModel
from bnexport.verification.verdict import Verification
from tests.support.onnx_text import array_of, model, with_arrays

LAYERS = "g (float[N,4,H,W] x) => (float[N,4,A,B] y) { c = Conv (x, w:4.4.3.3) b = Norm (c, p:4) y = Relu (b) }"


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax", "Hardmax"])
def test_the_default_axis_of_another_opset(name: str) -> None:
    body = f"g (float[N,4,5] x) => (float[N,4,5] y) {{ y = {name} (x) }}"
    along = body.replace("(x)", "<axis = 2> (x)")
    assert verify(model(body, opset=11), model(body, opset=13)).status == "failed"
    assert verify(model(along, opset=11), model(body, opset=13)).passed


@pytest.mark.parametrize("opset", [9, 11, 13, 15])
def test_wrong_weights_in_every_opset_of_batch_norm(opset: int) -> None:
    proto = model(LAYERS, opset=opset, values={"p_m": np.full(4, 9, np.float32)})
    wrong = with_arrays(proto, {"w": array_of(proto, "w") * np.float32(1.01)})
    assert verify(proto, wrong, method="whole").status == "failed"
    assert verify(proto, proto, method="whole").passed


def test_a_difference_is_not_outvoted_by_smaller_inputs() -> None:
    """Where inputs are small, every gate is one half, whatever pooled its input."""
    body = """g (float[N,4,H,W] x) => (float[N,4,H,W] y) {{ c = Conv (x, w:4.4.1.1)
        b = BatchNormalization <momentum = 0.999> (c, s, z, z, v) r = Relu (b) p = {} (r) q = Conv (p, u:4.4.1.1)
        k = Sigmoid (q) y = Mul (r, k) }}"""
    numbers = {name: np.full(4, value, np.float32) for name, value in (("s", 1e-3), ("z", 0), ("v", 1e-6))}
    average, largest = (
        model(body.format(f"Global{name}Pool"), opset=11, values=numbers) for name in ("Average", "Max")
    )
    result = verify(average, largest, method="whole")
    assert (result.status, result.input_scale) == ("failed", 1.0)


def test_nor_where_another_output_is_infinite() -> None:
    """exp(1000 x) is infinite, so that smaller inputs are tried: for those the two pools of 1 + x agree."""
    body = """g (float[N,4,H,W] x) => (float[N,4,A,B] y, float[N,4,H,W] e) {{ k = Constant <value_float = 1000.0> ()
        l = Mul (x, k) e = Exp (l) o = Constant <value_float = 1.0> () q = Mul (x, x) r = Mul (q, q) t = Add (o, r)
        y = {} (t) }}"""
    result = verify(model(body.format("GlobalAveragePool")), model(body.format("GlobalMaxPool")))
    assert (result.status, result.input_scale) == ("failed", 1.0)
    assert result.reason.startswith("output 'y'")


# onnx.reference is believed where it agrees with ONNX Runtime on the reference model.


def doubt(proto: onnx.ModelProto) -> tuple[str, list[str]]:
    """Return why it is not believed, and the operators on which both agreed."""
    feeds, agreed = {"x": np.random.default_rng(0).standard_normal((2, 4, 6, 6))}, set[oracle.Form]()
    oracle.retype(proto, onnx.TensorProto.DOUBLE)
    values = onnx_reference.MendedEvaluator(proto).run(None, feeds, intermediate=True)
    return oracle.find_doubt(proto, values, agreed), sorted(form[1] for form in agreed)


def test_right_operators() -> None:
    """Also where a body reads outer values, and an ill-conditioned one, of which random numbers show that it is right."""
    assert doubt(model(LAYERS, opset=11)) == ("", ["BatchNormalization", "Conv", "Relu"])
    far = {"far": np.float32(1e8), "p_m": np.full(4, 1e8, np.float32), "to": np.float32([1, 1, 2, 2])}
    assert doubt(model("g (float[N,4,6,6] x) => (y) { f = Add (x, far) y = Norm (f, p:4) }", values=far))[0] == ""
    assert doubt(model('g (float[N,4,6,6] x) => (y) { y = Resize <mode = "linear"> (x, , to) }', values=far))[0] == ""
    body = """g (float[N,4,H,W] x) => (float[N,4,H,W] y) { t = Constant <value = bool {1}> () s = Mul (x, x)
        y = If (t) <then_branch = a () => (float[N,4,H,W] u) { u = Add (x, s) },
                    else_branch = b () => (float[N,4,H,W] v) { v = Sub (x, s) }> }"""
    assert doubt(model(body)) == ("", ["If", "Mul"])


def test_a_wrong_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Relu(OpRun):
        def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
            return (np.abs(x),)

    monkeypatch.setattr(onnx_reference, "MENDED", (*onnx_reference.MENDED, Relu))
    reason = "onnx.reference is not believed for Relu of opset 17: it differs from ONNX Runtime: "
    assert doubt(model(LAYERS))[0].startswith(reason)
    monkeypatch.delattr("signal.setitimer")  # not every system has alarms
    precise = PreciseModel(Serialised(model(LAYERS).SerializeToString()), 30.0)
    with pytest.raises(UnsupportedModelError, match="not believed for Relu"):
        precise.run([{"x": np.ones((1, 4, 5, 5), np.float32)}], ["y"])
    monkeypatch.setattr(oracle, "LARGEST_BYTES", 0)
    with pytest.raises(UnsupportedModelError, match="too large to be run in float64"):
        precise.run([], [])


@pytest.mark.parametrize("opset", [9, 11, 13, 17])
def test_float64_models_are_judged_by_it(opset: int) -> None:
    """ONNX Runtime has no Conv of float64; it has one of float32 to compare each operator with."""
    proto = model(LAYERS.replace("float[", "double["), opset=opset, dtype="float64")
    result = fold(proto, verify="whole").report.verification
    assert result and result.engine.startswith("onnx.reference")
    assert verify(proto, proto, method="whole", providers=["cpu"]).status == "not_verified"  # which it does not have


@pytest.mark.parametrize("wrong", [1.0, 2.0], ids=["right", "wrong"])
def test_without_another_engine_nothing_is_verified(wrong: float) -> None:
    """ONNX Runtime has no Momentum."""
    header = '<ir_version: 8, opset_import: ["": 17, "ai.onnx.preview.training": 1]>'
    body = """g (float r, int64 t, float[4] x, float[4] d, float[4] v) => (float[4] y, float[4] z) {{
        y, z = ai.onnx.preview.training.Momentum
            <alpha = {}, beta = 0.1, norm_coefficient = 0.1, mode = "standard"> (r, t, x, d, v) }}"""
    result = verify(*(model(body.format(alpha), header=header) for alpha in (0.5, 0.5 * wrong)))
    assert result.status == "not_verified"
    assert "onnx.reference is not believed for ai.onnx.preview.training:Momentum" in result.reason


@pytest.mark.parametrize("library", [True, False])
def test_a_candidate_that_an_engine_need_not_run(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a library that is not there, or onnx.reference, which alone runs a Conv of float64, lacks an operator."""
    monkeypatch.setenv("BNEXPORT_LIBRARY", "/nowhere")
    kind = "mmcv.MMCVSyncBatchNorm <training_mode=0> (x, p_m, p_v, p_s, p_b)" if library else "com.microsoft.Gelu (c)"
    header = '<ir_version: 8, opset_import: ["": 17, "mmcv": 1, "com.microsoft": 1]>'
    body = LAYERS.replace("Relu (b)", "{}").replace("float[", "float[" if library else "double[")
    dtype = "float32" if library else "float64"
    pair = [model(body.replace("{}", each), header=header, dtype=dtype) for each in ("Relu (b)", kind)]
    assert verify(*pair, method="whole").status == "not_verified"


def test_the_values_of_a_selection_have_no_rounding_error() -> None:
    """Indices that differ from those of float64 by 3 do not allow a candidate to differ by 12."""
    reference, candidate, truth = ([np.array([value])] for value in (0, 9, 3))
    failed = compare_output("y", reference, candidate, "float32")
    assert compare_with_truth(failed, reference, candidate, truth) is failed


Function = Callable[[np.ndarray], Any]
X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


class Engine:
    """Runs a function of one input."""

    name = "function"

    def __init__(self, function: Function) -> None:
        self.function = function
        self.largest: list[float] = []

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        x = np.asarray(feeds["x"])
        self.largest.append(float(np.abs(x).max()))
        with failures(self.name, "run"), np.errstate(all="ignore"):
            return [self.function(x)]

    def exact(self, feeds: Sequence[Mapping[str, Any]], outputs: Sequence[str]) -> list[list[Any]]:
        return [[self.function(np.asarray(feed["x"], np.float64))] for feed in feeds]


def compare(reference: Function, candidate: Function, x: Any = X, **rules: Any) -> tuple[Verification, Engine]:
    first, second = Engine(reference), Engine(candidate)
    group = FeedGroup([{"x": x}], [first.run({"x": x}, ["y"])])
    return judge(first, second, [group], Rules(["y"], **rules)), second


def overflowing(factor: float) -> Function:
    """A multiple of x, and a number that is infinite for the first inputs alone."""
    return lambda x: (factor * x + np.exp(800 * np.abs(x).max()).astype(x.dtype) * 1e-30).astype(x.dtype)


@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["array", "tensor"])
def test_smaller_inputs_decide(make: Callable[[np.ndarray], Any]) -> None:
    """Arrays and tensors alike; what differs there has failed."""
    verdict, candidate = compare(overflowing(2.0), overflowing(2.0), make(X))
    assert (verdict.status, verdict.input_scale) == ("passed", SCALES[1])
    assert candidate.largest[-1] == pytest.approx(SCALES[1] * np.abs(X).max())
    assert compare(overflowing(2.0), overflowing(2.1), make(X))[0].status == "failed"


def test_smaller_inputs_decide_where_some_numbers_are_infinite() -> None:
    def partly(x: np.ndarray) -> np.ndarray:
        return np.where(np.abs(x) > 1, np.inf, x).astype(x.dtype)

    verdict, _ = compare(partly, partly)
    assert verdict.passed and verdict.input_scale < 1


def test_a_truth_that_does_not_run_leaves_the_bound() -> None:
    def one(x: np.ndarray) -> np.ndarray:
        if x.dtype == np.float64:
            raise UnsupportedModelError("no float64")
        return x

    assert compare(one, lambda x: x * np.float32(1.1))[0].status == "failed"


def test_another_number_of_outputs_is_an_error() -> None:
    engine = Engine(np.abs)
    for names, count in ((["y", "z"], 2), (["y"], 0)):
        group = FeedGroup([{"x": X}], [[X] * count])
        with pytest.raises(VerificationError, match=f"the exported model returns 1 tensors, torch {count}"):
            judge(engine, engine, [group], Rules(names))


def test_small_columns_have_no_bound_of_the_caller() -> None:
    one, other = (np.float32([1e4, small, 1, 1, 1, 1, 1, 1]) for small in (1, 1.01))
    for bound, status in (({}, "failed"), ({"atol": 0.1}, "passed"), ({"rtol": 0.5}, "passed")):
        assert compare(lambda x: one * (abs(x) + 1), lambda x: other * (abs(x) + 1), **bound)[0].status == status


def test_a_model_that_does_not_run_again_draws_no_random_numbers() -> None:
    """Then a difference stays one."""

    def refuses(x: np.ndarray) -> np.ndarray:
        raise ValueError("not again")

    job, turns = object.__new__(FileJob), types.SimpleNamespace(close=lambda: None)
    job._rules = Rules(["y"])  # type: ignore[assignment]
    group = FeedGroup([{"x": X}], [[np.abs(X)]])
    assert not job._is_random(turns, Engine(refuses), group, ["y"])  # type: ignore[arg-type]
    assert job._is_random(turns, Engine(lambda x: x), group, ["y"])  # type: ignore[arg-type]


def test_outputs_are_the_same_array_by_array() -> None:
    x, nan = np.arange(3.0), np.full(3, np.nan)
    for one, two in ((x, x), (nan, nan), ([x, nan], (x, nan)), ({1: x}, {1: x}), ([{"a": x}], [{"a": x}])):
        assert is_same(one, two)
    others = [(x, nan), (x, [x]), ([x], {0: x}), ([x], [x, x]), ({1: x}, {2: x}), (x, x.astype("f4")), ([], [[]])]
    for one, two in others:
        assert not is_same(one, two) and not is_same(two, one)
