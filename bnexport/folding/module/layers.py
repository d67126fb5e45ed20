"""A common view of torch's linear layers under per-channel maps.

A weight is seen as W[g, a, b, k] with g the group and k the kernel position:

    Conv            (out, in / groups, kernel...)     a = output, b = input channel of the group
    ConvTranspose   (in, out / groups, kernel...)     a = input,  b = output channel of the group
    Linear          (out, in)                         one group, one position; a = output, b = input

A map behind the layer (backward fold): W' = scale[out] W and the bias scale (b - center) + shift.
A map in front of it (forward fold), x = scale * x0 + offset: W' = W scale[in] and the bias
b + sum over inputs and positions of W offset[in], where every output position sees the whole kernel.

Factors are kept in float64 apart from the weight and meet it once, in `write`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
from torch import nn

from bnexport.folding.affine import ChannelAffine, Outputs, round_vector
from bnexport.folding.editing.scaled_tensor import ScaledTensor, check_scaled, weighted_sums
from bnexport.folding.module.tensors import from_numpy, to_numpy
from bnexport.graph.refusal import Refused

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CLASSES = (*_CONVS, *_TRANSPOSED, nn.Linear)


def is_known(module: nn.Module) -> bool:
    """Whether the forward is torch's own; a subclass, or an instance, may have changed it."""
    base = next((base for base in _CLASSES if isinstance(module, base)), None)
    if base is None:
        return False
    methods = ("forward", "_conv_forward") if base in _CONVS else ("forward",)
    return all(name not in module.__dict__ and getattr(type(module), name) is getattr(base, name) for name in methods)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer and its pending parameters.

    weight: the old one as (groups, a, b, positions), in its own type. factor: float64, broadcasts to
    it. bias: float64 (out,). bias_size: size of the terms whose sum the bias is. output_axis: 1 or 2.
    """

    module: nn.Module
    weight: np.ndarray
    factor: np.ndarray
    bias: np.ndarray
    bias_size: np.ndarray
    output_axis: int

    @classmethod
    def read(cls, module: nn.Module) -> Layer:
        """Read a layer. Raise Refused for parameters that cannot be replaced."""
        if hasattr(module, "parametrizations"):
            raise Refused("parametrized", "its layer's parameters are computed; remove the parametrization first")
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if weight is None:
            raise Refused("no-weight", f"its {type(module).__name__} has no parameter `weight`")
        array = to_numpy(weight)
        transposed = isinstance(module, _TRANSPOSED)
        groups = int(getattr(module, "groups", 1))
        view = array.reshape(groups, array.shape[0] // groups, array.shape[1], -1)
        outputs = groups * view.shape[2 if transposed else 1]
        values = np.zeros(outputs) if bias is None else to_numpy(bias).astype(np.float64)
        return cls(module, view, np.ones((1, 1, 1, 1)), values, np.abs(values), 2 if transposed else 1)

    @property
    def rule(self) -> str:
        """The name of the rule that folds into such a layer of an ONNX graph."""
        if isinstance(self.module, nn.Linear):
            return "gemm"
        return "conv_transpose" if isinstance(self.module, _TRANSPOSED) else "conv"

    @property
    def is_linear(self) -> bool:
        return isinstance(self.module, nn.Linear)

    @property
    def rank(self) -> int:
        """Rank of the layer's input and output, the batch of a convolution included."""
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight.dim()

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[0] * self.weight.shape[self.output_axis])

    @property
    def inputs(self) -> int:
        return int(self.weight.shape[0] * self.weight.shape[3 - self.output_axis])

    def mapped(self, affine: ChannelAffine) -> Layer:
        """Apply `affine` after the layer."""
        if affine.channels != self.outputs:
            raise Refused("shape", f"{self._name} makes {self.outputs} channels, the map has {affine.channels}")
        size = np.abs(affine.scale) * (self.bias_size + np.abs(affine.center)) + np.abs(affine.shift)
        factor = self.factor * self._along(affine.scale, self.output_axis)
        shift = self._along(affine.shift, self.output_axis)
        outputs = Outputs(shift, self.weight.size // max(self.outputs, 1))
        return self._checked(factor, affine.apply(self.bias), size, outputs)

    def preceded(self, affine: ChannelAffine) -> Layer:
        """Apply `affine` before the layer."""
        if affine.channels != self.inputs:
            raise Refused("shape", f"{self._name} reads {self.inputs} channels, the map has {affine.channels}")
        bias, size, axis = self.bias, self.bias_size, 3 - self.output_axis
        if not affine.is_scaling:
            if not self._sees_whole_kernel():
                raise Refused("padding", f"{self._name} pads or overlaps, so the shift would differ at the borders")
            factor = self.factor * self._along(affine.offset, axis)
            sums, sizes = weighted_sums(self.weight, factor, self.weight.shape, kept=(0, self.output_axis))
            bias, size = bias + sums.reshape(-1), size + sizes.reshape(-1)
        return self._checked(self.factor * self._along(affine.scale, axis), bias, size)

    def write(self) -> None:
        """Set the module's new parameters; the old tensors are not changed."""
        weight = self.module._parameters["weight"]
        assert weight is not None
        scaled = ScaledTensor(ir.Tensor(self.weight), self.factor, self.weight.shape).numpy()
        self._set("weight", scaled.reshape(tuple(weight.shape)))
        if self.module._parameters.get("bias") is not None or self.bias.any():
            self._set("bias", round_vector(self.bias, self.weight.dtype, f"{self._name} bias", self.bias_size))

    def _set(self, name: str, array: np.ndarray) -> None:
        like = self.module._parameters["weight"]
        assert like is not None
        old = self.module._parameters.get(name)
        requires_grad = (like if old is None else old).requires_grad
        self.module._parameters[name] = nn.Parameter(from_numpy(array, like), requires_grad=requires_grad)

    def _checked(self, factor: np.ndarray, bias: np.ndarray, size: np.ndarray, outputs: Outputs | None = None) -> Layer:
        check_scaled(self.weight, factor, self.weight.shape, outputs)
        round_vector(bias, self.weight.dtype, f"{self._name} bias", size)
        return dataclasses.replace(self, factor=factor, bias=bias, bias_size=size)

    def _along(self, vector: np.ndarray, axis: int) -> np.ndarray:
        shape = [self.weight.shape[0], 1, 1, 1]
        shape[axis] = -1
        return vector.reshape(shape)

    def _sees_whole_kernel(self) -> bool:
        """Whether each output position is a sum over the whole kernel, of values of the input."""
        module: Any = self.module
        if isinstance(module, nn.Linear):
            return True
        if isinstance(module, _TRANSPOSED):
            once = self.weight.shape[3] == 1 and all(stride == 1 for stride in module.stride)
            return once and not any(module.padding) and not any(module.output_padding)
        # Other modes than zeros pad with values of the input, which the map has mapped as well.
        return module.padding_mode != "zeros" or not any(module._reversed_padding_repeated_twice)

    @property
    def _name(self) -> str:
        return type(self.module).__name__


def read_batch_norm(module: Any, max_scale: float) -> ChannelAffine:
    """Return the map of a torch batch norm with its running statistics. Raise Refused if it has none."""
    if hasattr(module, "parametrizations"):
        raise Refused("parametrized", "its parameters are computed; remove the parametrization first")
    mean, var = module._buffers.get("running_mean"), module._buffers.get("running_var")
    if mean is None or var is None:
        raise Refused("training", "it has no running statistics, so it normalises with those of the batch")
    mean, var = to_numpy(mean), to_numpy(var)
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    gamma = np.ones_like(mean) if weight is None else to_numpy(weight)
    beta = np.zeros_like(mean) if bias is None else to_numpy(bias)
    affine = ChannelAffine.from_batch_norm(gamma, beta, mean, var, module.eps)
    largest = float(np.abs(affine.scale).max(initial=0.0))
    if largest > max_scale:
        raise Refused("scale", f"|gamma| / std reaches {largest:.3g}, the bound is {max_scale:.3g} (max_scale)")
    return affine
