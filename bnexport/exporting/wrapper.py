"""Preparation of a model's copy for tracing: its batch norms and its state.

The model itself is never touched: everything below works on a deep copy whose process groups are
shared with the original.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from bnexport.errors import BnexportError, UnsupportedModelError, UsageError, summary
from bnexport.exporting.dimensions import Dimensions, Limit, Note, SizeConditions
from bnexport.exporting.substitutes import PlainWeightNorm
from bnexport.exporting.tracer_notes import OWN
from bnexport.modules.copies import copy_model
from bnexport.sync_bn import distributed
from bnexport.sync_bn.convert import replace, to_plain, to_sync
from bnexport.sync_bn.module import SyncBatchNorm
from bnexport.sync_bn.recognition import SYNC_KINDS, Unknown, known_kind, listed, unknown_batch_norms
from bnexport.torch_versions import key_of, pytree


class LocalBatchNorm(SyncBatchNorm):
    """Batch norm over this process alone, whatever groups exist: the meaning of a plain BatchNorm."""

    def group_size(self) -> int:
        return 1


def for_deploy(model: nn.Module) -> nn.Module:
    """Copy the model in eval mode, with every sync batch norm of a known class replaced by a plain one.

    Classes that derive from a batch norm and compute something else stay, and so does what they compute.
    Those that derive from ours call torch's batch norm in place of our operator.
    """
    return with_torchs_operators(replace(copy_model(model), to_plain).eval())


def with_torchs_operators(copied: nn.Module) -> nn.Module:
    """Make subclasses of SyncBatchNorm in `copied` call torch's operator instead of the custom one."""
    for module in copied.modules():
        if isinstance(module, SyncBatchNorm):
            module.__dict__["_normalise"] = functools.partial(_normalise_in_torch, module)
    return copied


def _normalise_in_torch(module: SyncBatchNorm, input: torch.Tensor, use_batch: bool, *_: Any) -> Any:
    statistics = (None, None) if use_batch else (module.running_mean, module.running_var)
    output = nn.functional.batch_norm(input, *statistics, module.weight, module.bias, use_batch, 0.0, module.eps)
    return output, None, None, None


def for_custom_op(model: nn.Module, *, fixed_statistics: bool = False) -> nn.Module:
    """Copy the model in its own mode, with every sync batch norm converted to bnexport's.

    A plain batch norm that uses the batch's statistics becomes ours over one process: exporters would
    give it inference semantics without an error. fixed_statistics: one in eval mode, too.

    Raises UnsupportedModelError for classes that derive from a batch norm and compute something else,
    where the copy would need them to be ours. Training steps record what a plain one computes.
    """
    _refuse_unknown(model, training_step=fixed_statistics)

    def prepare(module: nn.Module) -> nn.Module | None:
        kind = known_kind(module)
        if kind in SYNC_KINDS:
            return to_sync(module, None)
        if kind not in ("batch_norm", "batch_norm_act"):
            return None
        if not (module.training or fixed_statistics or module.running_mean is None):
            return None
        local = to_sync(module, None)
        assert local is not None
        local.__class__ = _local_class(type(local))
        return local

    return replace(copy_model(model), prepare)


def _refuse_unknown(model: nn.Module, *, training_step: bool) -> None:
    def needed(unknown: Unknown) -> bool:
        sync, training = unknown.found.kind in SYNC_KINDS, unknown.module.training
        return sync and training if training_step else sync or training

    refused = [unknown for unknown in unknown_batch_norms(model) if needed(unknown)]
    if refused:
        way_out = "" if training_step else "export with mode='deploy', put plain ones into eval mode, "
        raise UnsupportedModelError(
            f"{listed(refused)}: computes something else than a batch norm and cannot be converted; {way_out}derive"
            " the class from bnexport.SyncBatchNorm, or let a module hold a batch norm and call it"
        )


def _local_class(cls: type) -> type:
    return LocalBatchNorm if cls is SyncBatchNorm else type(f"Local{cls.__name__}", (LocalBatchNorm, cls), {})


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """A buffer that a training forward changes.

    name: in the state_dict, the first one if it is shared. places: the modules and keys that hold it.
    """

    name: str
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def value(self) -> torch.Tensor:
        module, key = self.places[0]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer


