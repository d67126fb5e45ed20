"""The verifying process: crashes, time limits, files that changed, and ill-conditioned models."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import bnexport.folding.context
from bnexport import verify
from bnexport.errors import UsageError, VerificationError
from bnexport.folding import fold
from bnexport.model_io import load, save, to_proto
from bnexport.verification.process import PROCESS, EngineProcess, ProcessFailure
from tests.support import warm
from tests.support.onnx_text import array_of, model, parameters, with_arrays

BODY = "g (float[N,6,H,W] x) => (float[N,8,A,B] y) {{ {} y = Norm (z, p:8) }}"
NET = BODY.format("z = Conv (x, w:8.6.3.3)")


@pytest.fixture
def ends_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The next verifying process runs a statement before it runs the given stage of its first request."""
    start = "import sys, json, os, signal, time; sys.path[:] = json.loads(sys.argv[1]); from bnexport.verification import file_job\n{}"

    def patch(stage: str, statement: str) -> None:
        PROCESS.close()
        body = f"""
send = file_job.send
def trap(channel, message, descriptors=()):
    send(channel, message, descriptors)
    if message.get("stage") == {stage!r}:
        {statement}
file_job.send = trap
file_job.main(sys.argv[2])"""
        monkeypatch.setattr("bnexport.verification.process._START", start.format(body))

    yield patch
    PROCESS.close()


ENDS = [
    ("reference", "os.kill(os.getpid(), 11)", "not_verified", "signal 11 (SIGSEGV)"),
    ("candidate", "os.kill(os.getpid(), 11)", "failed", "signal 11 (SIGSEGV)"),
    ("candidate", "os.kill(os.getpid(), 9)", "not_verified", "signal 9 (SIGKILL)"),
    ("candidate", "raise MemoryError('no more')", "not_verified", "MemoryError: no more"),
    ("reference", "time.sleep(60)", "not_verified", "longer than 1 s"),
]


@pytest.mark.parametrize(("stage", "statement", "status", "words"), ENDS)
def test_an_end_of_the_process_is_a_result(ends_with: Any, stage: str, statement: str, status: str, words: str) -> None:
    ends_with(stage, statement)
    result = verify(model(NET), model(NET), timeout=1.0 if "sleep" in statement else 60.0)
    assert (result.status, words in result.reason) == (status, True), result
    assert stage in result.reason or "signal" not in words


def test_a_crash_loses_no_run(ends_with: Any, tmp_path: Path) -> None:
    """The reference crashes its engine: the folded model is written, and said to be not verified."""
    ends_with("reference", "os.abort()")
    report = fold(model(NET), tmp_path / "out.onnx", verify="whole").report
    assert (report.verification.status, report.after.batch_norm) == ("not_verified", 0)
    assert len(load(tmp_path / "out.onnx").graph) == 1


def test_the_process_is_kept_and_replaced() -> None:
    assert verify(model(NET), model(NET)).passed
    first = PROCESS._process
    assert first is not None
    assert verify(model(NET), model(NET)).passed
    assert PROCESS._process is first
    first.kill()
    first.wait()
    assert verify(model(NET), model(NET)).passed
    assert PROCESS._process is not first


def test_the_process_ends_with_its_parent() -> None:
    code = (
        "from bnexport import verify; from bnexport.verification.process import PROCESS;"
        "import onnx.parser as p, os;"
        "m = p.parse_model('<ir_version: 8, opset_import: [\"\": 17]> g (float[2] x) => (float[2] y) { y = Relu (x) }');"
        "assert verify(m, m).passed; print(PROCESS._process.pid, flush=True); os._exit(0)"
    )
    status = Path(f"/proc/{int(warm.run('-c', code, check=True).stdout)}/stat")
    for _ in range(600):
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the verifying process outlived its parent")


