"""aten::nll_loss_forward and aten::nll_loss2d_forward.

torch.onnx computes the loss but makes up total_weight, by which the gradient of a mean divides. With
class weights w (ones when absent), target t and ignored targets left out:

    loss = - sum w[t] x[t] / total_weight (mean; sum and none do not divide)      total_weight = sum w[t]
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from bnexport.training.translations.reductions import add_up
from bnexport.training.translations.values import constant, ints, op, sizes

_NONE, _MEAN = 0, 1


def nll_loss_forward(self: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> tuple[Any, Any]:
    """Translate self (C,) or (N, C, *), target () or (N, *) int64, weight (C,) to the loss and total_weight ()."""
    classes = 0 if len(sizes(self)) == 1 else 1
    kept = op.Not(op.Equal(target, constant(ignore_index, ir.DataType.INT64)))
    valid = op.Where(kept, target, constant(0, ir.DataType.INT64))
    axis = ints([classes])
    picked = op.Squeeze(op.GatherElements(self, op.Unsqueeze(valid, axis), axis=classes), axis)
    weights = op.CastLike(kept, self)
    if weight is not None:
        weights = op.Mul(op.Gather(weight, valid), weights)
    losses = op.Neg(op.Mul(picked, weights))
    if reduction == _NONE:
        return losses, constant(0.0, self.dtype)
    total, total_weight = (add_up("ReduceSum", values, self.dtype) for values in (losses, weights))
    return (op.Div(total, total_weight) if reduction == _MEAN else total), total_weight
