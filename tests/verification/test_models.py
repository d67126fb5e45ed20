"""The verifying process: crashes, time limits, files that changed, and ill-conditioned models."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import bnexport.folding.context
from bnexport import verify
from bnexport.errors import VerificationError
from bnexport.folding import FoldResult, fold
from bnexport.model_io import from_proto, load, save
from bnexport.verification.process import PROCESS, ProcessFailure
from tests.support import warm
from tests.support.onnx_text import batch_norm, model, parameters

BODY = "g (float[N,6,H,W] x) => (float[N,8,A,B] y) { z = Conv (x, w)\n y = BatchNormalization (z, p_s, p_b, p_m, p_v) }"
SHAPES = {"w": (8, 6, 3, 3), **batch_norm("p", 8)}


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


@pytest.mark.parametrize(
    ("stage", "number", "status"),
    [
        ("reference", signal.SIGSEGV, "not_verified"),
        ("candidate", signal.SIGSEGV, "failed"),
        ("candidate", signal.SIGKILL, "not_verified"),
    ],
)
def test_a_crash_is_a_result(ends_with: Any, stage: str, number: signal.Signals, status: str) -> None:
    ends_with(stage, f"os.kill(os.getpid(), {number.value})")
    proto = model(BODY, SHAPES)
    result = verify(proto, proto)
    assert result.status == status
    assert f"signal {number.value} ({number.name})" in str(result.reason)
    assert stage in str(result.reason)


def test_an_exception_in_the_process_is_a_result(ends_with: Any) -> None:
    ends_with("candidate", "raise MemoryError('no more')")
    proto = model(BODY, SHAPES)
    result = verify(proto, proto)
    assert (result.status, "MemoryError: no more" in str(result.reason)) == ("not_verified", True)


def test_a_crash_loses_no_run(ends_with: Any, tmp_path: Path) -> None:
    """The reference crashes its engine: the folded model is written, and said to be not verified."""
    ends_with("reference", "os.abort()")
    report = fold(model(BODY, SHAPES), tmp_path / "out.onnx", verify="whole").report
    assert report.verification is not None
    assert report.verification.status == "not_verified"
    assert not report.after.batch_norm
    assert len(load(tmp_path / "out.onnx").graph) == 1


def test_timeout(ends_with: Any) -> None:
    ends_with("reference", "time.sleep(60)")
    proto = model(BODY, SHAPES)
    result = verify(proto, proto, timeout=1.0)
    assert result.status == "not_verified"
    assert "longer than 1 s" in str(result.reason)


def test_the_process_is_kept_and_replaced() -> None:
    proto = model(BODY, SHAPES)
    assert verify(proto, proto).passed
    first = PROCESS._process
    assert verify(proto, proto).passed
    assert PROCESS._process is first
    assert first is not None
    first.kill()
    first.wait()
    assert verify(proto, proto).passed
    assert PROCESS._process is not first


def test_the_process_ends_with_its_parent() -> None:
    code = (
        "from bnexport import verify; from bnexport.verification.process import PROCESS;"
        "import onnx.parser as p, os;"
        "m = p.parse_model('<ir_version: 8, opset_import: [\"\": 17]> g (float[2] x) => (float[2] y) { y = Relu (x) }');"
        "assert verify(m, m).passed; print(PROCESS._process.pid, flush=True); os._exit(0)"
    )
    pid = int(warm.run("-c", code, check=True).stdout)
    for _ in range(600):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the verifying process outlived its parent")


def test_strangers_in_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "ml_dtypes.py").write_text("open('imported', 'w')")
    proto = model(BODY, SHAPES)
    here = os.getcwd()
    os.chdir(tmp_path)
    sys.path.insert(0, "")
    try:
        PROCESS.close()
        assert verify(proto, proto).passed
    finally:
        sys.path.remove("")
        os.chdir(here)
    assert not (tmp_path / "imported").exists()


def test_weights_by_descriptor(tmp_path: Path) -> None:
    """Weights that lie in the model file, and in one beside it, reach the engine as they are."""
    proto = model(BODY, {"w": (64, 6, 11, 11), **batch_norm("p", 64)})
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 64
    save(ir.from_proto(proto), tmp_path / "inside.onnx")
    save(ir.from_proto(proto), tmp_path / "outside.onnx", external_data=True)
    for name in ("inside.onnx", "outside.onnx"):
        assert verify(tmp_path / name, proto).passed
        changed = load(tmp_path / name)
        weight = changed.graph.initializers["w"]
        assert weight.const_value is not None
        weight.const_value = ir.Tensor(weight.const_value.numpy() * np.float32(1.01), name="w")
        assert verify(tmp_path / name, changed).status == "failed"


def test_protocol_over_a_closed_channel() -> None:
    with pytest.raises(ProcessFailure) as caught:
        PROCESS.ask({"reference": None}, [], 30.0)
    assert "ended with code 1" in str(caught.value)


@pytest.mark.parametrize(("version", "status"), [(3, "passed"), (8, "not_verified")])
def test_an_input_with_a_default_that_is_gone(version: int, status: str) -> None:
    """Before IR version 4 each initializer is an input, and constant."""
    first, second = (
        model(
            f"g (float[N,4] x{also}) => (float[N,4] y) {{ y = MatMul (x, m) }}",
            {"m": (4, 4)},
            header=f'<ir_version: {version}, opset_import: ["": 8]>',
        )
        for also in (", float[4,4] m", "")
    )
    second.ir_version = 8
    result = verify(first, second, method="whole")
    assert result.status == status
    assert ("no input 'm'" in result.reason) is (status == "not_verified")
    assert verify(first, first).passed


class TestIllConditioned:
    """A batch norm whose input has |mean| / std in the thousands."""

    @staticmethod
    def example(ratio: float) -> onnx.ModelProto:
        generator = np.random.default_rng(1)
        weight = generator.standard_normal((8, 6, 3, 3)).astype(np.float32)
        std = np.sqrt((weight.astype(np.float64) ** 2).sum((1, 2, 3)))
        values = {
            "w": weight,
            "b": (ratio * std).astype(np.float32),
            "p_s": np.ones(8, np.float32),
            "p_b": generator.standard_normal(8).astype(np.float32),
            "p_m": (ratio * std).astype(np.float32),
            "p_v": (std**2).astype(np.float32),
        }
        body = BODY.replace("Conv (x, w)", "Conv (x, w, b)")
        return model(body, values={**values})

    def test_the_table_refuses_and_float64_accepts(self) -> None:
        result = fold(self.example(3e4)).report.verification
        assert result is not None
        assert result.passed
        assert [output.bound for output in result.outputs] == ["float64"]

    def test_well_conditioned_models_need_no_float64(self) -> None:
        result = fold(self.example(1.0)).report.verification
        assert result is not None
        assert [output.bound for output in result.outputs] == ["table"]

    @pytest.mark.parametrize("wrong", [1.001, 1.00001])
    def test_a_wrong_fold_is_still_found(self, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
        """Scaling the mean by 1 + 1e-5 shifts the output by 0.3 at this ratio; rounding, by 0.002."""
        real = np.float64(wrong)
        proto, candidate = self.example(3e4), from_proto(fold(self.example(3e4), verify=False).model)
        bias = next(v for name, v in candidate.graph.initializers.items() if v.const_value.shape == (8,))  # type: ignore[union-attr]
        exact = bias.const_value.numpy().astype(np.float64)  # type: ignore[union-attr]
        bias.const_value = ir.Tensor((exact + (real - 1) * 3e4).astype(np.float32), name=bias.name)
        result = verify(proto, candidate, method="whole")
        assert result.status == "failed"
        assert "the model in float64" in str(result.reason)
        assert verify(proto, candidate, method="local").status == "failed"

    def test_bounds_of_the_caller_are_kept(self) -> None:
        with pytest.raises(VerificationError):
            fold(self.example(3e4), atol=1e-6)

    def test_a_model_that_is_right_where_the_reference_is_not(self) -> None:
        """At this ratio float32 leaves nothing of the reference's output; the folded model is right by float64."""
        inputs = {"x": np.random.default_rng(0).standard_normal((2, 6, 8, 8)).astype(np.float32)}
        result = fold(self.example(3e7), inputs=inputs).report.verification
        assert result
        (output,) = result.outputs
        assert (output.bound, output.max_abs_diff <= output.atol < 1e-3) == ("float64", True)

    def test_rounding_errors_as_large_as_the_output_decide_nothing(self) -> None:
        """A model that is wrong by less than the reference would pass by the reference's own error."""
        proto, candidate = self.example(3e7), from_proto(fold(self.example(3e7), verify=False).model)
        bias = next(v for name, v in candidate.graph.initializers.items() if v.const_value.shape == (8,))  # type: ignore[union-attr]
        bias.const_value = ir.Tensor(bias.const_value.numpy() + np.float32(0.5), name=bias.name)  # type: ignore[union-attr]
        result = verify(proto, candidate, method="whole")
        assert result.status == "not_verified"
        assert "the network is ill-conditioned on these inputs: the reference itself differs" in str(result.reason)
        assert [(output.passed, output.decided) for output in result.outputs] == [(False, False)]