def test_strangers_in_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ml_dtypes.py").write_text("open('imported', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    PROCESS.close()
    assert verify(model(NET), model(NET)).passed
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("external", [False, True])
def test_weights_by_descriptor(tmp_path: Path, external: bool) -> None:
    """Weights that lie in the model file, or in one beside it, reach the engine as they are."""
    proto = model("g (float[N,6,H,W] x) => (float[N,64,A,B] y) { z = Conv (x, w:64.6.11.11) y = Norm (z, p:64) }")
    save(ir.from_proto(proto), tmp_path / "m.onnx", external_data=external)
    assert verify(tmp_path / "m.onnx", proto).passed
    changed = with_arrays(proto, {"w": array_of(proto, "w") * np.float32(1.01)})
    assert verify(tmp_path / "m.onnx", changed).status == "failed"


def test_protocol_over_a_closed_channel() -> None:
    with pytest.raises(ProcessFailure, match="ended with code 1"):
        PROCESS.ask({"reference": None}, [], 30.0)


def test_no_time_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProcessFailure, match="longer than 0 s"):
        EngineProcess().ask({"reference": None}, [], 0.0)
    monkeypatch.setattr("sys.executable", "")
    with pytest.raises(UsageError, match="no Python executable"):
        EngineProcess().ask({}, [], None)


@pytest.mark.parametrize(("version", "status"), [(3, "passed"), (8, "not_verified")])
def test_an_input_with_a_default_that_is_gone(version: int, status: str) -> None:
    """Before IR version 4 each initializer is an input, and constant."""
    text = "g (float[N,4] x{}) => (float[N,4] y) {{ y = MatMul (x, m:4.4) }}"
    header = f'<ir_version: {version}, opset_import: ["": 8]>'
    first, second = (model(text.format(also), header=header) for also in (", float[4,4] m", ""))
    second.ir_version = 8
    result = verify(first, second, method="whole")
    assert (result.status, "no input 'm'" in result.reason) == (status, status == "not_verified")
    assert verify(first, first).passed


def far(ratio: float) -> onnx.ModelProto:
    """A batch norm whose input has |mean| / std of `ratio`."""
    generator = np.random.default_rng(1)
    weight = generator.standard_normal((8, 6, 3, 3)).astype(np.float32)
    std = np.sqrt((weight.astype(np.float64) ** 2).sum((1, 2, 3)))
    mean, bias = (ratio * std).astype(np.float32), generator.standard_normal(8).astype(np.float32)
    norm = {"p_s": np.ones(8, np.float32), "p_b": bias, "p_m": mean, "p_v": (std**2).astype(np.float32)}
    return model(BODY.format("z = Conv (x, w, b)"), values={"w": weight, "b": mean, **norm})


def shifted(proto: onnx.ModelProto, by: float) -> onnx.ModelProto:
    """The fold of a model, with another bias."""
    folded = to_proto(fold(proto, verify=False).model)
    (bias,) = (tensor.name for tensor in folded.graph.initializer if len(tensor.dims) == 1)
    return with_arrays(folded, {bias: (array_of(folded, bias).astype(np.float64) + by).astype(np.float32)})


@pytest.mark.parametrize(("ratio", "bound"), [(1.0, "table"), (3e4, "float64")])
def test_float64_accepts_what_the_table_refuses(ratio: float, bound: str) -> None:
    result = fold(far(ratio)).report.verification
    assert (result.status, [output.bound for output in result.outputs]) == ("passed", [bound])


@pytest.mark.parametrize("wrong", [1e-3, 1e-5])
def test_a_wrong_fold_is_still_found(wrong: float) -> None:
    """Scaling the mean by 1 + 1e-5 shifts the output by 0.3 at this ratio; rounding, by 0.002."""
    candidate = shifted(far(3e4), wrong * 3e4)
    result = verify(far(3e4), candidate, method="whole")
    assert (result.status, "the model in float64" in result.reason) == ("failed", True)
    assert verify(far(3e4), candidate, method="local").status == "failed"


def test_bounds_of_the_caller_are_kept() -> None:
    with pytest.raises(VerificationError):
        fold(far(3e4), atol=1e-6)


