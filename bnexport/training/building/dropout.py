"""Dropout with a mask that is a pure function of a seed, the layer's turn and the position.

ONNX's random operators hold their seed as an attribute: a graph with them repeats one mask, or draws
one that nobody can repeat. Here a hash of 32-bit integers makes the bits, so that the same seed gives
the same mask in torch, ONNX Runtime and every other runtime, on any number of threads:

    mix(h)  = h ^ h>>16;  h * 0x21f0aaad;  h ^ h>>15;  h * 0x735a2d97;  h ^ h>>15      (mod 2^32)
    key     = mix(low word of seed ^ mix(high word of seed + golden))
    stream  = mix(key + (layer + 1) * golden)
    bits    = mix(mix(position + stream) ^ key)
    keep    = bits >= p * 2^32

golden = 0x9e3779b9. mix is a bijection with the smallest bias among those that a search over two-round
multiply-xorshift hashes has found (C. Wellons, "Prospecting for hash functions", 2018). `position`
counts elements (whole channels for dropout1d, 2d, 3d) in row-major order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bnexport.errors import UsageError

Tensor = torch.Tensor

GOLDEN = 0x9E3779B9
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97
_WORD = 0xFFFFFFFF
_UINT32 = 12

library = torch.library.Library("bnexport", "FRAGMENT")
library.define("keep_mask(Tensor seed, SymInt[] size, int layer, float p) -> Tensor")


def _mix(h: Tensor) -> Tensor:
    """Mix values below 2^32 in int64; both factors are below 2^31, so that no product overflows."""
    h = ((h ^ (h >> 16)) * _FIRST) & _WORD
    h = ((h ^ (h >> 15)) * _SECOND) & _WORD
    return h ^ (h >> 15)


def _keep_mask(seed: Tensor, size: list[int], layer: int, p: float) -> Tensor:
    key = _mix((seed & _WORD) ^ _mix((((seed >> 32) & _WORD) + GOLDEN) & _WORD))
    stream = _mix((key + (layer + 1) * GOLDEN) & _WORD)
    position = torch.arange(math.prod(size), device=seed.device)
    bits = _mix(_mix((position + stream) & _WORD) ^ key)
    return (bits >= threshold(p)).view(size)


def _keep_mask_fake(seed: Tensor, size: list[int], layer: int, p: float) -> Tensor:
    return seed.new_empty(size, dtype=torch.bool)


library.impl("keep_mask", _keep_mask, "CompositeExplicitAutograd")
torch.library.register_fake("bnexport::keep_mask", _keep_mask_fake, lib=library)
keep_mask = torch.ops.bnexport.keep_mask.default


def threshold(p: float) -> int:
    """Return the bits below which an element is dropped; 0 <= p < 1."""
    return min(round(p * 2.0**32), _WORD)


def _translate(seed: Any, size: Any, layer: int, p: float) -> Any:
    """Translate keep_mask in uint32 arithmetic, which wraps as the formulas do."""

    def word(value: int) -> Any:
        constant: Any = op.Constant(value_int=value)
        return op.Cast(constant, to=_UINT32)

    def shifted(h: Any, count: int) -> Any:
        return op.BitwiseXor(h, op.BitShift(h, word(count), direction="RIGHT"))

    def mix(h: Any) -> Any:
        h = op.Mul(shifted(h, 16), word(_FIRST))
        h = op.Mul(shifted(h, 15), word(_SECOND))
        return shifted(h, 15)

    low = op.Cast(op.BitwiseAnd(seed, op.Constant(value_int=_WORD)), to=_UINT32)
    # Seeds are >= 0, which a session checks: division is the shift.
    high = op.Cast(op.Div(seed, op.Constant(value_int=1 << 32)), to=_UINT32)
    key = mix(op.BitwiseXor(low, mix(op.Add(high, word(GOLDEN)))))
    stream = mix(op.Add(key, word((layer + 1) * GOLDEN & _WORD)))
    shape: Any = size if isinstance(size, ir.Value) else _shape(size)
    indices: Any = op.Range(op.Constant(value_int=0), op.ReduceProd(shape, keepdims=0), op.Constant(value_int=1))
    position = op.Cast(indices, to=_UINT32)
    bits = mix(op.BitwiseXor(mix(op.Add(position, stream)), key))
    return op.Reshape(op.GreaterOrEqual(bits, word(threshold(p))), shape)


def _shape(size: Any) -> Any:
    """Concatenate numbers and 0- or 1-dimensional values to one int64 vector."""
    one: Any = op.Constant(value_ints=[-1])
    parts: list[Any] = [
        op.Constant(value_ints=[part]) if isinstance(part, int) else op.Reshape(part, one) for part in size
    ]
    return op.Concat(*parts, axis=0)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {keep_mask: _translate}


class SeededDropout(TorchFunctionMode):
    """Context in which torch's dropout functions draw their masks from `seed` (int64 ()).

    Each call in training is one layer, numbered in the order of the calls; `layers` counts them.
    """

    def __init__(self, seed: Tensor) -> None:
        super().__init__()
        self.seed = seed
        self.layers = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        draw = _FUNCTIONS.get(func)
        if draw is None:
            return func(*args, **kwargs)
        return self._dropout(draw, *args, **kwargs)

    def _dropout(
        self,
        draw: Callable[[Tensor, Callable[[Any], Tensor], float], Tensor],
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        train: bool | None = None,
    ) -> Tensor:
        if not 0.0 <= p <= 1.0:
            raise UsageError(f"dropout: p: got {p}, expected a number within [0, 1]")
        if not (training if train is None else train) or p == 0.0:
            return input
        if p == 1.0:
            output = input * 0.0
        else:
            layer, self.layers = self.layers, self.layers + 1
            output = draw(input, lambda size: keep_mask(self.seed, size, layer, p), p)
        return input.copy_(output) if inplace else output


def _elements(input: Tensor, mask: Callable[[Any], Tensor], p: float) -> Tensor:
    # As torch: a mask of 0 and 1 / (1 - p), multiplied.
    return input * (mask(input.shape).to(input.dtype) / (1.0 - p))


def _channels(input: Tensor, mask: Callable[[Any], Tensor], p: float, unbatched: int | None = None) -> Tensor:
    """Draw one mask value for each channel. unbatched: the rank at which torch takes an input for one sample (C, *)."""
    leading = 1 if input.dim() == unbatched else 2
    keep = mask((*input.shape[:leading], *[1] * (input.dim() - leading)))
    return input * (keep.to(input.dtype) / (1.0 - p))


def _alpha(input: Tensor, mask: Callable[[Any], Tensor], p: float) -> Tensor:
    """Apply alpha dropout (Klambauer et al. 2017): dropped values become SELU's limit, then mean and variance are
    restored.
    """
    return _restore(input, mask(input.shape), p)


def _feature_alpha(input: Tensor, mask: Callable[[Any], Tensor], p: float) -> Tensor:
    return _restore(input, mask((*input.shape[:2], *[1] * (input.dim() - 2))), p)


def _restore(input: Tensor, keep: Tensor, p: float) -> Tensor:
    limit = -1.7580993408473766
    a = ((1.0 - p) * (1.0 + p * limit * limit)) ** -0.5
    return torch.where(keep, input, limit) * a - a * limit * p


_FUNCTIONS: dict[Any, Callable[[Tensor, Callable[[Any], Tensor], float], Tensor]] = {
    functional.dropout: _elements,
    functional.dropout1d: functools.partial(_channels, unbatched=2),
    functional.dropout2d: _channels,
    functional.dropout3d: functools.partial(_channels, unbatched=4),
    functional.alpha_dropout: _alpha,
    functional.feature_alpha_dropout: _feature_alpha,
    torch.dropout: _elements,
    torch.feature_dropout: _channels,
    torch.alpha_dropout: _alpha,
    torch.feature_alpha_dropout: _feature_alpha,
}
