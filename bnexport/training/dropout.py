"""Random numbers that are a pure function of a seed, the turn of the layer that draws them, and the position.

Dropout of every kind, stochastic depth and attention's dropout draw from them.

ONNX's random operators hold their seed as an attribute: a graph with them repeats one mask, or draws
one that nobody can repeat. Here a hash of 32-bit integers makes the bits, so that the same seed gives
the same mask in torch, ONNX Runtime and every other runtime, on any number of threads:

    mix(h)  = h ^ h>>16;  h * 0x21f0aaad;  h ^ h>>15;  h * 0x735a2d97;  h ^ h>>15      (mod 2^32)
    key     = mix(low word of seed ^ mix(high word of seed + golden))
    stream  = mix(key + (layer + 1) * golden)
    bits    = mix(mix(position + stream) ^ key)
    keep    = bits >= p * 2^32          uniform = (bits >> 8) 2^-24, within [0, 1)

golden = 0x9e3779b9. mix is a bijection with the smallest bias among those that a search over two-round
multiply-xorshift hashes has found (C. Wellons, "Prospecting for hash functions", 2018). `position`
counts elements (whole channels for dropout1d, 2d, 3d) in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18 as op

from bnexport.torch_versions import DispatchMode

Tensor = torch.Tensor

GOLDEN = 0x9E3779B9
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97
_WORD = 0xFFFFFFFF
_UINT32 = 12

library = torch.library.Library("bnexport", "FRAGMENT")
library.define("keep_mask(Tensor seed, SymInt[] size, int layer, float p) -> Tensor")
library.define("uniform(Tensor seed, SymInt[] size, int layer) -> Tensor")


def _mix(h: Tensor) -> Tensor:
    """Mix values below 2^32 in int64; both factors are below 2^31, so that no product overflows."""
    h = ((h ^ (h >> 16)) * _FIRST) & _WORD
    h = ((h ^ (h >> 15)) * _SECOND) & _WORD
    return h ^ (h >> 15)


def _bits(seed: Tensor, size: list[int], layer: int) -> Tensor:
    key = _mix((seed & _WORD) ^ _mix((((seed >> 32) & _WORD) + GOLDEN) & _WORD))
    stream = _mix((key + (layer + 1) * GOLDEN) & _WORD)
    position = torch.arange(math.prod(size), device=seed.device)
    return _mix(_mix((position + stream) & _WORD) ^ key).view(size)


def _keep_mask(seed: Tensor, size: list[int], layer: int, p: float) -> Tensor:
    return _bits(seed, size, layer) >= threshold(p)


def _keep_mask_fake(seed: Tensor, size: list[int], layer: int, p: float) -> Tensor:
    return seed.new_empty(size, dtype=torch.bool)


def _uniform(seed: Tensor, size: list[int], layer: int) -> Tensor:
    return (_bits(seed, size, layer) >> 8).to(torch.float32) * 2.0**-24


def _uniform_fake(seed: Tensor, size: list[int], layer: int) -> Tensor:
    return seed.new_empty(size, dtype=torch.float32)


library.impl("keep_mask", _keep_mask, "CompositeExplicitAutograd")
library.impl("uniform", _uniform, "CompositeExplicitAutograd")
torch.library.register_fake("bnexport::keep_mask", _keep_mask_fake, lib=library)
torch.library.register_fake("bnexport::uniform", _uniform_fake, lib=library)
keep_mask = torch.ops.bnexport.keep_mask.default
uniform = torch.ops.bnexport.uniform.default


def threshold(p: float) -> int:
    """Return the bits below which an element is dropped; 0 <= p < 1."""
    return min(round(p * 2.0**32), _WORD)


def _word(value: int) -> Any:
    constant: Any = op.Constant(value_int=value)
    return op.Cast(constant, to=_UINT32)


def _translated_bits(seed: Any, shape: Any, layer: int) -> Any:
    """Compute _bits in uint32 arithmetic, which wraps as the formulas do; a vector."""

    def shifted(h: Any, count: int) -> Any:
        return op.BitwiseXor(h, op.BitShift(h, _word(count), direction="RIGHT"))

    def mix(h: Any) -> Any:
        h = op.Mul(shifted(h, 16), _word(_FIRST))
        h = op.Mul(shifted(h, 15), _word(_SECOND))
        return shifted(h, 15)

    low = op.Cast(op.BitwiseAnd(seed, op.Constant(value_int=_WORD)), to=_UINT32)
    # Seeds are >= 0, which a session checks: division is the shift.
    high = op.Cast(op.Div(seed, op.Constant(value_int=1 << 32)), to=_UINT32)
    key = mix(op.BitwiseXor(low, mix(op.Add(high, _word(GOLDEN)))))
    stream = mix(op.Add(key, _word((layer + 1) * GOLDEN & _WORD)))
    indices: Any = op.Range(op.Constant(value_int=0), op.ReduceProd(shape, keepdims=0), op.Constant(value_int=1))
    position = op.Cast(indices, to=_UINT32)
    return mix(op.BitwiseXor(mix(op.Add(position, stream)), key))


def _translate_keep_mask(seed: Any, size: Any, layer: int, p: float) -> Any:
    shape = _shape(size)
    return op.Reshape(op.GreaterOrEqual(_translated_bits(seed, shape, layer), _word(threshold(p))), shape)


def _translate_uniform(seed: Any, size: Any, layer: int) -> Any:
    shape = _shape(size)
    upper: Any = op.BitShift(_translated_bits(seed, shape, layer), _word(8), direction="RIGHT")
    scale: Any = op.Constant(value_float=2.0**-24)
    return op.Reshape(op.Mul(op.Cast(upper, to=int(ir.DataType.FLOAT)), scale), shape)


def _shape(size: Any) -> Any:
    """Concatenate numbers and 0- or 1-dimensional values to one int64 vector."""
    if isinstance(size, ir.Value):
        return size
    one: Any = op.Constant(value_ints=[-1])
    parts: list[Any] = [
        op.Constant(value_ints=[part]) if isinstance(part, int) else op.Reshape(part, one) for part in size
    ]
    return op.Concat(*parts, axis=0)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    keep_mask: _translate_keep_mask,
    uniform: _translate_uniform,
}


_ATEN = torch.ops.aten
_IN_PLACE = {_ATEN.bernoulli_.float, _ATEN.bernoulli_.Tensor, _ATEN.uniform_.default}
_OF_PROBABILITIES = {_ATEN.bernoulli.default, _ATEN.bernoulli.p}


class SeededDropout(DispatchMode):
    """Context in which torch's operators draw their random numbers from `seed` (int64 ()).

    Dropout, attention and stochastic depth reach torch's dispatcher as draws of Bernoulli or uniform numbers. Each
    draw is one layer, numbered in the order of the calls; `layers` counts them. Other distributions stay torch's.
    """

    def __init__(self, seed: Tensor) -> None:
        super().__init__()
        self.seed = seed
        self.layers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.rand.default:
            return self._uniform(args[0]).to(kwargs.get("dtype") or torch.get_default_dtype())
        if func is _ATEN.rand_like.default:
            return self._uniform(args[0].shape).to(kwargs.get("dtype") or args[0].dtype)
        if func is _ATEN.native_dropout.default and args[2] is not False and 0.0 < args[1] < 1.0:
            input, p, _ = args
            keep = self._bernoulli(input.shape, 1.0 - p)
            return input * (keep.to(input.dtype) / (1.0 - p)), keep
        if func in _OF_PROBABILITIES:
            return self._bernoulli(args[0].shape, *(args[1:2] or args)).to(args[0].dtype)
        if func not in _IN_PLACE:
            return func(*args, **kwargs)
        target, *numbers = args
        if func is _ATEN.uniform_.default:
            low, high = (numbers + [0.0, 1.0][len(numbers) :])[:2]
            return target.copy_(self._uniform(target.shape) * (high - low) + low)
        return target.copy_(self._bernoulli(target.shape, *(numbers or [0.5])))

    def _bernoulli(self, size: Any, p: Tensor | float) -> Tensor:
        """Draw True with probability p."""
        if isinstance(p, Tensor):
            return self._uniform(size) < p
        layer, self.layers = self.layers, self.layers + 1
        return keep_mask(self.seed, size, layer, 1.0 - p)

    def _uniform(self, size: Any) -> Tensor:
        layer, self.layers = self.layers, self.layers + 1
        return uniform(self.seed, size, layer)