def test_rounding_errors_as_large_as_the_output() -> None:
    """At this ratio float32 leaves nothing of the reference's output; the folded model is right by float64."""
    inputs = {"x": np.random.default_rng(0).standard_normal((2, 6, 8, 8)).astype(np.float32)}
    (output,) = fold(far(3e7), inputs=inputs).report.verification.outputs
    assert (output.bound, output.max_abs_diff <= output.atol < 1e-3) == ("float64", True)
    # One that is wrong by less than the reference would pass by the reference's own error.
    result = verify(far(3e7), shifted(far(3e7), 0.5), method="whole")
    assert result.status == "not_verified"
    assert "the network is ill-conditioned on these inputs: the reference itself differs" in result.reason
    assert [(output.passed, output.decided) for output in result.outputs] == [(False, False)]


# exp(200 x) is infinite for nearly half of the inputs: smaller ones are tried.
EXP = BODY.format("c = Constant <value_float = 200.0> () k = Mul (x, c) e = Exp (k) z = Conv (e, w:8.6.3.3)")
NAN = BODY.format("o = Sub (x, x) e = Div (o, o) z = Conv (e, w:8.6.3.3)")
NOTHING = "the reference has no finite value to compare with; inputs down to 1/4096"


def overflow() -> onnx.ModelProto:
    """The Conv overflows, the folded Conv does not."""
    values = parameters({"w": (8, 6, 3, 3), "p_m": (8,)})
    values = {"w": values["w"] * np.float32(8e37), "p_m": values["p_m"] * np.float32(1e19)}
    return model(NET, values={**values, "p_v": np.full(8, 1e38, np.float32)})


@pytest.mark.parametrize(("proto", "scale"), [(overflow(), 2.0**-3), (model(EXP), 2.0**-6)], ids=["overflow", "exp"])
def test_smaller_inputs_show_what_infinite_outputs_hide(proto: onnx.ModelProto, scale: float, tmp_path: Path) -> None:
    result = fold(proto, tmp_path / "out.onnx").report
    assert result.folded
    for verdict in (result.verification, verify(proto, tmp_path / "out.onnx")):
        assert (verdict.status, verdict.input_scale) == ("passed", scale)


def wrong_folds(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    real = bnexport.folding.context.scale_small
    changed = lambda weight, factor, *rest: real(weight, factor * by, *rest)  # noqa: E731
    monkeypatch.setattr("bnexport.folding.context.scale_small", changed)


def test_a_wrong_fold_is_found_on_smaller_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_folds(monkeypatch, 1.001)
    with pytest.raises(VerificationError, match="output 'y': differs by"):
        fold(model(EXP), verify="whole")


@pytest.mark.parametrize("given", [False, True], ids=["random", "given"])
def test_a_model_that_is_never_finite(given: bool, tmp_path: Path) -> None:
    inputs = {"x": np.ones((1, 6, 5, 5), np.float32)} if given else None
    result = fold(model(NAN), tmp_path / "out.onnx", inputs=inputs, verify="whole").report.verification
    assert (result.status, result.input_scale, f"'y': {NOTHING}" in result.reason) == ("not_verified", 1.0, True)
    assert verify(model(NAN), tmp_path / "out.onnx", method="whole").status == "not_verified"
    # No outputs are needed to prove the fold.
    again = verify(model(NAN), tmp_path / "out.onnx")
    assert (again.status, again.method) == ("passed", "local")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"x": np.ones((1, 5, 5, 5), np.float32)}, r"got float32 \(1, 5, 5, 5\), expected x: float32 \(N, 6, H, W\)"),
        ({"x": np.ones((6, 5, 5), np.float32)}, r"got float32 \(6, 5, 5\), expected x"),
        ({"x": np.ones((1, 6, 5, 5))}, r"got float64 \(1, 6, 5, 5\), expected x"),
        ({"x": "a"}, r"got string \(\), expected x"),
        ({}, "'x' is missing"),
        ({"x": np.ones((1, 6, 5, 5), np.float32), "z": 1}, "got 'z', expected among x"),
    ],
)
def test_inputs_that_a_model_does_not_take(given: dict[str, Any], says: str) -> None:
    """An engine that runs them all the same, as onnx.reference does, is no judge."""
    with pytest.raises(UsageError, match=says):
        verify(model(NAN), model(NAN), inputs=given)


