"""Convolutions and pools. Padding is explicit or automatic, ONNX allows no form with both."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

from tests.forms.case import DATA, Case, Setting

_AUTO = ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]


def conv(setting: Setting) -> Iterator[Case]:
    if not 1 <= setting.dims <= 3:
        return
    channels, dims, is_transposed = setting.shape[1], setting.dims, setting.op_type == "ConvTranspose"
    mixed = [*[1] * (dims - 1), 2]
    choices: dict[str, list[Any]] = {
        "strides": [[2] * dims, mixed],
        "dilations": [[2] * dims] if is_transposed else [[2] * dims, [*[2] * (dims - 1), 1]],
        "pads": [[1] * (2 * dims), [*[1] * dims, *[0] * dims], [0] * (2 * dims)],
        "auto_pad": _AUTO,
        "output_padding": [[0] * dims],
        "output_shape": [[2 * each + 1 for each in setting.shape[2:]]],
    }
    for size in ([1] * dims, [3] * dims, [*[1] * (dims - 1), 3], [*[3] * (dims - 1), 1]):
        for group in (group for group in sorted({1, 2, channels}) if channels % group == 0):
            inputs, outputs = channels, channels // group
            if is_transposed:
                outputs = 4 // (2 if group == 2 else 1)
            base = {"group": group} if group > 1 else {}
            for attributes in _padded_once(setting.each({"kernel_shape": [size], **choices}, base)):
                yield _with_bias(setting, (inputs, outputs, *size), attributes)
            if is_transposed:
                more = {"strides": [2] * dims, "output_padding": [1] * dims, "group": group}
                yield _with_bias(setting, (inputs, 2, *size), more)


def _padded_once(every: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for attributes in every:
        if attributes.get("auto_pad", "NOTSET") != "NOTSET":
            attributes.pop("pads", None)
        yield attributes


def _with_bias(setting: Setting, shape: tuple[int, ...], attributes: dict[str, Any]) -> Case:
    outputs = shape[0] if setting.op_type == "Conv" else shape[1] * attributes.get("group", 1)
    bias = [setting.floats(outputs)] * int(setting.generator.integers(2))
    return Case(attributes, (DATA, setting.floats(*shape), *bias))


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
            **{"auto_pad": _AUTO, "ceil_mode": [0, 1], "count_include_pad": [0, 1], "storage_order": [0, 1]},
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
    pads, dilations = (
        attributes.get(name, default) for name, default in (("pads", [0] * 2 * dims), ("dilations", [1] * dims))
    )
    sizes = [size + pads[axis] + pads[axis + dims] for axis, size in enumerate(setting.shape[2:])]
    windows = [(kernel - 1) * step + 1 for kernel, step in zip(attributes["kernel_shape"], dilations, strict=True)]
    return attributes.get("auto_pad", "NOTSET").startswith("SAME") or all(map(operator.le, windows, sizes))


def plain(setting: Setting) -> Iterator[Case]:
    """No attributes, one operand."""
    yield Case()
