"""The sizes of a convolution."""

from __future__ import annotations

import dataclasses

# Forms with one node for each kernel position stop here: a graph should not hold thousands.
MANY_TAPS = 64


@dataclasses.dataclass(frozen=True)
class Geometry:
    """x (N, channels, *extents), g (N, outputs, *plane), dw (outputs, channels / groups, *kernel)."""

    channels: int
    outputs: int
    extents: tuple[int, ...]
    plane: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def spatial(self) -> list[int]:
        return list(range(2, self.rank + 2))