def training_state(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[StateTensor]:
    """Return the buffers that one forward of `model` in its own mode changes, in state_dict order.

    Statistics of batch norms are known; what else changes (spectral norm's vectors) shows in a run of a
    copy, if it needs no other process.
    """
    changing = {
        id(module._buffers[key])
        for module in model.modules()
        if isinstance(module, SyncBatchNorm) and module._updates_statistics()
        for key in ("running_mean", "running_var", "num_batches_tracked")
    }
    if any(module.training for module in model.modules()) and not crosses_processes(model):
        changing |= _changed_by_a_run(model, inputs)
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in changing:
                places.setdefault(id(buffer), []).append((f"{prefix}.{key}" if prefix else key, module, key))
    return [StateTensor(found[0][0], tuple((module, key) for _, module, key in found)) for found in places.values()]


def _changed_by_a_run(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> set[int]:
    """Return the identities of the buffers of `model` that a forward changes."""
    copied = copy_model(model, share_parameters=True)
    pairs = [
        (id(buffer), other, key, other._buffers[key], other._buffers[key]._version)  # type: ignore[union-attr]
        for module, other in zip(model.modules(), copied.modules())
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copied(*(value.clone() for value in inputs))
    except Exception:  # what the model's code raises, which it will raise again where it is traced
        return set()
    return {
        identity
        for identity, module, key, before, version in pairs
        if (now := module._buffers.get(key)) is not before or now._version != version  # type: ignore[union-attr]
    }


def shared_names(model: nn.Module) -> dict[str, str]:
    """Map each further name of a shared parameter or buffer to its first name."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first[id(tensor)] for name, tensor in named if first.setdefault(id(tensor), name) != name}


def group_names(model: nn.Module) -> dict[str, str]:
    """Map the names of groups in this process to their names in models.

    Raises UnsupportedModelError for a group that no other process could find by name.
    """
    names = {}
    for path, module in model.named_modules():
        if _spans_processes(module):
            name = distributed.name_of(module.group)
            public = distributed.published_name(name)
            if public is None:
                raise UnsupportedModelError(
                    f"{path}: its process group has no name that a model could carry; "
                    "call bnexport.register_group(name, group) in every process, then export"
                )
            names[name] = public
    return names


def crosses_processes(model: nn.Module) -> bool:
    """Whether a forward of `model` needs other processes."""
    return any(_spans_processes(module) for module in model.modules())


def _spans_processes(module: nn.Module) -> bool:
    return isinstance(module, SyncBatchNorm) and module.training and module.group_size() > 1


class _Holder:
    """A box that carries a value through torch.export, which undoes assignments to a module's own attributes."""

    spec: Any = None


class Traced(nn.Module):
    """forward(*inputs) -> (outputs flattened..., new value of each state tensor...), without side effects.

    Buffers are replaced by clones for the duration of the call, and our batch norms assign new
    statistics instead of copying into the old ones, so that both exporters see plain data flow.
    """

    def __init__(self, model: nn.Module, state: list[StateTensor]) -> None:
        super().__init__()
        self.model = model
        self.state = state
        self._holder = _Holder()
        self.train(model.training)

    @property
    def output_spec(self) -> Any:
        """The structure of the model's outputs, known after a forward."""
        return self._holder.spec

    def train(self, mode: bool = True) -> Traced:
        # The modes of the children are part of the model and stay as they are.
        self.training = mode
        return self

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        buffers = [
            (module, key, buffer)
            for module in self.model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        clones = {id(tensor.value): tensor.value.clone() for tensor in self.state}
        modules = [module for module in self.model.modules() if isinstance(module, SyncBatchNorm)]
        try:
            for module, key, buffer in buffers:
                module._buffers[key] = clones.get(id(buffer), buffer)
            for module in modules:
                module.__dict__["_set_statistic"] = _Assign(module, self.state)
            with PlainWeightNorm():
                outputs, spec = pytree.tree_flatten(self.model(*inputs))
            self._holder.spec = spec
            new_state = [_current(tensor, clones) for tensor in self.state]
        finally:
            for module in modules:
                module.__dict__.pop("_set_statistic", None)
            for module, key, buffer in buffers:
                module._buffers[key] = buffer
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                raise UnsupportedModelError(
                    f"the model returned a {type(output).__name__} among its outputs, expected tensors only"
                )
        return (*outputs, *new_state)


@dataclasses.dataclass(frozen=True)
class TracedGraph:
    """An exporter's result for a `Traced`: a graph, its dynamic dimensions, and the conditions that it assumes.

    conditions, limits: on sizes, which the graph does not keep; none where the exporter records none.
    """

    model: ir.Model
    dimensions: Dimensions
    notes: tuple[Note, ...] = ()
    conditions: SizeConditions | None = None
    limits: tuple[Limit, ...] = ()


def _current(tensor: StateTensor, clones: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return the value of a state tensor after the forward: changed in place, or assigned in one of its places."""
    held = [module._buffers[key] for module, key in tensor.places]
    assigned = [value for value in held if value is not None and all(value is not clone for clone in clones.values())]
    return assigned[-1] if assigned else tensor.value


class _Assign:
    """Stand-in for SyncBatchNorm._set_statistic that replaces the buffer by the new tensor, wherever it is shared."""

    def __init__(self, module: nn.Module, state: list[StateTensor]) -> None:
        self.places = {key: tensor.places for tensor in state for owner, key in tensor.places if owner is module}
        self.module = module

    def __call__(self, name: str, new: torch.Tensor) -> None:
        old = self.module._buffers[name]
        assert old is not None
        new = new if new.dtype == old.dtype else new.to(old.dtype)
        for module, key in self.places.get(name, ((self.module, name),)):
            module._buffers[key] = new


class ExporterFailure(UnsupportedModelError):
    """torch cannot export the model, though it runs; its cause is torch's error."""

    def __init__(self, name: str, error: Exception) -> None:
        start = f"{name}: torch cannot export it, though it runs: {summary(error)}"
        way_out = "try exporter torchscript or dynamo, or format torchscript"
        if "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__:
            way_out = (
                f"its code asks for values of tensors{_asking(error)}: use torch.where or torch.cond there, or format"
                " torchscript, which keeps all branches of code that it can script; exporter torchscript would keep the"
                " example's branch"
            )
        super().__init__(f"{start}; {way_out}")


class ForwardFailure(UsageError):
    """The model does not run on the inputs."""

    def __init__(self, model: nn.Module, inputs: tuple[torch.Tensor, ...], error: Exception) -> None:
        shapes = ", ".join(str(tuple(value.shape)) for value in inputs)
        types = ", ".join(dict.fromkeys(str(value.dtype).removeprefix("torch.") for value in inputs))
        what = f"does not run on inputs of shape {shapes} and type {types}: {summary(error)}"
        if any(value.dim() == 3 for value in inputs) and any(isinstance(each, nn.Conv2d) for each in model.modules()):
            what += "; dimension 0 is the batch: an image has shape (1, channels, height, width)"
        super().__init__(f"args: {type(model).__name__} {what}")


def run(model: nn.Module, prepared: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    """Run a prepared copy of `model`; raise ForwardFailure with what its code raises."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return copy_model(prepared, share_parameters=True)(*(value.clone() for value in inputs))
    except Exception as error:
        raise ForwardFailure(model, inputs, error) from error


@contextlib.contextmanager
def named_in_errors(model: nn.Module, traced: Traced, inputs: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Turn errors of an exporter into a ForwardFailure, or an ExporterFailure that names the modules in question."""
    try:
        yield
    except (BnexportError, MemoryError):
        raise
    except Exception as error:  # exporters raise many types, the model's own code among them
        if not crosses_processes(traced.model):
            run(model, traced, inputs)
        unknown = unknown_batch_norms(model, ours=True)
        raise ExporterFailure(listed(unknown) if unknown else type(model).__name__, error) from error


def _asking(error: BaseException) -> str:
    """Return the last line outside torch and this package that led to an error."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((*OWN, "<"))]
    return (
        f" at {'/'.join(Path(lines[-1].filename).parts[-2:])}:{lines[-1].lineno} in {lines[-1].name}" if lines else ""
    )


def output_names(spec: Any, count: int) -> list[str]:
    """Return names for flattened outputs: keys of a dict, "output" for one, "output_0", ... for several."""
    paths = [path for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(count)), spec))[0]]
    if count == 1 and not paths[0]:
        return ["output"]
    names = []
    for path in paths:
        name = "_".join(str(key_of(entry)) for entry in path)
        names.append(f"output_{name}" if name.replace("_", "").isdigit() else name)
    return names
