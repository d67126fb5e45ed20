"""Convolutions and pools. Padding is explicit or automatic, ONNX allows no form with both."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tests.forms.case import DATA, Case, Setting


def conv(setting: Setting) -> Iterator[Case]:
    if not 1 <= setting.dims <= 3:
        return
    channels, dims = setting.shape[1], setting.dims
    for size in ([1] * dims, [3] * dims, [*[1] * (dims - 1), 3], [*[3] * (dims - 1), 1]):
        for group in sorted({1, 2, channels}):
            if channels % group:
                continue
            choices: dict[str, list[Any]] = {
                "kernel_shape": [size],
                "strides": [[2] * dims, [*[1] * (dims - 1), 2]],
                "dilations": [[2] * dims, [*[2] * (dims - 1), 1]],
                "pads": [[1] * (2 * dims), [*[1] * dims, *[0] * dims], [0] * (2 * dims)],
                "auto_pad": ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"],
            }
            for attributes in _padded_once(setting.each(choices, {"group": group} if group > 1 else {})):
                yield from _with_bias(setting, (channels, channels // group, *size), attributes)


def _padded_once(every: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for attributes in every:
        if attributes.get("auto_pad", "NOTSET") != "NOTSET":
            attributes.pop("pads", None)
        yield attributes


def _with_bias(setting: Setting, shape: tuple[int, ...], attributes: dict[str, Any]) -> Iterator[Case]:
    outputs = shape[0] if setting.op_type == "Conv" else shape[1] * attributes.get("group", 1)
    if setting.generator.integers(2):
        yield Case(attributes, (DATA, setting.floats(*shape), setting.floats(outputs)))
    else:
        yield Case(attributes, (DATA, setting.floats(*shape)), words=("bias",))


def conv_transpose(setting: Setting) -> Iterator[Case]:
    if not 1 <= setting.dims <= 3:
        return
    channels, dims = setting.shape[1], setting.dims
    for size in ([1] * dims, [3] * dims, [*[1] * (dims - 1), 3]):
        for group in sorted({1, 2, channels}):
            if channels % group:
                continue
            choices: dict[str, list[Any]] = {
                "kernel_shape": [size],
                "strides": [[2] * dims, [*[1] * (dims - 1), 2]],
                "dilations": [[2] * dims],
                "pads": [[1] * (2 * dims), [*[1] * dims, *[0] * dims]],
                "auto_pad": ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"],
                "output_padding": [[0] * dims],
                "output_shape": [[2 * each + 1 for each in setting.shape[2:]]],
            }
            for attributes in _padded_once(setting.each(choices, {"group": group} if group > 1 else {})):
                yield from _with_bias(setting, (channels, 4 // (2 if group == 2 else 1), *size), attributes)
            more = {"strides": [2] * dims, "output_padding": [1] * dims, "group": group}
            yield from _with_bias(setting, (channels, 2, *size), more)


def pool(setting: Setting) -> Iterator[Case]:
    dims = setting.dims
    # The checker measures a mean element by element.
    if not 1 <= dims <= 3 or (setting.op_type == "AveragePool" and math.prod(setting.shape) > 100):
        return
    for size in ([2] * dims, [3] * dims, [1] * dims, [*[1] * (dims - 1), 2]):
        around = [min(1, each - 1) for each in size]
        choices: dict[str, list[Any]] = {
            "kernel_shape": [size],
            "strides": [[2] * dims, [*[1] * (dims - 1), 2], [3] * dims],
            "dilations": [[2] * dims, [1] * dims],
            "pads": [around * 2, [*around, *[0] * dims], [*[0] * dims, *around]],
            "auto_pad": ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"],
            "ceil_mode": [0, 1],
            "count_include_pad": [0, 1],
            "storage_order": [0, 1],
        }
        for attributes in _padded_once(setting.each(choices, {"kernel_shape": size}, mixed=16)):
            if not _fits(setting, attributes):
                continue
            yield Case(attributes)
            if setting.op_type == "MaxPool" and setting.generator.random() < 0.3:
                yield Case(attributes, outputs=2)


def _fits(setting: Setting, attributes: dict[str, Any]) -> bool:
    """Whether a window fits into the padded data: else ONNX asks for no output, and ONNX Runtime makes one."""
    dims = setting.dims
    pads = attributes.get("pads", [0] * (2 * dims))
    if attributes.get("auto_pad", "NOTSET").startswith("SAME"):
        return True
    dilations = attributes.get("dilations", [1] * dims)
    return all(
        (kernel - 1) * step + 1 <= size + pads[axis] + pads[axis + dims]
        for axis, (size, kernel, step) in enumerate(
            zip(setting.shape[2:], attributes["kernel_shape"], dilations, strict=True)
        )
    )


def plain(setting: Setting) -> Iterator[Case]:
    """No attributes, one operand."""
    yield Case()
