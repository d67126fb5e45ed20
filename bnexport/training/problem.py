"""Preparation of a model for tracing: a copy with bnexport's batch norms, the names of its state, its loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bnexport.errors import UnsupportedModelError, UsageError
from bnexport.exporting import wrapper
from bnexport.exporting.substitutes import PlainWeightNorm
from bnexport.interface import LOSSES, VALUE_LOSSES
from bnexport.sync_bn.module import SyncBatchNorm
from bnexport.torch_versions import BatchNormBase, DispatchMode, pytree, without_recomputation
from bnexport.training.state import Kind

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
