"""Resize and Upsample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.forms.case import DATA, Case, Setting

_COORDINATES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize"]


def upsample(setting: Setting) -> Iterator[Case]:
    for factors in _factors(setting) if setting.rank else []:
        for attributes in setting.each({"mode": ["nearest", "linear"]}):
            if setting.knows("scales"):
                yield Case({**attributes, "scales": factors})
            else:
                yield Case(attributes, (DATA, np.array(factors, np.float32)))


def resize(setting: Setting) -> Iterator[Case]:
    if setting.rank < 2:
        return
    if setting.version < 11:
        yield from upsample(setting)
        return
    coordinates = _COORDINATES + ["tf_half_pixel_for_nn"] * (setting.version < 13)
    choices: dict[str, list[Any]] = {
        "mode": ["nearest", "linear", "cubic"],
        "coordinate_transformation_mode": coordinates + ["half_pixel_symmetric"] * (setting.version >= 19),
        "nearest_mode": ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"],
        **{
            "cubic_coeff_a": [-0.5, -0.75],
            "exclude_outside": [0, 1],
            "extrapolation_value": [0.0, 1.5],
            "antialias": [0, 1],
        },
    }
    for base in ({}, {"mode": "linear"}, {"mode": "cubic"}):
        for attributes in setting.each(choices, base, mixed=12):
            yield from _sized(setting, attributes)


def _sized(setting: Setting, attributes: dict[str, Any]) -> Iterator[Case]:
    """Sizes or scales, of all axes or of some."""
    every = _factors(setting)
    factors = every[setting.generator.integers(len(every))]
    absent = None if setting.version >= 13 else np.zeros(0, np.float32)
    region = np.array([*[0.1] * setting.rank, *[0.9] * setting.rank], np.float32)
    roi = region if attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize" else absent
    sizes = np.array([int(each * factor) for each, factor in zip(setting.shape, factors, strict=True)], np.int64)
    yield Case(attributes, (DATA, roi, np.array(factors, np.float32)))
    yield Case(attributes, (DATA, roi, absent, sizes))
    if not setting.knows("axes"):
        return
    for axes in ([2, 3], [-1, -2], [1], [-1], [3, 1]):
        if max(axes) >= setting.rank or min(axes) < -setting.rank:
            continue
        some = np.array([int(2 * setting.shape[axis]) for axis in axes], np.int64)
        for policy in ("stretch", "not_larger", "not_smaller"):
            more = {**attributes, "axes": axes, "keep_aspect_ratio_policy": policy}
            yield Case(more, (DATA, None, None, some))
        yield Case({**attributes, "axes": axes}, (DATA, None, np.array([2.0] * len(axes), np.float32)))


def _factors(setting: Setting) -> list[list[float]]:
    rank = setting.rank
    factors = [[1.0] * rank]
    factors += [
        [factor if place == axis else 1.0 for place in range(rank)]
        for axis in range(rank)
        for factor in (2.0, 0.5, 1.5)
    ]
    if rank > 2:
        factors += [[1.0, 1.0, *[factor] * (rank - 2)] for factor in (2.0, 3.0, 0.6)] * 4
    return factors
