"""One training step as a function of tensors: forward, loss, gradients, clipping, accumulation, update; and its model.

Everything that a step reads is an argument and everything that it makes is a result; nothing is changed
in place, so that the function traces into a graph and runs eagerly in any precision alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from bnexport import tolerances
from bnexport.errors import UnsupportedModelError, UsageError
from bnexport.exporting import wrapper
from bnexport.exporting.substitutes import PlainWeightNorm
from bnexport.interface import LOSSES, VALUE_LOSSES
from bnexport.schema import NEW_SUFFIX
from bnexport.sync_bn.module import SyncBatchNorm
from bnexport.torch_versions import BatchNormBase, DispatchMode, pytree, without_recomputation
from bnexport.training.dropout import SeededDropout
from bnexport.training.optimizers import Optimizer
from bnexport.training.state import ACCUMULATED, GRADIENT_SUFFIX, LOSS, SEED, STEP, Kind
from bnexport.training.translations.resampling import Interpolation

# Preparation of a model for tracing: a copy with bnexport's batch norms, the names of its state, its loss.

Tensor = torch.Tensor
Loss = Callable[[Any, Any], Tensor]


class Problem:
    """A model and its loss as a function of named tensors; the given model is not changed.

    parameters, buffers: name -> initial value, names of the state_dict, shared tensors once, under their
    first name. trainable: names of the parameters that get gradients. kinds: what each is, in state_dict order.
    aliases: further names of shared tensors. where: the module whose forward runs, or raised.
    modules: operator -> the first module that called it. checkpointed: modules that ran inside torch.utils.checkpoint.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, training: bool) -> None:
        _refuse_scripted(model)
        self.model = wrapper.for_custom_op(model, fixed_statistics=True) if training else wrapper.for_deploy(model)
        self.loss = loss
        self._given = model
        self.parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        self.trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        self.buffers = dict(self.model.named_buffers())
        _refuse_bfloat16(self.state())
        persistent = model.state_dict(keep_vars=True)
        own = self.state()
        self.kinds = {
            name: Kind.PARAMETER if name in self.parameters else Kind.BUFFER for name in persistent if name in own
        }
        self.kinds |= {name: Kind.CONSTANT for name in own if name not in persistent}
        first: dict[int, str] = {}
        self.aliases = {}
        for name, tensor in persistent.items():
            if isinstance(tensor, Tensor) and first.setdefault(id(tensor), name) != name:
                self.aliases[name] = first[id(tensor)]
        self.output_spec: Any = None
        self.modules: dict[str, str] = {}
        self.checkpointed: set[str] = set()
        self._path: list[str] = []
        self._checkpoints = 0

    def state(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.buffers}

    @property
    def where(self) -> str:
        return self._path[-1] if self._path else ""

    def module_of(self, operator: str) -> str:
        """Return the module that called `operator` ("aten.relu.default"), or the operator whose gradient it is."""
        if operator in self.modules:
            return self.modules[operator]
        name = operator.split(".")[1].removesuffix("_backward")
        return next((path for other, path in self.modules.items() if other.split(".")[1] == name), "")

    def leaves(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters of `state` as tensors by which a loss is differentiated."""
        wanted = set(self.trainable)
        return {name: state[name].detach().requires_grad_(name in wanted) for name in self.parameters}

    def forward(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Any:
        """Return the model's output; the forward's changes of buffers are written to `buffers`.

        What torch.utils.checkpoint holds runs once: its second run would read the module's own parameters, and a graph
        that computes from the same inputs is the same.
        """
        self._path.clear()
        with self._watched(), _Watch(self), PlainWeightNorm(), without_recomputation(self._checkpoint):
            return self._run(parameters, buffers, inputs)

    def _run(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Any:
        tensors = {**parameters, **buffers}
        output = torch.func.functional_call(self.model, tensors, inputs)
        buffers.update({name: tensors[name] for name in buffers})
        return output

    def owner(self, tensor: Tensor) -> str:
        """Return the name of the parameter or buffer whose memory `tensor` is in, of the caller's model or of the copy; or ""."""
        place = tensor.untyped_storage().data_ptr()
        for model in (self._given, self.model):
            for name, own in (*model.named_parameters(), *model.named_buffers()):
                if place and own.untyped_storage().data_ptr() == place:
                    return name
        return ""

    def updated_twice(self) -> list[str]:
        """Return torch's batch norms whose running statistics torch itself updates twice in a step."""
        given = dict(self._given.named_modules())
        return [
            path
            for path in sorted(self.checkpointed & given.keys())
            if isinstance(given[path], BatchNormBase)
            and not isinstance(given[path], SyncBatchNorm)
            and given[path].training
            and given[path].running_mean is not None
        ]

    def loss_of(self, output: Any, target: Tensor) -> Tensor:
        """Compute the loss. Raises UsageError unless it is one floating-point number."""
        value = self.loss(output, target)
        if not isinstance(value, Tensor):
            raise UsageError(f"loss: got a {type(value).__name__}, expected a tensor of shape ()")
        if value.numel() != 1 or not value.is_floating_point():
            raise UsageError(
                f"loss: got a tensor of shape {tuple(value.shape)} and {value.dtype}, expected one floating-point number; "
                "reduce it with .mean() or .sum()"
            )
        return value.reshape(())

    def flatten(self, output: Any) -> tuple[Tensor, ...]:
        tensors, self.output_spec = pytree.tree_flatten(output)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise UnsupportedModelError(
                    f"the model returned a {type(tensor).__name__} among its outputs, expected tensors only"
                )
        return tuple(tensors)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Track `where`: hooks push a module's path before its forward and pop it after one that did not raise."""
        handles = []
        for path, module in self.model.named_modules():
            handles += [
                module.register_forward_pre_hook(lambda *_, path=path: self._enter(path)),
                module.register_forward_hook(lambda *_: _discard(self._path)),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> None:
        self._path.append(path)
        if self._checkpoints:
            self.checkpointed.add(path)

    def _checkpoint(self, begins: bool) -> None:
        self._checkpoints += 1 if begins else -1


class OwnState(Problem):
    """The same problem with a model of its own that holds the state itself, as in torch's own training: a reference.

    No tensor of it is exchanged for another one, so that it sees each new state wherever its code reads it.
    """

    def __init__(self, problem: Problem, model: nn.Module) -> None:
        self.__dict__.update(problem.__dict__)
        self.model = model

    def leaves(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        wanted = set(self.trainable)
        self._load(state)
        own = self._own()
        return {name: own[name].requires_grad_(name in wanted) for name in self.parameters}

    def _run(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Any:
        self._load({**parameters, **buffers})
        output = self.model(*inputs)
        own = self._own()
        buffers.update({name: own[name].clone() for name in buffers})
        return output

    def _own(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _load(self, state: dict[str, Tensor]) -> None:
        for name, own in self._own().items():
            if own is not state[name]:
                given = state[name].detach()
                own.data = given.clone() if 0 in own.stride() else own.data.copy_(given)


def _refuse_scripted(model: nn.Module) -> None:
    """Refuse TorchScript modules: they use numbers as sizes, so the trace would hold the example's."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"{path or 'model'} ({module.original_name}): it is compiled by TorchScript, and a training step is"
                " recorded from Python code; use the module that it was made from"
            )


def _refuse_bfloat16(state: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        if tensor.dtype == torch.bfloat16:
            raise UnsupportedModelError(
                f"{name}: got bfloat16, expected float16, float32 or float64; onnxruntime's Python interface takes no"
                " bfloat16 arrays: train in float32, with model.float()"
            )


class _Watch(DispatchMode):
    """Record of the calling module of each operator, for messages."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.problem.modules.setdefault(str(func), self.problem.where)
        return func(*args, **(kwargs or {}))


def _discard(path: list[str]) -> None:
    """Return None: a hook's return value would replace the module's output."""
    path.pop()


# Losses by name, and example targets for them, used by the command line to export a step.


def named_loss(name: str) -> Loss:
    """Return one of torch.nn.functional's losses, a mean over the rows. Raises UsageError."""
    if name not in LOSSES:
        raise UsageError(f"loss: got {name!r}, expected one of {', '.join(LOSSES)}, or MODULE:FUNCTION")
    loss: Loss = getattr(torch.nn.functional, name)
    return loss


def example_target(name: str, output: Any, generator: torch.Generator) -> torch.Tensor:
    """Create a random target of the loss `name` for a model output (N, C, *) or (N, *).

    Classes are int64 (N, *) below C; other targets are as the output, within [0, 1). Raises UsageError
    for an output that is not one tensor of such a shape.
    """
    if not isinstance(output, torch.Tensor):
        raise UsageError(
            f"--loss: {name} takes one tensor, the model returns a {type(output).__name__}; write a function of your "
            "own (MODULE:FUNCTION) and give an example with --target FILE.npy"
        )
    if name in VALUE_LOSSES:
        return torch.rand(output.shape, generator=generator, dtype=torch.float32).to(output.dtype)
    if output.dim() < 2:
        raise UsageError(f"--loss: {name} takes an output of shape (N, C, *), the model returns {tuple(output.shape)}")
    return torch.randint(0, output.shape[1], (output.shape[0], *output.shape[2:]), generator=generator)


# Kinks of a step: operators whose value or derivative jumps where an input crosses a point or meets another input.
#
# A ReLU whose input is zero but for rounding goes either way, and changes every gradient before it, by 1e-3 to 1e-1 of
# its 2-norm. Two computations are comparable where they go the same way. So the inputs of kinks are recorded in one of
# them, and another takes them over, one operator after the other, as far as its own are the same but for rounding:
# what differs by more stays, and so does every difference between two kinks.
#
# Both number the inputs in the order in which they reach torch's dispatcher: in the graph that is traced, in float32 and
# in float64 alike.

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
