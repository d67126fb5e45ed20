"""Batch norm of every kind, as custom nodes or as standard operators.

    aten::_native_batch_norm_legit_functional, _native_batch_norm_legit (with and without statistics),
    aten::native_batch_norm_backward, bnexport::sync_batch_norm, bnexport::sync_batch_norm_backward

torch.onnx translates the first two with inference semantics, whatever their argument says. Statistics
are S: float32, or float64 for float64 data.

The standard operators are those of the closed forms, with centred values (sums of x^2 cancel):

    mean = sum x / n     d = x - mean     var = sum d^2 / n     invstd = 1 / sqrt(var + eps)
    y = d (weight invstd) + bias          x_hat = d invstd
    db = sum g           dw = sum g x_hat
    dx = weight invstd (g - db / n - x_hat dw / n)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.values import Op, Opset

from bnexport import schema
from bnexport.errors import UnsupportedModelError
from bnexport.schema import LOCAL, GroupSpec
from bnexport.training.translations.values import constant, ints, only_needed, op, sizes

_MMCV = Opset(schema.DOMAIN, schema.VERSION)
_NODE = Op(_MMCV, schema.SYNC_BATCH_NORM.name, schema.op_schema(schema.SYNC_BATCH_NORM))
_GRADIENT_NODE = Op(_MMCV, schema.SYNC_BATCH_NORM_GRAD.name, schema.op_schema(schema.SYNC_BATCH_NORM_GRAD))


class BatchNorm:
    """Translations of batch norm; `standard_ops_only` chooses between custom nodes and standard operators."""

    def __init__(self, standard_ops_only: bool) -> None:
        self._standard = standard_ops_only

    def functional(
        self,
        input: Any,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        training: bool,
        momentum: float,
        eps: float,
    ) -> tuple[Any, ...]:
        """Translate aten::_native_batch_norm_legit_functional -> output, saved_mean, saved_invstd, running
        statistics.
        """
        y, new_mean, new_var, mean, invstd = self._forward(
            input, running_mean, running_var, weight, bias, training, momentum, eps
        )
        return y, mean, invstd, new_mean, new_var

    def no_stats(
        self, input: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
    ) -> tuple[Any, ...]:
        """Translate aten::_native_batch_norm_legit.no_stats -> output, saved_mean, saved_invstd."""
        y, _, _, mean, invstd = self._forward(input, None, None, weight, bias, training, momentum, eps)
        return y, mean, invstd

    def backward(
        self,
        grad_output: Any,
        input: Any,
        weight: Any,
        running_mean: Any,
        running_var: Any,
        saved_mean: Any,
        saved_invstd: Any,
        training: bool,
        eps: float,
        output_mask: Sequence[bool],
    ) -> tuple[Any, ...]:
        """Translate aten::native_batch_norm_backward -> grad_input, grad_weight, grad_bias."""
        if not training:
            saved_mean = running_mean
            saved_invstd = op.Reciprocal(op.Sqrt(op.Add(running_var, constant(eps, _statistics_type(input)))))
        return self._backward(grad_output, input, weight, saved_mean, saved_invstd, training, output_mask)

    def sync(self, *arguments: Any) -> tuple[Any, ...]:
        """Translate bnexport::sync_batch_norm."""
        data, running_mean, running_var, weight, bias, training, momentum, eps, *group = arguments
        y, new_mean, new_var, mean, invstd = self._forward(
            data, running_mean, running_var, weight, bias, training, momentum, eps, GroupSpec(*group)
        )
        if running_mean is None:
            new_mean = new_var = constant(np.empty(0), _statistics_type(data))
        # torch keeps these in float64; _in_statistics_type looks through the casts.
        mean.dtype = invstd.dtype = _statistics_type(data)
        wide_mean, wide_invstd = (op.Cast(vector, to=int(ir.DataType.DOUBLE)) for vector in (mean, invstd))
        return y, new_mean, new_var, wide_mean, wide_invstd

    schema.TORCH_SYNC_BATCH_NORM.sign(sync, "self")

    def sync_backward(self, *arguments: Any) -> tuple[Any, ...]:
        """Translate bnexport::sync_batch_norm_backward."""
        grad_output, data, weight, saved_mean, saved_invstd, training, output_mask, *group = arguments
        mean, invstd = (_in_statistics_type(vector, data) for vector in (saved_mean, saved_invstd))
        return self._backward(grad_output, data, weight, mean, invstd, training, output_mask, GroupSpec(*group))

    schema.TORCH_SYNC_BATCH_NORM_BACKWARD.sign(sync_backward, "self")

    def _forward(
        self,
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any,
        bias: Any,
        training: bool,
        momentum: float,
        eps: float,
        spec: GroupSpec = LOCAL,
    ) -> tuple[Any, ...]:
        vectors = [_in_statistics_type(vector, input) for vector in (running_mean, running_var, weight, bias)]
        if self._standard:
            _refuse_group(spec)
            return _standard_forward(input, vectors, bool(training), momentum, eps)
        outputs = _NODE(
            input,
            *vectors,
            **schema.node_attributes(
                schema.SYNC_BATCH_NORM,
                {"training": training, "momentum": momentum, "eps": eps, **spec._asdict()},
            ),
        )
        if running_mean is None:
            # Without running statistics there are no updated ones; an empty name leaves a slot out.
            outputs[1].name = outputs[2].name = ""
            return outputs[0], None, None, outputs[3], outputs[4]
        return tuple(outputs)

    def _backward(
        self,
        grad_output: Any,
        input: Any,
        weight: Any,
        saved_mean: Any,
        saved_invstd: Any,
        training: bool,
        output_mask: Sequence[bool],
        spec: GroupSpec = LOCAL,
    ) -> tuple[Any, ...]:
        like, weight = weight, _in_statistics_type(weight, input)
        if self._standard:
            _refuse_group(spec)
            dx, *grads = _standard_backward(grad_output, input, weight, saved_mean, saved_invstd, bool(training))
            grads = [dx, *(_in_type_of(grad, like) for grad in grads)]
            return only_needed(grad if needed else None for grad, needed in zip(grads, output_mask))
        outputs = _GRADIENT_NODE(
            grad_output,
            input,
            weight,
            saved_mean,
            saved_invstd,
            **schema.node_attributes(schema.SYNC_BATCH_NORM_GRAD, {"training": training, **spec._asdict()}),
        )
        needed = [output_mask[0], False, False, *output_mask[1:]]
        for output, is_needed in zip(outputs, needed):
            if not is_needed:
                output.name = ""
        kept = [output if is_needed else None for output, is_needed in zip(outputs, needed)]
        return only_needed((kept[0], _in_type_of(kept[3], like), _in_type_of(kept[4], like)))


def _refuse_group(spec: GroupSpec) -> None:
    if spec.group_size != 1:
        raise UnsupportedModelError(
            f"bnexport::sync_batch_norm: got a group {spec.group!r} of {spec.group_size} processes, expected 1 with standard "
            "operators only, which cannot communicate; export without standard_ops_only"
        )


def _statistics_type(input: Any) -> ir.DataType:
    return ir.DataType.DOUBLE if input.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


def _in_statistics_type(vector: Any, input: Any) -> Any:
    """Cast `vector` to S; skip a cast that only widened it."""
    if vector is None:
        return None
    S = _statistics_type(input)
    if vector.dtype == S:
        return vector
    producer = vector.producer()
    if producer is not None and producer.op_type == "Cast" and producer.inputs[0].dtype == S:
        return producer.inputs[0]
    return op.Cast(vector, to=int(S))


def _in_type_of(gradient: Any, weight: Any) -> Any:
    """Cast gradients from S to the type of a half-precision parameter."""
    if gradient is None or weight is None or weight.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return gradient
    return op.CastLike(gradient, weight)


def _axes(input: Any) -> Any:
    """Return the axes of the statistics: those that a (C,) vector lacks."""
    return ints([0, *range(2, len(sizes(input)))])


def _standard_forward(
    input: Any, vectors: Sequence[Any], training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    running_mean, running_var, weight, bias = vectors
    axes = _axes(input)
    x, S = _in_statistics_type(input, input), _statistics_type(input)
    new_mean, new_var = running_mean, running_var
    if training:
        wide_mean = op.ReduceMean(x, axes, keepdims=1)
        d = op.Sub(x, wide_mean)
        wide_var = op.ReduceMean(op.Mul(d, d), axes, keepdims=1)
        mean, var = op.Squeeze(wide_mean, axes), op.Squeeze(wide_var, axes)
        if running_mean is not None:
            n = op.Cast(_count(x), to=int(S))
            # As torch's: one value has no unbiased variance, and its factor is taken as 1.
            unbiased = op.Mul(var, op.Div(n, op.Max(op.Sub(n, constant(1.0, S)), constant(1.0, S))))
            new_mean, new_var = (
                _update(old, new, momentum, S) for old, new in ((running_mean, mean), (running_var, unbiased))
            )
    else:
        mean, wide_var = running_mean, op.Unsqueeze(running_var, axes)
        d = op.Sub(x, op.Unsqueeze(mean, axes))
    wide_invstd = op.Reciprocal(op.Sqrt(op.Add(wide_var, constant(eps, S))))
    y = op.Mul(d, wide_invstd if weight is None else op.Mul(op.Unsqueeze(weight, axes), wide_invstd))
    if bias is not None:
        y = op.Add(y, op.Unsqueeze(bias, axes))
    return _like(y, input), new_mean, new_var, mean, op.Squeeze(wide_invstd, axes)


def _standard_backward(
    grad_output: Any, input: Any, weight: Any, saved_mean: Any, saved_invstd: Any, training: bool
) -> tuple[Any, ...]:
    axes, S = _axes(input), _statistics_type(input)
    x, g = _in_statistics_type(input, input), _in_statistics_type(grad_output, input)
    wide_invstd = op.Unsqueeze(saved_invstd, axes)
    x_hat = op.Mul(op.Sub(x, op.Unsqueeze(saved_mean, axes)), wide_invstd)
    db = op.ReduceSum(g, axes, keepdims=1)
    dw = op.ReduceSum(op.Mul(g, x_hat), axes, keepdims=1)
    dx = g
    if training:
        n = op.Cast(_count(x), to=int(S))
        dx = op.Sub(op.Sub(g, op.Div(db, n)), op.Mul(x_hat, op.Div(dw, n)))
    dx = op.Mul(dx, wide_invstd if weight is None else op.Mul(op.Unsqueeze(weight, axes), wide_invstd))
    return _like(dx, input), op.Squeeze(dw, axes), op.Squeeze(db, axes)


def _count(x: Any) -> Any:
    """Compute n, the number of values for each channel."""
    return op.Div(op.Size(x), op.Squeeze(op.Shape(x, start=1, end=2)))


def _update(old: Any, new: Any, momentum: float, S: ir.DataType) -> Any:
    return op.Add(op.Mul(old, constant(1.0 - momentum, S)), op.Mul(new, constant(momentum, S)))


def _like(value: Any, input: Any) -> Any:
    return value if input.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) else op.CastLike(value, input)