def test_an_input_of_any_rank_takes_what_is_given() -> None:
    proto = model("g (float[] x) => (float[] y) { y = Relu (x) }")
    assert verify(proto, proto, inputs={"x": np.ones((2, 3), np.float32)}).passed
    assert "'x' is no tensor of a known rank; give the inputs" in verify(proto, proto, method="whole").reason


def test_a_number_where_the_reference_has_none_is_no_difference() -> None:
    proto, other = (
        model(f"g (float[N,3] x) => (float[N,3] y) {{ {text} }}") for text in ("y = Log (x)", "a = Abs (x) y = Log (a)")
    )
    result = verify(proto, other)
    assert result.status == "not_verified" and "values that are NaN or infinite" in result.reason
    assert verify(other, proto).status == "failed"


@pytest.mark.parametrize("factor", [1.0, 1.5], ids=["right", "wrong"])
def test_inputs_that_an_output_hardly_shows_decide_nothing(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for the smallest inputs is `y` finite; there it is its bias, and wrong weights would pass."""
    wrong_folds(monkeypatch, factor)
    nodes = "c = Constant <value_float = 50000.0> () k = Mul (x, c) e = Exp (k) o = Sub (e, e) f = Add (x, o)"
    proto = model(BODY.format(f"{nodes} z = Conv (f, w:8.6.3.3)"), values={"p_b": np.full(8, 1e4, np.float32)})
    result = fold(proto, verify="whole").report.verification
    assert (result.status, NOTHING in result.reason) == ("not_verified", True)


def test_smaller_inputs_lessen_rounding_errors() -> None:
    """sin(1e5 t): the rounding error of t alone makes 1 % of the output, for t of size 1."""
    text = BODY.format("z = Conv (x, w:8.6.3.3)").replace("y = Norm", "t = Norm")
    text = text[:-1] + "r = Relu (t) c = Constant <value_float = 100000.0> () k = Mul (r, c) y = Sin (k) }"
    norm = {name: np.full(8, value, np.float32) for name, value in (("p_s", 1), ("p_b", 0), ("p_m", 0), ("p_v", 1))}
    result = fold(model(text, values=norm)).report.verification
    assert result.status == "passed" and result.input_scale < 1


# The bound is that of the coarsest type in which both models compute.


def test_nothing_is_computed_in_the_type_of_a_constant_behind_a_cast() -> None:
    body = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) { b = Cast <to = 1> (c) z = Conv (x, w:8.6.3.3, b)
        y = Mul (z, k) }"""
    narrow = np.random.default_rng(0).standard_normal(8).astype(np.float16)
    first, second = (model(body, values={"c": narrow, "k": np.float32(k)}) for k in (1, 1.001))
    assert verify(first, second, method="whole").status == "failed"
    assert verify(first, first, method="whole").passed


def test_rounding_of_the_candidate_alone_behind_that_of_the_reference() -> None:
    """What cancels in the reference has errors as large as a rounding to bfloat16, in a branch that is not the last."""
    body = """g (float[N,4,H,W] x, bool c) => (float[N,4,A,B] y) {{ s = Add (w:4.4.1.1, k) d = Sub (s, k) z = Conv (x, d, b)
        y = If (c) <then_branch = t () => (float[N,4,A,B] a) {{ {} }},
            else_branch = e () => (float[N,4,A,B] f) {{ f = Relu (z) }}> }}"""
    values = {"k": np.full((4, 4, 1, 1), 1e5, np.float32), "b": np.full(4, 3, np.float32)}
    narrow = "h = Cast <to = 16> (z) a = Cast <to = 1> (h)"
    first, second = (model(body.format(each), values=values) for each in ("a = Identity (z)", narrow))
    verdict = verify(first, second)
    assert verdict.status == "not_verified" and "computes in bfloat16" in verdict.reason
    assert verify(first, first).passed
