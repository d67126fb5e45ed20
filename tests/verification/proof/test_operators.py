"""Operators between a linear one and a batch norm: right folds are proved, those of another form are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from bnexport import verify
from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.claims import prove_claims
from tests.support.onnx_text import batch_norm, model

CONV = {"w": (4, 4, 1), **batch_norm("p", 4)}
NORM = "BatchNormalization ({}, p_s, p_b, p_m, p_v)"


def behind(form: str, first: str = "Conv (x, w)", declared: str = "N,4,S", **options: Any) -> onnx.ModelProto:
    """An operator that makes z, `form` of z, a batch norm."""
    return model(
        f"g (float[{declared}] x) => (float[] y) {{ z = {first} r = {form} y = {NORM.format('r')} }}", CONV, **options
    )


def test_a_global_maximum_of_rank_3_is_proved() -> None:
    """onnx.reference takes it over the channels."""
    source = behind("GlobalMaxPool (z)", values={"p_s": np.array([0.5, 1.0, 2.0, 3.0], np.float32)})
    result = fold(source, verify=False)
    assert result.report.changed
    assert prove_claims(source, result.model, result.report).status == "passed"
    assert verify(source, result.model, method="local").status == "passed"


def test_a_fold_behind_an_operator_of_an_old_opset_is_proved() -> None:
    source = behind("Upsample <scales=[1.0, 1.0, 2.0]> (z)", opset=7)
    result = fold(source, verify=False)
    assert result.report.changed
    assert verify(source, result.model, method="local").status == "passed"


def test_a_product_of_sizes_that_may_differ_is_proved() -> None:
    """A free size is not known to be that of the other factor, which is the same in both."""
    source = model(
        f"g (float[N,4,S] x, float[4,3] f) => (float[] y) {{ z = Conv (x, w) r = Mul (z, f) y = {NORM.format('r')} }}",
        CONV,
    )
    result = fold(source, verify=False)
    assert result.report.changed
    assert prove_claims(source, result.model, result.report).status == "passed"
    assert verify(source, result.model, method="local").status == "passed"


@pytest.mark.parametrize(
    ("mine", "theirs", "declared"),
    [
        ("Slice <starts=[-2], ends=[9223372036854775807], axes=[0]> (z)", "Identity (z)", "N,4,4"),
        ("Slice <starts=[0], ends=[6], axes=[2]> (z)", "Identity (z)", "2,4,S"),
        (
            "Slice <starts=[0], ends=[3], axes=[2]> (z)",
            "Slice <starts=[-2], ends=[99999999999], axes=[2]> (z)",
            "2,4,3",
        ),
        (
            'Pad <mode="edge", pads=[1, 0, 0, 1, 0, 0]> (z)',
            'Pad <mode="reflect", pads=[1, 0, 0, 1, 0, 0]> (z)',
            "N,4,4",
        ),
        ("Transpose <perm=[2, 1, 0]> (z)", "Identity (z)", "N,4,S"),
        ("ReduceMean <axes=[0, 2]> (z)", "ReduceMean <axes=[2]> (z)", "N,4,3"),
    ],
    ids=["slice of the batch", "slice of a free size", "two slices", "pads", "transpose", "mean"],
)
def test_another_form_is_not_proved(mine: str, theirs: str, declared: str) -> None:
    """There are sizes at which both are equal."""
    source, other = (behind(form, "Identity (x)", declared, opset=9) for form in (mine, theirs))
    result = fold(source, verify=False)
    candidate = fold(other, verify=False).model
    assert prove_claims(source, candidate, result.report).status != "passed"
    assert verify(source, candidate, method="local").status != "passed"


@pytest.mark.parametrize(
    ("form", "size"),
    [("dilations=[2], pads=[1,1]", "1"), ("dilations=[2], pads=[1,1]", "S"), ("pads=[0,2]", "4"), ("pads=[2,0]", "4")],
)
@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
def test_a_map_is_not_moved_over_a_window_of_padding_alone(kind: str, form: str, size: str) -> None:
    pool = f"{kind} <kernel_shape=[2], {form}>"
    values = {"p_s": np.array([0.5, 1.0, 2.0, 3.0], np.float32)}
    declared, norm = f"N,4,{size}", NORM.format("z")
    source = behind(f"{pool} (z)", "Identity (x)", declared, opset=19, values=values)
    swapped = model(
        f"g (float[{declared}] x) => (float[] y) {{ z = Identity (x) r = {norm} y = {pool} (r) }}",
        CONV,
        opset=19,
        values=values,
    )
    assert verify(source, swapped, method="local").status != "passed"


@pytest.mark.parametrize("automatic", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_automatic_padding_of_dilated_means_is_undecided(automatic: str) -> None:
    """onnx.reference places the windows in another way than ONNX Runtime."""
    pool = f'AveragePool <auto_pad="{automatic}", kernel_shape=[3], dilations=[2]> (z)'
    source = behind(pool, declared="2,4,8", opset=19)
    result = fold(source, verify=False)
    assert result.report.changed
    assert prove_claims(source, result.model, result.report).status == "not_verified"


def test_cubic_weights_are_not_those_of_float32() -> None:
    """onnx.reference rounds them, so that they do not sum to 1."""
    source = behind(
        'Resize <mode="cubic"> (z, , , s)', declared="2,4,7", opset=13, values={"s": np.array([2, 4, 10], np.int64)}
    )
    result = fold(source, verify=False)
    assert prove_claims(source, result.model, result.report).status == "passed"


def test_a_resize_to_nothing_is_not_refuted() -> None:
    sizes = np.array([0, 4, 3], np.int64)
    source = behind("Resize (z, , , s)", declared="0,4,5", opset=13, values={"s": sizes})
    result = fold(source, verify=False)
    assert prove_claims(source, result.model, result.report).status != "failed"


def test_a_map_of_no_elements_is_not_refuted() -> None:
    source = model(
        f"g (float[0,4] x) => (float[] y) {{ z = {NORM.format('x')} r = Mul (c, z)"
        " y = BatchNormalization (r, q_s, q_b, q_m, q_v) }",
        {**batch_norm("p", 4), **batch_norm("q", 4)},
        values={"c": np.zeros((0, 4), np.float32)},
    )
    result = fold(source, verify=False)
    assert result.report.changed
    assert verify(source, result.model, method="local").status != "failed"


def test_equal_maps_side_by_side_are_proved() -> None:
    body = """g (float[N,4,H,W] a, float[N,4,H,W] b) => (float[N,8,A,B] y) {
        z = BatchNormalization (a, p_s, p_b, p_m, p_v) u = BatchNormalization (b, p_s, p_b, p_m, p_v)
        t = Concat <axis = 1> (z, u) y = Conv (t, w) }"""
    result = fold(model(body, {"w": (8, 8, 3, 3), **batch_norm("p", 4)}), verify="local")
    assert [site.method for site in result.report.verification.sites] == ["proved", "proved"]


def test_a_shift_does_not_pass_windows_beyond_the_end() -> None:
    """Engines have counted them in several ways: a fold with ceil_mode is left to a run."""
    source = behind("AveragePool <kernel_shape=[2], strides=[2]> (z)", opset=19)
    candidate = to_proto(fold(source, verify=False).model)
    assert verify(source, candidate, method="local").passed
    for proto in (source, candidate):
        (pool,) = (node for node in proto.graph.node if node.op_type == "AveragePool")
        pool.attribute.add().CopyFrom(onnx.helper.make_attribute("ceil_mode", 1))
    assert verify(source, candidate, method="local").status == "not_verified"


@pytest.mark.parametrize(("share", "status"), [(5, "passed"), (1, "failed")])
def test_a_shift_is_added_as_often_as_there_are_elements(share: int, status: str) -> None:
    shapes, axes = {"w": (4, 4, 1)}, np.array([2])
    k = np.arange(1, 5, dtype=np.float32)
    text = "g (float[N,4,5] x) => (float[N,4,1] y) {{ z = Conv ({}) {} }}"
    source = model(
        text.format("x, w", "r = ReduceSum (z, axes) y = Add (r, k)"), shapes, values={"axes": axes, "k": k[:, None]}
    )
    candidate = model(text.format("x, w, c", "y = ReduceSum (z, axes)"), shapes, values={"axes": axes, "c": k / share})
    assert verify(source, candidate, method="local").status == status


@pytest.mark.parametrize(("factor", "status"), [(0.25, "passed"), (4.0, "failed")])
def test_a_factor_passes_a_divisor_as_its_inverse(factor: float, status: str) -> None:
    text = "g (float[N,4,S] x) => (float[N,4,S] y) {{ z = Conv (x, w) u = Conv (x, v) {} }}"
    values = {"w": np.ones((4, 4, 1), np.float32), "v": np.full((4, 4, 1), 3, np.float32)}
    source = model(text.format("q = Div (z, u) y = Mul (q, k)"), values={**values, "k": np.full((4, 1), 4, np.float32)})
    moved = model(text.format("y = Div (z, u)"), values={**values, "v": values["v"] * np.float32(factor)})
    assert verify(source, moved, method="local").status == status
