"""Operators that take a map in their parameters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.forms.case import DATA, Case, Operand, Setting


def of_channels(setting: Setting) -> Iterator[Case]:
    """InstanceNormalization, and GroupNormalization with a scale for each channel or, before opset 21, for each group."""
    if setting.dims < 1:
        return
    channels = setting.shape[1]
    if setting.op_type == "InstanceNormalization":
        for epsilon in (None, 1e-3):
            yield Case({} if epsilon is None else {"epsilon": epsilon}, (DATA, *_pair(setting, channels)))
        return
    for groups in sorted({1, 2, channels}):
        if channels % groups == 0:
            size = channels if setting.version >= 21 else groups
            yield Case({"num_groups": groups}, (DATA, *_pair(setting, size)))


def _pair(setting: Setting, *shape: int) -> tuple[Operand, Operand]:
    return setting.floats(*shape), setting.floats(*shape)


def of_last_axes(setting: Setting) -> Iterator[Case]:
    """LayerNormalization and RMSNormalization over the last axes, with a scale of their shape or a smaller one."""
    if setting.rank < 1:
        return
    for axis in range(-setting.rank, setting.rank):
        shape = setting.shape[axis:]
        for own in dict.fromkeys((shape, (1, *shape[1:]), shape[1:], shape[-1:])):
            scale, bias = _pair(setting, *own)
            yield Case({"axis": axis}, (DATA, scale), words=("bias", f"scale {list(own)}"))
            if setting.op_type == "LayerNormalization":
                yield Case({"axis": axis}, (DATA, scale, bias), words=(f"scale {list(own)}",))


def deform_conv(setting: Setting) -> Iterator[Case]:
    if setting.rank != 4 or 0 in setting.shape:
        return
    batch, channels, height, width = setting.shape
    for size, pad in ((1, 0), (3, 1)):
        for group in sorted({1, 2, channels}):
            if channels % group:
                continue
            attributes = {"group": group, "pads": [pad] * 4}
            weight = setting.floats(channels, channels // group, size, size)
            offset = setting.floats(batch, 2 * size * size, height, width) * np.float32(0.4)
            mask = setting.floats(batch, size * size, height, width)
            yield Case(attributes, (DATA, weight, offset), words=("bias",))
            yield Case(attributes, (DATA, weight, offset, setting.floats(channels), mask))


def recurrent(setting: Setting) -> Iterator[Case]:
    if setting.rank != 3 or 0 in setting.shape:
        return
    features, hidden = setting.shape[2], 2
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[setting.op_type] * hidden
    for direction, count in (("forward", 1), ("reverse", 1), ("bidirectional", 2)):
        attributes = {"hidden_size": hidden, "direction": direction}
        weights = (setting.floats(count, gates, features), setting.floats(count, gates, hidden))
        yield Case(attributes, (DATA, *weights), words=("bias",))
        yield Case(attributes, (DATA, *weights, setting.floats(count, 2 * gates)))
        yield Case(attributes, (DATA, *weights), outputs=2, read=1, words=("last state",))