class TestSmallerInputs:
    """Where the reference's outputs on the first inputs decide nothing, smaller ones are tried."""

    # exp(200 x) is infinite for nearly half of the inputs.
    EXP = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {
        c = Constant <value_float = 200.0> ()
        k = Mul (x, c)
        e = Exp (k)
        z = Conv (e, w)
        y = BatchNormalization (z, p_s, p_b, p_m, p_v) }"""
    NAN = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {
        o = Sub (x, x)
        e = Div (o, o)
        z = Conv (e, w)
        y = BatchNormalization (z, p_s, p_b, p_m, p_v) }"""

    @staticmethod
    def overflow() -> onnx.ModelProto:
        """The Conv overflows, the folded Conv does not."""
        values = parameters(SHAPES)
        values["w"] *= np.float32(1e37) * 8
        values["p_v"] = np.full(8, 1e38, np.float32)
        values["p_m"] *= np.float32(1e19)
        return model(BODY, values=values)

    @staticmethod
    def verification(result: FoldResult) -> tuple[str, float]:
        assert result.report.verification is not None
        return result.report.verification.status, result.report.verification.input_scale

    @pytest.mark.parametrize(("kind", "scale"), [("overflow", 2.0**-3), ("exp", 2.0**-6)])
    def test_they_show_what_infinite_outputs_hide(self, kind: str, scale: float, tmp_path: Path) -> None:
        proto = self.overflow() if kind == "overflow" else model(self.EXP, SHAPES)
        result = fold(proto, tmp_path / "out.onnx")
        assert result.report.folded
        assert self.verification(result) == ("passed", scale)
        assert (tmp_path / "out.onnx").exists()
        again = verify(proto, tmp_path / "out.onnx")
        assert (again.status, again.input_scale) == ("passed", scale)

    def test_a_wrong_fold_is_found_on_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = bnexport.folding.context.scale_small
        monkeypatch.setattr(
            "bnexport.folding.context.scale_small", lambda weight, factor, *rest: real(weight, factor * 1.001, *rest)
        )
        with pytest.raises(VerificationError, match="output 'y': differs by"):
            fold(model(self.EXP, SHAPES), verify="whole")

    @pytest.mark.parametrize("given", [False, True], ids=["random", "given"])
    def test_a_model_that_is_never_finite(self, given: bool, tmp_path: Path) -> None:
        proto = model(self.NAN, SHAPES)
        inputs = {"x": np.ones((1, 6, 5, 5), np.float32)} if given else None
        result = fold(proto, tmp_path / "out.onnx", inputs=inputs, verify="whole")
        assert self.verification(result) == ("not_verified", 1.0)
        reason = str(result.report.verification.reason)  # type: ignore[union-attr]
        assert "'y': the reference has no finite value to compare with; inputs down to 1/4096" in reason
        assert (tmp_path / "out.onnx").exists()
        again = verify(proto, tmp_path / "out.onnx", method="whole")
        assert (again.status, again.passed) == ("not_verified", False)
        # No outputs are needed to prove the fold.
        again = verify(proto, tmp_path / "out.onnx")
        assert (again.status, again.method) == ("passed", "local")

    def test_a_number_where_the_reference_has_none_is_no_difference(self) -> None:
        proto = model("g (float[N,3] x) => (float[N,3] y) { y = Log (x) }")
        other = model("g (float[N,3] x) => (float[N,3] y) { a = Abs (x)\n y = Log (a) }")
        result = verify(proto, other)
        assert result.status == "not_verified"
        assert "values that are NaN or infinite" in str(result.reason)
        assert verify(other, proto).status == "failed"

    @pytest.mark.parametrize("factor", [1.0, 1.5], ids=["right", "wrong"])
    def test_inputs_that_an_output_hardly_shows_decide_nothing(
        self, factor: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only for the smallest inputs is `y` finite; there it is its bias, and wrong weights would pass."""
        body = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {
            c = Constant <value_float = 50000.0> ()
            k = Mul (x, c)
            e = Exp (k)
            o = Sub (e, e)
            f = Add (x, o)
            z = Conv (f, w)
            y = BatchNormalization (z, p_s, p_b, p_m, p_v) }"""
        real = bnexport.folding.context.scale_small
        monkeypatch.setattr(
            "bnexport.folding.context.scale_small", lambda weight, by, *rest: real(weight, by * factor, *rest)
        )
        proto = model(body, {"w": (8, 6, 3, 3), **batch_norm("p", 8)}, values={"p_b": np.full(8, 1e4, np.float32)})
        result = fold(proto, verify="whole").report.verification
        assert result is not None
        assert result.status == "not_verified"
        assert "the reference has no finite value to compare with; inputs down to 1/4096" in str(result.reason)

    def test_they_lessen_rounding_errors(self) -> None:
        """sin(1e5 t): the rounding error of t alone makes 1 % of the output, for t of size 1."""
        body = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {
            z = Conv (x, w)
            t = BatchNormalization (z, p_s, p_b, p_m, p_v)
            r = Relu (t)
            c = Constant <value_float = 100000.0> ()
            k = Mul (r, c)
            y = Sin (k) }"""
        values = {name: np.ones(8, np.float32) for name in ("p_s", "p_v")} | {
            name: np.zeros(8, np.float32) for name in ("p_b", "p_m")
        }
        status, scale = self.verification(fold(model(body, {"w": (8, 6, 3, 3)}, values=values)))
        assert status == "passed"
        assert scale < 1


class TestTypes:
    """The bound is that of the coarsest type in which both models compute."""

    def test_nothing_is_computed_in_the_type_of_a_constant_behind_a_cast(self) -> None:
        narrow = np.random.default_rng(0).standard_normal(8).astype(np.float16)
        body = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) { b = Cast <to = 1> (c)\n z = Conv (x, w, b)
            y = Mul (z, k) }"""
        values = {**parameters({"w": (8, 6, 3, 3)}), "c": narrow}
        first, second = (model(body, values={**values, "k": np.float32(k)}) for k in (1, 1.001))
        assert verify(first, second, method="whole").status == "failed"
        assert verify(first, first, method="whole").passed

    def test_rounding_of_the_candidate_alone_behind_that_of_the_reference(self) -> None:
        """What cancels in the reference has errors as large as a rounding to bfloat16, in a branch that is not the last."""
        body = """g (float[N,4,H,W] x, bool c) => (float[N,4,A,B] y) { s = Add (w, k)\n d = Sub (s, k)\n z = Conv (x, d, b)
            y = If (c) <then_branch = t () => (float[N,4,A,B] a) { BODY },
                else_branch = e () => (float[N,4,A,B] f) { f = Relu (z) }> }"""
        values = {**parameters({"w": (4, 4, 1, 1)}), "k": np.full((4, 4, 1, 1), 1e5, np.float32)}
        values["b"] = np.full(4, 3, np.float32)
        narrow = "h = Cast <to = 16> (z)\n a = Cast <to = 1> (h)"
        first, second = (model(body.replace("BODY", each), values=values) for each in ("a = Identity (z)", narrow))
        verdict = verify(first, second)
        assert verdict.status == "not_verified"
        assert "computes in bfloat16" in verdict.reason
        assert verify(first, first).passed
