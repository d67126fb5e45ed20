"""Resize and Upsample, in each form that says what is resized: what passes through, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.onnx_text import assert_refused, batch_norm, fold_and_check, model, operators

X4 = "float[N,6,H,W] x"
BN = "(z, p_s, p_b, p_m, p_v)"
ALL_AXES = {"f": np.array([1, 1, 2, 2], np.float32)}

# nodes between the convolution (t) and the batch norm (z), opset, constants.
INTO_PRODUCER = {
    "scales": ('z = Resize <mode="cubic"> (t, , f)', 17, ALL_AXES),
    "sizes": ("z = Resize (t, , , s)", 17, {"s": np.array([2, 8, 9, 11])}),
    "axes": ('z = Resize <mode="linear", axes=[2,3]> (t, , f)', 19, {"f": np.array([2, 1.5], np.float32)}),
    "axes-from-the-end": ('z = Resize <mode="linear", axes=[-1]> (t, , f)', 19, {"f": np.array([2], np.float32)}),
    "opset-10": ("z = Resize (t, f)", 10, ALL_AXES),
    "upsample": ("z = Upsample (t, f)", 9, ALL_AXES),
    "upsample-7": ("z = Upsample <scales=[1.0, 1.0, 2.0, 2.0]> (t)", 7, {}),
}


@pytest.mark.parametrize("case", INTO_PRODUCER)
def test_a_batch_norm_behind_a_resize_goes_into_the_convolution(case: str) -> None:
    nodes, opset, values = INTO_PRODUCER[case]
    body = f"g ({X4}) => (float[N,8,A,B] y) {{ t = Conv (x, w)\n {nodes}\n y = BatchNormalization {BN} }}"
    proto = model(body, {"w": (8, 6, 1, 1), **batch_norm("p", 8)}, values=values, opset=opset)
    # The reference implementation knows neither the old forms nor axes from the end: there, the unfolded model is it.
    folded, _ = fold_and_check(proto, oracle=opset >= 17 and case != "axes-from-the-end")
    assert operators(folded) == ["Conv", nodes.split()[2]]


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_a_batch_norm_before_a_resize_goes_into_the_convolution_behind_it(mode: str) -> None:
    nodes = f'z = BatchNormalization (x, p_s, p_b, p_m, p_v)\n r = Resize <mode="{mode}"> (z, , f)\n y = Conv (r, w)'
    proto = model(
        f"g ({X4}) => (float[N,8,A,B] y) {{ {nodes} }}", {"w": (8, 6, 3, 3), **batch_norm("p", 6)}, values=ALL_AXES
    )
    folded, _ = fold_and_check(proto)
    assert operators(folded) == ["Resize", "Conv"]


CROP = 'Resize <mode="linear", coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=3.0>'
REFUSED = {
    "crop": (f"{CROP} (t, roi, f)", 17, {**ALL_AXES, "roi": np.array([0, 0, 0, 0, 1, 1, 1.5, 1.5], np.float32)}, "crop"),
    "channels": ("Resize (t, , f)", 17, {"f": np.array([1, 2, 1, 1], np.float32)}, "axis"),
    "channels-by-size": ("Resize (t, , , s)", 17, {"s": np.array([2, 16, 7, 7])}, "axis"),
    "channels-by-axes": ("Resize <axes=[1]> (t, , f)", 19, {"f": np.array([2], np.float32)}, "axis"),
    "channels-from-the-end": ("Resize <axes=[-3]> (t, , f)", 19, {"f": np.array([2], np.float32)}, "axis"),
    "one-factor-for-all-axes": (
        'Resize <keep_aspect_ratio_policy="not_larger"> (t, , , s)', 19, {"s": np.array([4, 16, 14, 14])}, "axis",
    ),
    "one-factor-although-the-channels-are-asked-to-stay": (
        'Resize <keep_aspect_ratio_policy="not_smaller"> (t, , , s)', 19, {"s": np.array([2, 8, 14, 14])}, "axis",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_mixes_channels_or_writes_other_values_is_refused(case: str) -> None:
    node, opset, values, code = REFUSED[case]
    channels = 8 if case == "crop" else 16
    body = f"g ({X4}) => (float[M,{channels},A,B] y) {{ t = Conv (x, w)\n z = {node}\n y = BatchNormalization {BN} }}"
    shapes = {"w": (8, 6, 1, 1), **batch_norm("p", channels)}
    assert_refused(model(body, shapes, values=values, opset=opset), code)
