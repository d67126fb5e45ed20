"""Initializers that are inputs as well: constants where the caller says that nobody overrides them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from bnexport import verify
from bnexport.cli import main
from bnexport.folding import fold, inspect
from tests.support.onnx_text import model, operators, run

NODES = "z = ConvTranspose <strides = [2, 2], kernel_shape = [2, 2]> (x, w:4.5.2.2) n = Norm (z, p:5) y = Relu (n)"
NOTE = "initializers that were inputs as well are constants only: 2, 'w', 'p_v'"


def build(more: str = ", float[4,5,2,2] w, float[5] p_v", **options: int) -> onnx.ModelProto:
    return model(f"g (float[N,4,6,6] x{more}) => (float[N,5,12,12] y) {{ {NODES} }}", **options)


@pytest.fixture
def source() -> onnx.ModelProto:
    return build()


def test_fold(source: onnx.ModelProto) -> None:
    (site,) = fold(source).report.sites
    assert (site.outcome, site.refusals[0].code) == ("kept", "overridable")
    assert "fixed_initializers=True, --fixed-initializers" in site.refusals[0].text
    result = fold(source, fixed_initializers=True)
    assert operators(result.model) == ["ConvTranspose", "Relu"]
    assert [value.name for value in result.model.graph.input] == ["x"]
    assert result.report.notes == (NOTE,)
    verdict = result.report.verification
    assert (verdict.status, [proof.method for proof in verdict.sites]) == ("passed", ["proved"])
    x = np.random.default_rng(0).standard_normal((2, 4, 6, 6), np.float32)
    np.testing.assert_allclose(run(result.model, {"x": x})[0], run(source, {"x": x})[0], rtol=1e-4, atol=1e-5)
    assert [inspect(source, fixed_initializers=fixed).notes for fixed in (False, True)] == [(), (NOTE,)]


def test_verify(source: onnx.ModelProto) -> None:
    """The file of a tool that took these inputs away is compared at their defaults only, unless nobody gives them."""
    other = fold(source, fixed_initializers=True, certificate=False).model
    undecided = verify(source, other)
    assert undecided.status == "not_verified"
    assert "fixed_initializers=True" in undecided.reason
    assert verify(source, other, fixed_initializers=True).passed
    assert verify(source, source, fixed_initializers=True).passed
    wrong = onnx.ModelProto.FromString(other.SerializeToString())
    weight = next(each for each in wrong.graph.initializer if each.name == "w")
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * np.float32(1.01), "w"))
    assert verify(source, wrong, fixed_initializers=True).status == "failed"


def test_before_ir_4_they_have_to_be_inputs() -> None:
    result = fold(build("", opset=8, ir_version=3), fixed_initializers=True)
    assert (result.report.notes, operators(result.model)) == ((), ["ConvTranspose", "Relu"])
    assert fold(build(opset=9, ir_version=4), fixed_initializers=True).report.notes == (NOTE,)


def test_in_the_command_line(source: onnx.ModelProto, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")
    onnx.save(source, first)
    assert main(["fold", first, second, "--fixed-initializers"]) == 0
    assert NOTE in "".join(capsys.readouterr()).replace("\n", " ")
    assert main(["verify", first, second]) == 5
    assert main(["verify", first, second, "--fixed-initializers"]) == 0
    assert main(["inspect", first, "--fixed-initializers"]) == 0
