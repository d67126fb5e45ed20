"""The module SyncBatchNorm: torch.nn.BatchNorm's parameters, buffers and state_dict, statistics over a group."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx, nn

from bnexport import schema, torch_versions
from bnexport.errors import GroupError, UsageError
from bnexport.sync_bn import distributed, operators, torch_operations
from bnexport.torch_versions import BatchNormBase

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_layers = itertools.count()


def new_layer() -> int:
    """Return a number that identifies one module within this process; members of a group compare it before its first
    gather.
    """
    return next(_layers)


def _recomputing() -> bool:
    """Whether this forward runs inside a backward pass: activation checkpointing runs it a second time.

    The first forward has updated the statistics already.
    """
    return not torch.compiler.is_compiling() and torch_versions.graph_task() != -1


def _is_leaf(module: SyncBatchNorm) -> bool:
    """Whether a trace of torch.fx may call the module as a whole: nothing around `forward` is traced as well."""
    return type(module).forward is SyncBatchNorm.forward and not (module._forward_hooks or module._forward_pre_hooks)


class SyncBatchNorm(BatchNormBase):
    """Batch norm over inputs (N, C, *) of rank >= 2 with statistics of all processes of `group`.

    Exact for uneven batches, uneven spatial sizes and empty processes. Differs from
    torch.nn.SyncBatchNorm in that it runs on every device, exports, compiles, has a double
    backward, and changes no buffer when every process is empty. For torch.fx it is a leaf, as torch's own batch norms.

    Args:
        num_features: C.
        eps: added to the variance, finite and >= 0.
        momentum: weight of the new value in the running statistics; None for the cumulative average.
        affine: learn weight and bias, (C,), initialised to ones and zeros.
        track_running_stats: keep running_mean and running_var (unbiased), (C,). Without them eval mode
            normalises with this process's batch; no other process is asked, as in torch.nn.SyncBatchNorm.
        group: the processes that share statistics in training. None: the default group if
            torch.distributed is initialised when the module runs, else this process alone.
        process_group: `group`, under the name that torch.nn.SyncBatchNorm gives it.
        stats_mode: "exact", or MMCV's "default" and "N" (see docs/operator.md).
        grad_reduction: gradients of weight and bias are this process's sums ("local", what
            DistributedDataParallel expects), or the group's "mean" (MMCV) or "sum".

    Shapes: input and output (N, C, *), float16, bfloat16, float32 or float64; the output has the
    input's memory format.

    Raises:
        UsageError (a ValueError): wrong rank, C, type or mode; one value per channel in training.
        GroupError (a RuntimeError): members disagree, or one died or timed out.

    Source of the formulas: tests.support.kernel_reference.
    """

    # bnexport.convert_sync_batchnorm, where torch has it; set by `convert`, which imports this class.
    convert_sync_batchnorm: ClassVar[Callable[..., nn.Module]]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        group: ProcessGroup | None = None,
        stats_mode: str = "exact",
        grad_reduction: str = "local",
        *,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if group is not None and process_group is not None:
            raise UsageError("group and process_group: got both, expected one: they are two names of the same argument")
        if num_features < 0:
            raise UsageError(f"num_features: got {num_features}, expected >= 0")
        options = schema.LOCAL._replace(stats_mode=stats_mode, grad_reduction=grad_reduction)
        torch_operations.check_options(0.0 if momentum is None else momentum, eps, options)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.group = process_group if group is None else group
        self.stats_mode = stats_mode
        self.grad_reduction = grad_reduction
        self._layer = new_layer()
        self._lost_group: str | None = None

    @property
    def process_group(self) -> ProcessGroup | None:
        """`group`, under the name that torch.nn.SyncBatchNorm gives it."""
        return self.group

    @process_group.setter
    def process_group(self, value: ProcessGroup | None) -> None:
        self.group = value

    def extra_repr(self) -> str:
        options = (("stats_mode", self.stats_mode, "exact"), ("grad_reduction", self.grad_reduction, "local"))
        changed = [f", {name}={value!r}" for name, value, default in options if value != default]
        return super().extra_repr() + "".join(changed)

    def group_size(self) -> int:
        """Return the current number of processes that share statistics."""
        return distributed.size_of(self.group)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise UsageError(f"input: got rank {input.dim()}, expected rank >= 2 (N, C, *)")
        if input.shape[1] != self.num_features:
            raise UsageError(
                f"input: got {input.shape[1]} channels, expected {self.num_features} (num_features); shape {tuple(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(input, fx.Proxy) and _is_leaf(self):
            return input.tracer.create_proxy("call_module", input.tracer.path_of_module(self), (input,), {})
        self._check_input_dim(input)
        training, running_mean = self.training, self._tensor("running_mean")
        size = 1
        # Eval without running statistics normalises with this process's batch: evaluation may run on one rank alone.
        if training:
            if self._lost_group is not None:
                raise GroupError(
                    f"group {self._lost_group!r} did not survive pickling: set the module's `group` before training"
                )
            size = self.group_size()
        use_batch = training or running_mean is None
        update = training and self.track_running_stats and running_mean is not None and not _recomputing()
        output, new_mean, new_var, mean = self._normalise(input, use_batch, size, update)
        if update and new_mean is running_mean:  # changed in place, both of them
            counted = self._buffers.get("num_batches_tracked")
            if counted is not None:
                counted.add_(1)
        elif update:
            self._update_statistics(new_mean, new_var, self._batches(input, size, mean, new_mean, new_var))
        return output

    def _batches(
        self, input: torch.Tensor, size: int, mean: torch.Tensor, new_mean: torch.Tensor, new_var: torch.Tensor
    ) -> torch.Tensor | int:
        """Return how many batches a forward counts: 0 if every process of the group is empty, else 1.

        An export of free sizes keeps the question, which they answer.
        """
        elements = input.numel()
        if ("_set_statistic" not in self.__dict__ or type(elements) is int) and elements != 0:
            return 1
        seen = torch.full((), elements, device=input.device) != 0
        if size > 1:  # without a value the mean is 0, and the statistics are the old ones
            old_mean, old_var = self._tensor("running_mean"), self._tensor("running_var")
            assert old_mean is not None and old_var is not None
            for changed in (mean != 0, new_mean != old_mean, new_var != old_var):
                seen = seen | changed.any()
        return seen.long()

    def _normalise(self, input: torch.Tensor, use_batch: bool, size: int, update: bool) -> tuple[torch.Tensor, ...]:
        """Compute the output, the new statistics of a group of `size` and its mean; the statistics may be the old tensors,
        changed in place to `update` them.
        """
        name = distributed.name_of(self.group) if size > 1 else ""  # a break of a compiled graph: not in a list
        spec = schema.GroupSpec(name, size, self.stats_mode, self.grad_reduction, self._layer)
        # As `_tensor` does, without a call of it for each.
        mean, var = self._buffers.get("running_mean"), self._buffers.get("running_var")
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        arguments = (
            input,
            self.running_mean if mean is None else mean,
            self.running_var if var is None else var,
            self.weight if weight is None else weight,
            self.bias if bias is None else bias,
            use_batch,
            1.0 if self.momentum is None else self.momentum,
            self.eps,
        )
        # An average of all batches is computed from the new statistics, exporters say themselves where those go, and an
        # empty batch does not count if those of the other processes are empty, too.
        if update and (self.momentum is None or "_set_statistic" in self.__dict__ or input.numel() == 0):
            return operators.sync_batch_norm(*arguments, *spec)[:4]
        return operators.run(arguments, spec, update)

    def _updates_statistics(self) -> bool:
        """Whether a forward would update the running statistics now."""
        return self.training and self.track_running_stats and self._tensor("running_mean") is not None

    def _update_statistics(self, new_mean: torch.Tensor, new_var: torch.Tensor, count: torch.Tensor | int) -> None:
        """Write the new statistics of `count` batches into the buffers; momentum None averages all batches seen."""
        counted = self._tensor("num_batches_tracked")
        if counted is not None:
            batches = counted + count
            self._set_statistic("num_batches_tracked", batches)
            if self.momentum is None:
                share = 1.0 / batches.clamp(min=1).to(new_mean.dtype)
                pairs = ((self.running_mean, new_mean), (self.running_var, new_var))
                new_mean, new_var = (old + (new - old) * share for old, new in pairs if old is not None)
        elif self.momentum is None:
            return  # as torch: without a count an average of all batches cannot go on
        self._set_statistic("running_mean", new_mean)
        self._set_statistic("running_var", new_var)

    def _tensor(self, name: str) -> torch.Tensor | None:
        """Return the buffer or parameter `name` directly: attribute access would search for a microsecond."""
        found = self._buffers.get(name)
        if found is None:
            found = self._parameters.get(name)
        return getattr(self, name) if found is None else found

    def _set_statistic(self, name: str, new: torch.Tensor) -> None:
        self._buffers[name].copy_(new)  # type: ignore[union-attr]

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        for key, value in self.__dict__.items():
            # A process group is a connection: copies share it, and it cannot be copied.
            clone.__dict__[key] = value if key == "group" else copy.deepcopy(value, memo)
        clone._layer = new_layer()
        return clone

    def __getstate__(self) -> dict[str, Any]:
        name = distributed.name_of(self.group) if self.group is not None else ""
        lost = name if name not in ("", schema.WORLD_GROUP) else None
        return {**self.__dict__, "group": None, "_lost_group": lost}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._layer = new_layer()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "group":
            distributed.name_of(value)  # for operators of a compiled graph
            if "_lost_group" in self.__dict__:
                self.__dict__["_lost_group"] = None
        super().__setattr__(name, value)
