"""Number of windows of torch's pooling, and the padding with which ONNX has as many."""

from __future__ import annotations

from collections.abc import Sequence


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Return torch's number of windows: with ceil_mode, a window that would start in the end padding is left out."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return room // stride + 1
    windows = -(-room // stride) + 1
    return windows - 1 if (windows - 1) * stride >= size + padding else windows


def end_padding(
    extents: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return the end padding of each dimension with which rounding down gives torch's number of windows in ceil_mode.

    Runtimes and versions of ONNX disagree on which windows ceil_mode leaves out; this says it.
    """
    ends = []
    for size, k, s, p, d in zip(extents, kernel, stride, padding, dilation):
        windows = output_size(size, k, s, p, d, True)
        ends.append(max(0, (windows - 1) * s + d * (k - 1) + 1 - size - p))
    return ends
