"""Operators that take a map in their parameters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.forms.case import DATA, Case, Operand, Setting


def of_channels(setting: Setting) -> Iterator[Case]:
    """InstanceNormalization, and GroupNormalization."""
    # The variance of one position is 0, and what ONNX Runtime rounds there is multiplied by 1 / sqrt(epsilon).
    if setting.dims < 1 or np.prod(setting.shape[2:]) == 1:
        return
    channels = setting.shape[1]
    for groups in sorted({1, 2, channels}) if setting.op_type == "GroupNormalization" else (1,):
        if channels % groups == 0:
            for attributes in setting.each({"epsilon": [1e-3], "stash_type": [1]}, {"num_groups": groups}):
                yield Case(attributes, (DATA, *_pair(setting, channels)))


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
            for attributes in setting.each({"epsilon": [1e-3], "stash_type": [1]}, {"axis": axis}):
                yield Case(attributes, (DATA, scale))
                if setting.op_type == "LayerNormalization":
                    yield Case(attributes, (DATA, scale, bias))


def deform_conv(setting: Setting) -> Iterator[Case]:
    if setting.rank != 4 or 0 in setting.shape:
        return
    batch, channels, *sizes = setting.shape
    for size, pad in ((1, 0), (3, 1), (3, 2)):
        for group in sorted({1, 2, channels}):
            if channels % group:
                continue
            choices = {"strides": [[2, 2], [1, 2]], "dilations": [[2, 2], [1, 2]], "kernel_shape": [[size, size]]}
            base = {"group": group, "pads": [pad] * 4}
            for attributes in setting.each({**choices, "offset_group": [1, channels]}, base):
                steps, holes = (attributes.get(name, [1, 1]) for name in ("strides", "dilations"))
                spans = zip(sizes, steps, holes, strict=True)
                behind = [(each + 2 * pad - hole * (size - 1) - 1) // step + 1 for each, step, hole in spans]
                if min(behind) < 1:
                    continue
                moved = attributes.get("offset_group", 1) * size * size
                weight = setting.floats(channels, channels // group, size, size)
                offset = setting.floats(batch, 2 * moved, *behind) * np.float32(0.4)
                mask = setting.floats(batch, moved, *behind)
                yield Case(attributes, (DATA, weight, offset))
                yield Case(attributes, (DATA, weight, offset, setting.floats(channels), mask))


def recurrent(setting: Setting) -> Iterator[Case]:
    if setting.rank != 3 or 0 in setting.shape:
        return
    length, batch, features = setting.shape
    hidden, kind = 2, setting.op_type
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * hidden
    own = {"LSTM": 3, "GRU": 2, "RNN": 1}[kind]
    for direction, count in (("forward", 1), ("reverse", 1), ("bidirectional", 2)):
        choices = {
            "activations": [["LeakyRelu"] * (own * count), ["HardSigmoid"] * (own * count)],
            **{"activation_alpha": [[0.3] * (own * count)], "activation_beta": [[0.4] * (own * count)], "clip": [1.5]},
            **{"input_forget": [1], "linear_before_reset": [1], "layout": [1]},
        }
        for attributes in setting.each(choices, {"hidden_size": hidden, "direction": direction}):
            weights = (setting.floats(count, gates, features), setting.floats(count, gates, hidden))
            yield Case(attributes, (DATA, *weights))
            yield Case(attributes, (DATA, *weights, setting.floats(count, 2 * gates)))
            yield Case(attributes, (DATA, *weights), outputs=2, read=1)
            if "layout" in attributes:
                continue
            states = [setting.floats(count, batch, hidden) for _ in range(2 if kind == "LSTM" else 1)]
            peepholes = [setting.floats(count, 3 * hidden)] if kind == "LSTM" else []
            lengths = np.full(batch, length, np.int32)
            yield Case(attributes, (DATA, *weights, None, lengths, *states, *peepholes))
