"""Function export_training_step: a model, its loss and an optimizer in one ONNX graph."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import onnx_ir as ir
import torch
from torch import nn

from bnexport import torch_versions
from bnexport.errors import UsageError, VerificationError
from bnexport.exporting import arguments, dimensions, wrapper
from bnexport.exporting.dimensions import Dimensions, SizeConditions
from bnexport.modules.copies import copy_model
from bnexport.schema import NEW_SUFFIX, TRAINING_METADATA
from bnexport.training import graph, optimizers, tracing, verification
from bnexport.training.state import (
    LEARNING_RATE,
    LOSS,
    LOSS_WEIGHT,
    SEED,
    Description,
    step_paths,
    write,
)
from bnexport.training.step import Loss, Problem, Recorder, Step, kink_names, take
from bnexport.verification.verdict import Verification

# Batch sizes at which a model's code would take another branch than the one recorded in the graph.

# Each is one more step in torch, in float64 and in ONNX Runtime.
_MOST = 2


def breaking(conditions: SizeConditions, arrays: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return batches at which a condition does not hold. arrays: those with dynamic rows, in the order of the
    conditions.
    """
    tensors = tuple(arrays.values())
    groups = dimensions.groups(tensors, [{0}] * len(tensors))
    found: list[dict[str, torch.Tensor]] = []
    for condition in conditions.all[:_MOST]:
        for changes in dimensions.allowed(tensors, conditions.candidates(condition, groups)):
            if conditions.breaks(condition, dimensions.shapes(tensors, changes)):
                found.append(dict(zip(arrays, dimensions.resized(tensors, changes))))
                break
    return found


MODES = ("step", "gradients")
_TARGET = "target"
_NAMED = 5  # norms in a note


