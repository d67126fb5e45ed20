"""ONNX translations of the operators of a traced training step.

    recorded = make_fx(step, decompositions(), tracing_mode="symbolic")(...)     # within interpolation.Interpolation()
    program = torch.export.export(recorded, ...)
    torch.onnx.export(program, custom_translation_table=translation_table(), ...)

torch.onnx translates most forward operators; its decompositions reduce most backward operators to
them. The table holds what is left: operators without a translation, and those whose translation is
wrong in training or whose decomposition is slow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bnexport import torch_versions
from bnexport.exporting import dynamo
from bnexport.sync_bn import operators
from bnexport.training.translations import activations, convolution, cpu_kernels, pools, resampling
from bnexport.training.translations.batch_norm import BatchNorm

__all__ = ["decompositions", "translation_table"]

_ATEN = torch.ops.aten

_PADDINGS: dict[torch_versions.Operator, Callable[..., Any]] = {
    getattr(_ATEN, f"{kind}_pad{rank}d_backward").default: functools.partial(
        resampling.padding_backward, name=f"{kind}_pad{rank}d", mode=mode
    )
    for kind, mode in (("reflection", "reflect"), ("replication", "replicate"))
    for rank in (1, 2, 3)
}

_TRANSLATIONS: dict[torch_versions.Operator, Callable[..., Any]] = {
    _ATEN.convolution_backward.default: convolution.convolution_backward,
    _ATEN.max_pool2d_with_indices.default: pools.max_pool_with_indices,
    _ATEN.max_pool3d_with_indices.default: pools.max_pool_with_indices,
    _ATEN.max_pool2d_with_indices_backward.default: pools.max_pool_backward,
    _ATEN.max_pool3d_with_indices_backward.default: pools.max_pool_backward,
    _ATEN.adaptive_max_pool2d.default: pools.adaptive_max_pool,
    _ATEN.adaptive_max_pool3d.default: pools.adaptive_max_pool,
    _ATEN.adaptive_max_pool2d_backward.default: pools.max_pool_backward,
    _ATEN.adaptive_max_pool3d_backward.default: pools.max_pool_backward,
    _ATEN.avg_pool2d.default: pools.avg_pool,
    _ATEN.avg_pool3d.default: pools.avg_pool,
    _ATEN.avg_pool2d_backward.default: resampling.avg_pool_backward,
    _ATEN.avg_pool3d_backward.default: resampling.avg_pool_backward,
    _ATEN._adaptive_avg_pool2d.default: resampling.adaptive_avg_pool,
    _ATEN._adaptive_avg_pool3d.default: resampling.adaptive_avg_pool,
    _ATEN._adaptive_avg_pool2d_backward.default: resampling.adaptive_avg_pool_backward,
    _ATEN._adaptive_avg_pool3d_backward.default: resampling.adaptive_avg_pool_backward,
    **_PADDINGS,
    _ATEN.unfold_backward.default: resampling.unfold_backward,
    resampling.interpolate: resampling.translate,
    resampling.interpolate_backward: resampling.translate_backward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: activations.attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: activations.attention_backward,
    _ATEN.threshold_backward.default: activations.threshold_backward,
    _ATEN.hardtanh_backward.default: activations.hardtanh_backward,
    _ATEN.nll_loss_forward.default: activations.nll_loss_forward,
    _ATEN.nll_loss2d_forward.default: activations.nll_loss_forward,
    _ATEN._softmax.default: activations.softmax,
    _ATEN._log_softmax.default: activations.log_softmax,
    _ATEN.sum.default: activations.whole("ReduceSum"),
    _ATEN.mean.default: activations.whole("ReduceMean"),
    _ATEN.empty_permuted.default: activations.empty_permuted,
    _ATEN.mul.Scalar: activations.with_scalar("Mul"),
    _ATEN.div.Scalar: activations.with_scalar("Div"),
    _ATEN.pow.Tensor_Scalar: activations.power,
}


def translation_table(
    standard_ops_only: bool = False, with_cpu_kernels: bool = False
) -> dict[torch_versions.Operator, Callable[..., Any]]:
    """Return translations for `torch.onnx.export(custom_translation_table=...)`, by operator overload.

    standard_ops_only: batch norm in standard ONNX operators instead of MMCVSyncBatchNorm and
    MMCVSyncBatchNormGrad, for runtimes that cannot load the custom-op library. with_cpu_kernels: the
    operators of bnexport/training/contract.py where they serve.
    """
    norm = BatchNorm(standard_ops_only)
    plain = {**_TRANSLATIONS, **(cpu_kernels.TRANSLATIONS if with_cpu_kernels else {})}
    return {
        **{target: torch_versions.translation(function) for target, function in plain.items()},
        _ATEN._native_batch_norm_legit_functional.default: _function(norm.functional),
        _ATEN._native_batch_norm_legit.no_stats: _function(norm.no_stats),
        _ATEN.native_batch_norm_backward.default: _function(norm.backward),
        operators.sync_batch_norm: _function(norm.sync),
        operators.sync_batch_norm_backward: _function(norm.sync_backward),
    }


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a translation as a function: torch.onnx writes an attribute on it, which a bound method refuses."""

    def translate(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return translate


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch.export's decompositions without those of operators that the table translates, and our own."""
    translated = translation_table(with_cpu_kernels=True)
    return {
        **{
            target: function
            for target, function in torch.export.default_decompositions().items()
            if target not in translated
        },
        **dynamo.DECOMPOSITIONS,
    }
