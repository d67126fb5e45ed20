"""One training step as a function of tensors: forward, loss, gradients, clipping, accumulation, update.

Everything that a step reads is an argument and everything that it makes is a result; nothing is changed
in place, so that the function traces into a graph and runs eagerly in any precision alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

import torch

from bnexport.errors import UsageError
from bnexport.schema import NEW_SUFFIX
from bnexport.training.building.description import ACCUMULATED, GRADIENT_SUFFIX, LOSS, SEED, STEP, Kind
from bnexport.training.building.dropout import SeededDropout
from bnexport.training.building.kinks import Kinks
from bnexport.training.building.optimizers import Optimizer
from bnexport.training.building.problem import Problem
from bnexport.training.translations.interpolation import Interpolation

Tensor = torch.Tensor


@dataclasses.dataclass
class Step:
    """Callable with (state, batch, lr) that returns named results, the loss and the model's outputs first.

    optimizer: None for gradients only. groups: hyperparameters of the parameters that have others. outputs: positions
    of the model outputs to return, with their names. clip_grad_norm: largest 2-norm of all gradients together.
    accumulate: number of calls whose gradients are averaged for one update. cpu_kernels: float32 parameters are
    updated by one operator each, a leaf of the trace.
    """

    problem: Problem
    optimizer: Optimizer | None
    outputs: dict[str, int]
    clip_grad_norm: float | None = None
    accumulate: int = 1
    cpu_kernels: bool = False
    groups: Mapping[str, Optimizer] = dataclasses.field(default_factory=dict)

    def initial_state(self) -> dict[str, Tensor]:
        """Return every state tensor under its name; the optimizer's are zeros."""
        state = self.problem.state()
        if self.optimizer is not None:
            for name in self.problem.trainable:
                for kind in self._kinds():
                    state[f"optimizer.{name}.{kind}"] = torch.zeros_like(self.problem.parameters[name])
            if self.accumulate > 1:
                state[ACCUMULATED] = torch.zeros((), dtype=torch.int64)
            state[STEP] = torch.zeros((), dtype=torch.int64)
        state[SEED] = torch.zeros((), dtype=torch.int64)
        return state

    def kinds(self) -> dict[str, Kind]:
        """Return the kind of each state tensor: the model's in the order of its state_dict, then the rest."""
        rest = {name: Kind.OPTIMIZER for name in self.initial_state() if name not in self.problem.kinds}
        return {**self.problem.kinds, **rest, SEED: Kind.SEED}

    def __call__(
        self,
        state: dict[str, Tensor],
        batch: tuple[Tensor, ...],
        lr: Tensor | None,
        loss_weight: Tensor | None = None,
        kinks: Kinks | None = None,
    ) -> dict[str, Tensor]:
        """Run one step. loss_weight: float64 (), the share of this batch in the loss whose gradients are computed;
        None for all. kinks: sees the forward and the loss.
        """
        parameters = self.problem.leaves(state)
        with torch.enable_grad(), kinks or contextlib.nullcontext():
            loss, results, new = self._forward(parameters, state, batch)
        grads = self._gradients(loss, [parameters[name] for name in self.problem.trainable], loss_weight)
        results |= {name + GRADIENT_SUFFIX: grad for name, grad in grads.items()}
        with torch.no_grad():
            if self.optimizer is not None:
                assert lr is not None
                new |= self._update(self.optimizer, state, grads, lr)
        return {**results, **{name + NEW_SUFFIX: new[name] for name in state if name in new}}

    def forward(self, state: dict[str, Tensor], batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Run the forward alone: loss, outputs and new buffers."""
        with torch.enable_grad():  # a forward may differentiate itself
            _, results, new = self._forward(state, state, batch)
        return {**results, **{name + NEW_SUFFIX: tensor for name, tensor in new.items()}}

    def _forward(
        self, parameters: Mapping[str, Tensor], state: dict[str, Tensor], batch: tuple[Tensor, ...]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return the loss, the results without history, and new buffers and seed."""
        problem = self.problem
        buffers = {name: state[name].clone() for name in problem.buffers}
        dropout = SeededDropout(state[SEED])
        with dropout, Interpolation():
            output = problem.forward({name: parameters[name] for name in problem.parameters}, buffers, batch[:-1])
            loss = problem.loss_of(output, batch[-1])
        flat = problem.flatten(output)
        results = {LOSS: loss.detach(), **{name: flat[index].detach() for name, index in self.outputs.items()}}
        new = {name: buffer.detach() for name, buffer in buffers.items()}
        if dropout.layers:
            new[SEED] = state[SEED] + 1
        return loss, results, new

    def _kinds(self) -> tuple[str, ...]:
        assert self.optimizer is not None
        return (*self.optimizer.state_kinds(), *(["accumulated_grad"] if self.accumulate > 1 else []))

    def _gradients(self, loss: Tensor, parameters: list[Tensor], weight: Tensor | None) -> dict[str, Tensor]:
        """Compute gradients by parameter name; parameters that the loss does not depend on have none, as in torch."""
        if not loss.requires_grad:
            raise UsageError(
                "loss: does not depend on any trainable parameter; check requires_grad of the parameters, "
                "and that neither model nor loss detaches"
            )
        seed = None if weight is None else weight.to(loss.dtype)
        grads = torch.autograd.grad(loss, parameters, seed, allow_unused=True)
        return {name: grad for name, grad in zip(self.problem.trainable, grads) if grad is not None}

    def _update(
        self, optimizer: Optimizer, state: dict[str, Tensor], grads: dict[str, Tensor], lr: Tensor
    ) -> dict[str, Tensor]:
        new: dict[str, Tensor] = {}
        due: Tensor | None = None
        if self.accumulate > 1:
            count = state[ACCUMULATED] + 1
            due = count == self.accumulate
            grads = {
                name: state[f"optimizer.{name}.accumulated_grad"] + grad / self.accumulate
                for name, grad in grads.items()
            }
            new[ACCUMULATED] = torch.where(due, 0, count)
            new |= {
                f"optimizer.{name}.accumulated_grad": torch.where(due, torch.zeros_like(grad), grad)
                for name, grad in grads.items()
            }
        if self.clip_grad_norm is not None:
            grads = clip(grads, self.clip_grad_norm)
        step = state[STEP] + 1
        updated = {STEP: step}
        scalars: dict[tuple[Optimizer, torch.dtype], dict[str, Tensor]] = {}
        for name, grad in grads.items():
            rule = self.groups.get(name, optimizer)
            if (rule, grad.dtype) not in scalars:
                rate = lr if rule.lr == optimizer.lr else lr * (rule.lr / optimizer.lr)
                of_rule = rule.scalars(rate, step)
                scalars[rule, grad.dtype] = {key: value.to(grad.dtype) for key, value in of_rule.items()}
            own = {kind: state[f"optimizer.{name}.{kind}"] for kind in optimizer.state_kinds()}
            whole = self.cpu_kernels and grad.dtype == torch.float32
            updated[name], own = rule.update(state[name], grad, own, scalars[rule, grad.dtype], as_operator=whole)
            updated |= {f"optimizer.{name}.{kind}": tensor for kind, tensor in own.items()}
        if due is not None:
            updated = {name: torch.where(due, tensor, state[name]) for name, tensor in updated.items()}
        return {**new, **updated}


def clip(grads: dict[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    """Clip gradients as torch.nn.utils.clip_grad_norm_: g * min(1, max_norm / (norm + 1e-6))."""
    norms = torch.stack([torch.linalg.vector_norm(grad) for grad in grads.values()])
    factor = torch.clamp(max_norm / (torch.linalg.vector_norm(norms) + 1e-6), max=1.0)
    return {name: grad * factor for name, grad in grads.items()}
