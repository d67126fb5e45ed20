"""Epochs of different lengths on the processes of a DistributedDataParallel model.

A process without batches goes on running the model, on what it saw last, until all have ended. So it takes part in every
exchange in its turn, in those of sync batch norms and in DistributedDataParallel's, and needs to know none of them. Its rows
of statistics are those of an empty batch, its gradients are zero, and in the end all processes have the state of one that
went on longest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bnexport.errors import GroupError, UsageError
from bnexport.sync_bn import distributed
from bnexport.sync_bn.module import SyncBatchNorm
from bnexport.torch_versions import pytree

# What processes with a batch tell the others before a forward: that they have one, and how they run it.
_HOW = ("a batch", "training", "gradients", "synchronised gradients", "no gradients yet")


@contextlib.contextmanager
def join(model: nn.Module, *states: Any) -> Iterator[None]:
    """Train with uneven numbers of batches: a process that leaves the block earlier waits for the others there, and takes
    part in what they do as if it had empty batches.

        with bnexport.join(model, optimizer, scheduler):
            for images, labels in batches:
                ...

    Statistics and running statistics are those of the processes that have a batch. DistributedDataParallel still divides
    gradients by the number of all processes, as torch's own `Join` has it do. Each forward with gradients is followed by
    its backward, which goes through every output.

    Args:
        model: a DistributedDataParallel model.
        states: what else the loop changes and all processes share, by its state_dict() and load_state_dict(): optimizers,
            schedulers, gradient scalers. At the end those who left early get the state of one that went on longest, as
            they get parameters and buffers.

    Raises:
        UsageError: model is no DistributedDataParallel.
        GroupError: processes run a forward in different ways at the same time, or one died or timed out.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"join: got {type(model).__name__}, expected a torch.nn.parallel.DistributedDataParallel: it is what makes"
            " processes wait for each other's gradients"
        )
    epoch = _Epoch(model)
    handle = model.register_forward_pre_hook(epoch.before_forward, with_kwargs=True)
    try:
        yield
        while epoch.follow():
            pass
    finally:
        handle.remove()
    if epoch.is_uneven:
        tensors = [*model.parameters(), *model.buffers()]
        sent = distributed.broadcast(tensors, [state.state_dict() for state in states], epoch.name, epoch.longest)
        for state, new in zip(states, sent, strict=True):
            state.load_state_dict(new)


class _Epoch:
    """One process's view of the block. longest: the first rank of those that had a batch last."""

    def __init__(self, model: Any) -> None:
        self.model, self.name = model, distributed.name_of(model.process_group)
        self.is_uneven, self.longest = False, 0
        self._batch: Any = None

    def before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the others of a forward: a hook in front of it."""
        if distributed.is_silent():
            return
        gradients = torch.is_grad_enabled()
        how = [self.model.training, gradients, self.model.require_backward_grad_sync, _no_gradients(self.model)]
        first, self._batch = self._batch is None, (args, kwargs)
        self._meet([True, *how], first)

    def follow(self) -> bool:
        """Run the model as those that have a batch do. Return False where there are none."""
        how = [False, False, False, False, _no_gradients(self.model)]
        busy, training, gradients, synchronised, fresh = self._meet(how, self._batch is None)
        if fresh:
            self.model.zero_grad()
        if not busy:
            return False
        if self.model.training is not training:
            self.model.train(training)
        others = [
            b for module in self.model.modules() if not isinstance(module, SyncBatchNorm) for b in module.buffers(False)
        ]
        before = [buffer.clone() for buffer in others]
        with distributed.silence(), contextlib.ExitStack() as stack, torch.set_grad_enabled(gradients):
            if not synchronised:
                stack.enter_context(self.model.no_sync())
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    stack.callback(parameter.register_hook(torch.zeros_like).remove)
            args, kwargs = self._batch
            outputs = [it for it in pytree.tree_leaves(self.model(*args, **kwargs)) if isinstance(it, torch.Tensor)]
            outputs = [output for output in outputs if output.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
        for buffer, old in zip(others, before, strict=True):
            buffer.copy_(old)
        return True

    def _meet(self, own: list[bool], is_first: bool) -> list[bool]:
        """Exchange what each process does next; return that of those that have a batch, or had one last.

        is_first: this process has seen no batch before. If one never has, the others describe theirs to it.
        """
        device = next(self.model.parameters()).device
        rows = distributed.all_gather(torch.tensor([*own, is_first], dtype=torch.float64, device=device), self.name)
        told = [[bool(value) for value in row] for row in rows.tolist()]
        busy = [rank for rank, row in enumerate(told) if row[0]]
        how = told[busy[0] if busy else self.longest][: len(_HOW)]
        for rank in busy:
            if told[rank][: len(_HOW)] != how:
                words = "; ".join(
                    f"{what}: " + ", ".join(f"rank {r} {told[r][i]}" for r in busy) for i, what in enumerate(_HOW)
                )
                raise GroupError(f"join: the processes run their next forward in different ways ({words})")
        self.is_uneven |= 0 < len(busy) < len(told)
        self.longest = busy[0] if busy else self.longest
        if busy and any(row[-1] and not row[0] for row in told):
            described = distributed.all_gather_objects(
                _described(self._batch) if own[0] else None, self.model.process_group
            )
            if not own[0]:
                self._batch = _made(described[busy[0]], device)
        return how


def _no_gradients(model: nn.Module) -> bool:
    """Whether the gradients of a step are still to be summed: all are absent or zero."""
    return not any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def _described(batch: Any) -> Any:
    """Return a batch with the shape and type of each tensor in its place."""
    return pytree.tree_map_only(torch.Tensor, lambda it: it.to("meta"), batch)


def _made(batch: Any, device: torch.device) -> Any:
    """Make tensors of a description, of numbers as normalised data have them."""

    def made(of: torch.Tensor) -> torch.Tensor:
        like = torch.zeros(of.shape, dtype=of.dtype, device=device)
        return like.normal_() if of.is_floating_point() else like

    return pytree.tree_map_only(torch.Tensor, made, batch)
