"""One training step as a function of tensors: forward, loss, gradients, clipping, accumulation, update.

Everything that a step reads is an argument and everything that it makes is a result; nothing is changed
in place, so that the function traces into a graph and runs eagerly in any precision alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from bnexport import tolerances
from bnexport.errors import UsageError
from bnexport.schema import NEW_SUFFIX
from bnexport.torch_versions import DispatchMode
from bnexport.training.dropout import SeededDropout
from bnexport.training.optimizers import Optimizer
from bnexport.training.problem import Problem
from bnexport.training.state import ACCUMULATED, GRADIENT_SUFFIX, LOSS, SEED, STEP, Kind
from bnexport.training.translations.resampling import Interpolation

# Kinks of a step: operators whose value or derivative jumps where an input crosses a point or meets another input.
#
# A ReLU whose input is zero but for rounding goes either way, and changes every gradient before it, by 1e-3 to 1e-1 of
# its 2-norm. Two computations are comparable where they go the same way. So the inputs of kinks are recorded in one of
# them, and another takes them over, one operator after the other, as far as its own are the same but for rounding:
# what differs by more stays, and so does every difference between two kinks.
#
# Both number the inputs in the order in which they reach torch's dispatcher: in the graph that is traced, in float32 and
# in float64 alike.

Tensor = torch.Tensor

_PREFIX = "bnexport.kink."
_OF_POINTS = (
    "relu hardtanh hardswish hardsigmoid leaky_relu _prelu_kernel elu threshold hardshrink softshrink clamp clamp_min "
    "clamp_max abs sign sgn floor ceil round trunc grid_sampler_2d gt ge lt le eq ne"
)
_OF_INPUTS = (
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d max min amax amin maximum "
    "minimum fmax fmin argmax argmin aminmax topk sort kthvalue median cummax cummin"
)
_OPERATORS = {f"aten.{name}{suffix}" for name in f"{_OF_POINTS} {_OF_INPUTS}".split() for suffix in ("", "_")}


class Kinks(DispatchMode):
    """Context that sees the floating-point inputs of kinks."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(func.overloadpacket) in _OPERATORS:
            for value in args:
                if isinstance(value, Tensor) and value.is_floating_point():
                    self.reached(value)
        return func(*args, **(kwargs or {}))

    def reached(self, x: Tensor) -> None:
        raise NotImplementedError


class Recorder(Kinks):
    """Records the inputs, in order, in `values`."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def reached(self, x: Tensor) -> None:
        # An operator may work in place.
        self.values.append(x.detach().clone())

    def named(self) -> dict[str, Tensor]:
        """Return the inputs under names for outputs of a traced function (`take`)."""
        return {f"{_PREFIX}{index}": value for index, value in enumerate(self.values)}


class Follower(Kinks):
    """Sets the inputs to those that another computation had, where they differ by rounding (tolerances.model).

    values: in order; None where unknown. kept: tensors that must not change, such as parameters.
    """

    def __init__(self, values: Sequence[np.ndarray | None], kept: Iterable[Tensor]) -> None:
        super().__init__()
        self._values = list(values)
        self._kept = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self._count = 0

    def reached(self, x: Tensor) -> None:
        index, self._count = self._count, self._count + 1
        value = self._values[index] if index < len(self._values) else None
        if value is None or value.shape != tuple(x.shape) or 0 in x.stride():
            return
        if x.untyped_storage().data_ptr() in self._kept:
            return
        other = torch.from_numpy(value).to(x.dtype)
        allowed = tolerances.model(value.dtype.name, x.detach().numpy()).atol
        # In place: autograd has saved this tensor for the operator's gradient.
        x.copy_(torch.where((other - x).abs() <= allowed, other, x))


def take(model: ir.Model) -> list[ir.Value]:
    """Remove what `Recorder.named` added to the outputs; return the values recorded."""
    outputs = model.graph.outputs
    recorded = [output for output in outputs if str(output.name).startswith(_PREFIX)]
    outputs[:] = [output for output in outputs if output not in recorded]
    return [_source(value) for value in recorded]


def _source(value: ir.Value) -> ir.Value:
    producer = value.producer()
    while producer is not None and producer.op_type == "Identity" and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value


def kink_names(model: ir.Model, values: Iterable[ir.Value]) -> list[str]:
    """Return the names of values that nodes of the graph still make; "" for others."""
    producers = [(value, value.producer()) for value in values]
    return [
        str(value.name) if producer is not None and producer.graph is model.graph else ""
        for value, producer in producers
    ]


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