@dataclasses.dataclass(frozen=True)
class TrainingExportResult:
    """Result of export_training_step.

    path, evaluation_path, state_path: the three files. model: the step's graph. inputs: names of a
    batch's arrays. outputs: all outputs of the graph, the loss first. state: what a step changes.
    notes: where the step is not torch's, in sentences.
    """

    path: pathlib.Path
    evaluation_path: pathlib.Path
    state_path: pathlib.Path
    model: ir.Model
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    state: tuple[str, ...]
    verification: Verification
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as the command line prints it with --json."""
        return {
            "path": str(self.path),
            "evaluation_path": str(self.evaluation_path),
            "state_path": str(self.state_path),
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "state": list(self.state),
            "verification": self.verification.to_dict(),
            "notes": list(self.notes),
        }


def export_training_step(
    model: nn.Module,
    loss: Loss,
    batch: Sequence[torch.Tensor],
    path: str | os.PathLike[str],
    *,
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd",
    optimizer_options: Mapping[str, Any] | None = None,
    mode: Literal["step", "gradients"] = "step",
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    outputs: Sequence[str] = (),
    standard_ops_only: bool = False,
    cpu_kernels: bool = True,
    dynamic: bool | Mapping[str, Mapping[int, str] | Sequence[int]] = True,
    verify: bool = True,
    input_names: Sequence[str] | None = None,
    overwrite: bool = False,
) -> TrainingExportResult:
    """Write one training step of `model` as an ONNX graph that stock ONNX Runtime runs.

    The graph computes forward, loss, gradients and the optimizer's update. Each state tensor (parameters,
    buffers, the optimizer's) is an input `name` and, where a step changes it, an output `name.new`; names
    are those of the state_dict, and `optimizer.<parameter>.<kind>` with torch.optim's kinds. The learning
    rate is the input `lr`, float64 (). Outputs are the loss, the chosen outputs of the model, then state.
    Module and tensors stay untouched. docs/training.md describes files, operators and limits.

    Three files appear together: `path`, the graph; `<stem>.eval.onnx`, loss and outputs in eval mode;
    `<stem>.safetensors`, the initial state.

    Args:
        model: in train mode. Submodules in eval mode stay so: their batch norms use fixed statistics.
            Parameters with requires_grad False are not trained.
        loss: called as loss(model(*inputs), target), returns one number. Tensors that it holds are constants.
        batch: example (*inputs, target); tensors.
        optimizer: "sgd", "adam" or "adamw".
        optimizer_options: torch.optim's, with its names and defaults: lr, momentum, dampening, weight_decay,
            nesterov; or lr, betas, eps, weight_decay, amsgrad. For parameters with a rate or decay of their own "groups":
            [{"params": "head.*", "lr": 1e-2}, ...], names or patterns of names; and "decay_norms_and_biases": False.
        mode: "step"; "gradients": no optimizer, the graph returns `name.grad` for each trained parameter.
        clip_grad_norm: largest 2-norm of all gradients together, as torch.nn.utils.clip_grad_norm_.
        accumulate: number of batches whose gradients are averaged for one update.
        outputs: names of model outputs that a step returns ("output", "output_0", ..., or a dict's keys).
        standard_ops_only: batch norm in standard operators, for runtimes that cannot load the library.
        cpu_kernels: convolutions, the gradients of ReLU and max pooling and the optimizer's update in our CPU
            kernels, float32; False for graphs that another execution provider runs. standard_ops_only has none.
        dynamic: dimension 0 of every array of the batch is dynamic; or of those that a mapping names, as in
            {"x": [0], "target": {0: "rows"}}. Arrays of equal size there share it. Other dimensions are fixed.
        verify: run the step in ONNX Runtime and compare it on `batch` with a step of a copy of `model` itself.
        input_names: names of the batch's arrays; by default forward's parameter names and "target".
        overwrite: replace those of the three files that exist.

    Warns:
        NotVerifiedWarning: the files were written, and nothing could verify them.

    Raises:
        UsageError: an argument is wrong, or the loss is not one number that depends on a parameter.
        UnsupportedModelError: the step cannot be one graph; names the operator or module, and a way out.
        VerificationError: the graph differs from torch; no file is written.
    """
    torch_versions.require(torch_versions.DYNAMO_EXPORTER, "a training step")
    arguments.check_path(path, overwrite)
    for each in dataclasses.astuple(step_paths(path)):
        arguments.check_path(each, overwrite)
    tensors = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
    _check(model, loss, tensors, mode, clip_grad_norm, accumulate)
    names = _names(model, tensors, input_names)
    original = copy_model(model, share_parameters=True) if verify else None
    problem = Problem(model, loss, training=True)
    _refuse_same_names({*problem.state(), LOSS, LOSS_WEIGHT, LEARNING_RATE, SEED}, names)
    groups = wrapper.group_names(problem.model)
    trained = {name: problem.parameters[name] for name in problem.trainable}
    rule, own = optimizers.make_groups(optimizer, optimizer_options, trained) if mode == "step" else (None, {})

    varying = _varying(names, tensors, dynamic)
    # A size of 1 would be taken for a constant.
    tensors = tuple(torch.cat([t, t]) if name in varying and len(t) == 1 else t for name, t in zip(names, tensors))
    arrays = dict(zip(names, tensors))
    evaluation, evaluation_outputs = _evaluation(model, loss, arrays, varying, standard_ops_only)
    cpu_kernels = cpu_kernels and not standard_ops_only
    step = Step(problem, rule, _chosen(outputs, evaluation_outputs), clip_grad_norm, accumulate, cpu_kernels, own)
    state = step.initial_state()
    lr = None if rule is None else torch.tensor(rule.lr, dtype=torch.float64)

    def run(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        recorder = Recorder()
        taken = tuple(named[name] for name in names)
        return {**step(named, taken, named.get(LEARNING_RATE), named[LOSS_WEIGHT], recorder), **recorder.named()}

    given = {**state, **arrays, **({} if lr is None else {LEARNING_RATE: lr})}
    given[LOSS_WEIGHT] = torch.ones((), dtype=torch.float64)
    made, recorded = tracing.trace(
        run,
        given,
        varying,
        problem,
        differentiates=True,
        standard_ops_only=standard_ops_only,
        cpu_kernels=cpu_kernels,
    )
    reached = take(made)
    graph.finish(made, groups)
    gradients = graph.prepare(made, returns_gradients=rule is None)
    result_names = tuple(str(value.name) for value in made.graph.outputs)
    used = _used(made, evaluation)
    kinds = {name: kind for name, kind in step.kinds().items() if name in used or name in problem.kinds}
    description = Description(
        mode=mode,
        inputs=tuple(names),
        outputs=tuple(step.outputs),
        evaluation_outputs=evaluation_outputs,
        state=kinds,
        aliases=problem.aliases,
        gradients=gradients,
        optimizer="" if rule is None else optimizer,
        optimizer_options={} if rule is None else {**dataclasses.asdict(rule), "groups": optimizers.describe(own)},
        accumulate=accumulate,
        standard_ops_only=standard_ops_only,
        indices={name: ranges for name, ranges in recorded.indices.items() if name in names},
    )
    made.metadata_props[TRAINING_METADATA] = description.to_json()
    checked = Verification.skipped("not asked for")
    if original is not None:
        others = breaking(recorded.sizes, {name: arrays[name] for name in names if name in varying})
        checked = verification.check(
            made, step, original, arrays, lr, [{**arrays, **other} for other in others], kink_names(made, reached)
        )
        if checked.status == "failed":
            raise VerificationError(
                f"{path}: the exported step differs from torch, nothing was written: {checked.summary(folds=False)}"
            )
    paths = step_paths(path)
    initial = {name: state[name].detach().cpu().numpy() for name in kinds}
    write(paths, made, evaluation, initial)
    if original is not None:
        checked.warn(paths.step, stacklevel=2)
    return TrainingExportResult(
        path=pathlib.Path(paths.step),
        evaluation_path=pathlib.Path(paths.evaluation),
        state_path=pathlib.Path(paths.state),
        model=made,
        inputs=tuple(names),
        outputs=result_names,
        state=tuple(name.removesuffix(NEW_SUFFIX) for name in result_names if name.endswith(NEW_SUFFIX)),
        verification=checked,
        notes=_notes(problem),
    )


def _notes(problem: Problem) -> tuple[str, ...]:
    norms = problem.updated_twice()
    if not norms:
        return ()
    more = f" and {len(norms) - _NAMED} more" if len(norms) > _NAMED else ""
    return (
        f"{', '.join(norms[:_NAMED])}{more}: running statistics are updated once in a step; torch updates them twice, since"
        " torch.utils.checkpoint runs the forward again",
    )


def _evaluation(
    model: nn.Module,
    loss: Loss,
    arrays: dict[str, torch.Tensor],
    varying: dict[str, str],
    standard_ops_only: bool,
) -> tuple[ir.Model, tuple[str, ...]]:
    """Return the graph of loss and outputs in eval mode, its state as inputs, and the names of the outputs."""
    problem = Problem(model, loss, training=False)
    state = problem.state()

    def run(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = [named[name] for name in arrays]
        with torch.no_grad():
            output = problem.forward(
                {name: named[name] for name in problem.parameters},
                {name: named[name] for name in problem.buffers},
                tuple(batch[:-1]),
            )
            value = problem.loss_of(output, batch[-1])
        flat = problem.flatten(output)
        return {LOSS: value, **dict(zip(wrapper.output_names(problem.output_spec, len(flat)), flat))}

    made, _ = tracing.trace(
        run,
        {**state, **arrays},
        varying,
        problem,
        differentiates=False,
        standard_ops_only=standard_ops_only,
        cpu_kernels=False,
    )
    graph.finish(made, {})
    return made, tuple(str(value.name) for value in made.graph.outputs[1:])


def _used(*models: ir.Model) -> set[str]:
    return {str(value.name) for model in models for value in model.graph.inputs}


def _chosen(outputs: Sequence[str], known: tuple[str, ...]) -> dict[str, int]:
    for name in [outputs] if isinstance(outputs, str) else outputs:
        if name not in known:
            raise UsageError(f"outputs: got {name!r}, expected names among the model's outputs {', '.join(known)}")
    return {name: known.index(name) for name in ([outputs] if isinstance(outputs, str) else outputs)}


def _names(model: nn.Module, tensors: tuple[torch.Tensor, ...], given: Sequence[str] | None) -> list[str]:
    if given is None:
        return [*arguments.input_names(model, len(tensors) - 1), _TARGET]
    if len(given) != len(tensors):
        raise UsageError(
            f"input_names: got {len(given)} names, expected {len(tensors)}, one for each array of the batch"
        )
    return list(given)


def _varying(
    names: list[str],
    tensors: tuple[torch.Tensor, ...],
    dynamic: bool | Mapping[str, Mapping[int, str] | Sequence[int]],
) -> dict[str, str]:
    """Return the arrays whose dimension 0 is dynamic, with its name. Equal sizes in the example have one name."""
    chosen = Dimensions.chosen(names, tensors, dynamic).free
    if isinstance(dynamic, bool):
        chosen = tuple({0: ""} if dynamic and tensor.dim() else {} for tensor in tensors)
    asked = {} if isinstance(dynamic, bool) else dynamic
    varying: dict[str, str] = {}
    labels: dict[int, str] = {}
    for name, tensor, free in zip(names, tensors, chosen):
        fixed = [dimension for dimension in free if dimension]
        if fixed:
            raise UsageError(
                f"dynamic: {name}: got dimension {fixed[0]}, expected 0: only the rows of a batch can be dynamic in a "
                "training step; export one step for each image size"
            )
        if not free:
            continue
        given = asked.get(name)
        own = given.get(0, "") if isinstance(given, Mapping) else ""
        size = 2 if len(tensor) == 1 else len(tensor)  # one row is doubled for the export
        label = labels.setdefault(size, own or (tracing.BATCH if not labels else f"{name}_{tracing.BATCH}"))
        if (own and own != label) or list(labels.values()).count(label) > 1:
            raise UsageError(
                f"dynamic: {name}: got {label if own == label else own!r} for dimension 0, expected one name for each size in "
                f"the example, and this size is {size}; arrays of equal size share it: "
                + ", ".join(f"{shown} {rows}" for rows, shown in labels.items())
            )
        varying[name] = label
    return varying


def _refuse_same_names(taken: set[str], names: list[str]) -> None:
    for name in names:
        if name in taken or names.count(name) > 1:
            raise UsageError(
                f"input {name!r}: another input, or the state, has this name; choose others with input_names"
            )


def _check(
    model: nn.Module,
    loss: Loss,
    batch: tuple[Any, ...],
    mode: str,
    clip_grad_norm: float | None,
    accumulate: int,
) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    if not model.training:
        raise UsageError(
            "model: got a module in eval mode, expected one in train mode; call model.train() "
            "(submodules that are put into eval mode afterwards keep fixed statistics)"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("model: got no parameter with requires_grad, expected at least one to train")
    if not callable(loss):
        raise UsageError(f"loss: got {type(loss).__name__}, expected a function of (model output, target)")
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise UsageError("loss: has parameters to train; make it a part of the model, so that they get names")
    if len(batch) < 2:
        raise UsageError(f"batch: got {len(batch)} tensors, expected (*inputs, target)")
    for index, value in enumerate(batch):
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"batch[{index}]: got {type(value).__name__}, expected a torch.Tensor")
        if value.dim() and value.shape[0] == 0:
            raise UsageError(f"batch[{index}]: got an empty batch of shape {tuple(value.shape)}, expected rows")
    if mode not in MODES:
        raise UsageError(f"mode: got {mode!r}, expected one of {', '.join(MODES)}")
    if clip_grad_norm is not None and not 0.0 < clip_grad_norm < float("inf"):
        raise UsageError(f"clip_grad_norm: got {clip_grad_norm}, expected a finite number > 0, or None")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"accumulate: got {accumulate!r}, expected a whole number >= 1")
    if mode == "gradients" and (clip_grad_norm is not None or accumulate != 1):
        raise UsageError('mode="gradients" returns the gradients as they are; clip and accumulate them yourself')
