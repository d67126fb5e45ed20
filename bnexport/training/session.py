"""TrainingSession: runs a training graph in ONNX Runtime on NumPy arrays. Only a group needs torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from bnexport import model_io
from bnexport.errors import MalformedModelError, MissingFileError, UsageError
from bnexport.model_io.validate import printable
from bnexport.model_io.write import check_new
from bnexport.native import library
from bnexport.runtime import engine
from bnexport.runtime.sessions import import_onnxruntime
from bnexport.schema import TRAINING_METADATA
from bnexport.training import contract
from bnexport.training.processes import SingleProcess
from bnexport.training.state import (
    DTYPES,
    LOSS,
    SEED,
    Description,
    Kind,
    check_indices,
    compare,
    load_state,
    save_state,
    step_paths,
)

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch.distributed import ProcessGroup

    from bnexport.folding import FoldResult
    from bnexport.training.processes import Parallel


Array = np.ndarray[Any, Any]


class Evaluation(NamedTuple):
    """Loss in eval mode, and the model's outputs by name."""

    loss: float
    outputs: dict[str, Array]


class TrainingSession:
    """A training step that `bnexport.export_training_step` wrote, with its state.

    Args:
        path: the step's graph; its two companions lie beside it (docs/training.md).
        providers: ONNX Runtime's execution providers in order of preference; None for CPU.
        session_options: an onnxruntime.SessionOptions to start from, for the number of threads and such. Its memory
            patterns are switched off, which cost memory here.
        group: a torch.distributed group with a backend for CPU tensors; None trains in this process alone. Each
            process calls step with its rows, one at least; together they make the step
            of one process with the joint batch, and have the same state bits afterwards. The group's timeout
            bounds the waiting for a process that died. evaluate is each process's own.
        loss_reduction: for a group, how the loss joins the rows of a batch: "mean" or "sum".

    learning_rate may be set before each step. The same state and batches give the same bits. A step that
    fails leaves the state as it was. Not for several threads at a time.

    Raises:
        MalformedModelError: a file is missing, damaged, or not a training graph.
        LibraryError: the graph holds our nodes and a compiled library cannot be loaded.
        MissingDependencyError: onnxruntime or safetensors is not installed.
        GroupError: the group has no CPU backend, or torch.distributed is not initialised.
        UnsupportedModelError: for a group, the step would differ between processes (docs/training.md).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        providers: Sequence[str | tuple[str, dict[str, Any]]] | None = None,
        *,
        session_options: Any = None,
        group: ProcessGroup | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        self._paths = step_paths(path)
        self._providers = providers
        self._options = session_options
        model = self._load(self._paths.step)
        self._description = Description.from_json(model.metadata_props.get(TRAINING_METADATA), self._paths.step)
        self.learning_rate = self._description.learning_rate
        self.outputs: dict[str, Array] = {}
        initial = load_state(self._paths.state)
        expected = self._description.state
        if set(initial) != set(expected):
            differing = ", ".join(sorted(set(initial) ^ set(expected))[:5])
            raise MalformedModelError(
                f"{self._paths.state}: got the state of another graph than {self._paths.step}: {differing}; export it again"
            )
        initial = {name: initial[name] for name in expected}
        if group is None:
            session = self._open(model, self._paths.step)
            self._steps: SingleProcess | Parallel = SingleProcess(session, self._description, initial)
        else:
            from bnexport.training.processes import Parallel

            self._steps = Parallel(self._paths.step, self._description, initial, group, loss_reduction, self._open)
        self._state = self._steps.state
        self._evaluation: Any = None

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of a batch's arrays, the target last."""
        return self._description.inputs

    @property
    def seed(self) -> int:
        """The seed of the next step's dropout masks; each step adds 1."""
        return int(self._state.get(SEED)) if SEED in self._description.state else 0

    @seed.setter
    def seed(self, value: int) -> None:
        if not 0 <= value < 2**63:
            raise UsageError(f"seed: got {value}, expected a whole number within [0, 2^63)")
        if SEED in self._description.state:
            self._set({SEED: np.array(value, np.int64)})

    def step(self, batch: Sequence[Array], *, weight: float | None = None) -> float:
        """Run one training step on (*inputs, target). Return the loss, that of the old parameters.

        The model outputs that were chosen at export are in `outputs` afterwards, by name.

        In a group every process makes the step, with its rows; the loss is that of the joint batch, the outputs are
        those of this process's rows. weight: for a loss that is a mean, how much this process's mean counts in the
        joint one; None for its number of rows. Pass what the loss divides by where that is not the number of rows: the
        pixels that are not ignored, the sum of class weights.

        Raises DivergedError where the loss or a new weight would be NaN.
        """
        self._require_mode("step")
        return self._train(batch, weight)

    def gradients(self, batch: Sequence[Array], *, weight: float | None = None) -> tuple[float, dict[str, Array]]:
        """Compute the loss on (*inputs, target) and the gradients by parameter name, of a graph with
        mode="gradients".

        Statistics of batch norms are updated; parameters are not: update them with `load_state_dict`. In a
        group, both are those of the joint batch; see `step`.
        """
        self._require_mode("gradients")
        return self._train(batch, weight), self._steps.gradients()

    def evaluate(self, batch: Sequence[Array]) -> Evaluation:
        """Compute loss and model outputs on (*inputs, target) in eval mode, with the current state."""
        onnxruntime = import_onnxruntime()
        if self._evaluation is None:
            self._evaluation = self._open(self._load(self._paths.evaluation), self._paths.evaluation)
        names = {value.name for value in self._evaluation.get_inputs()}
        given = {name: value for name, value in self._state.ort_values() if name in names}
        for name, array in self._feeds(batch, self._steps.inputs).items():
            if name in names:
                given[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        wanted = [LOSS, *self._description.evaluation_outputs]
        loss, *outputs = (value.numpy() for value in self._evaluation.run_with_ort_values(wanted, given))
        return Evaluation(float(loss), {name: np.array(array) for name, array in zip(wanted[1:], outputs)})

    def state_dict(self) -> dict[str, Array]:
        """Return copies of parameters and buffers under torch's names, as the model's state_dict has them."""
        tensors = {name: self._state.get(name) for name in self._named(Kind.PARAMETER, Kind.BUFFER)}
        return {**tensors, **{alias: tensors[name] for alias, name in self._description.aliases.items()}}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load parameters and buffers: NumPy arrays or objects that NumPy converts, such as torch tensors.

        The optimizer's state stays. strict: every name must be there; else those that are missing stay.

        Raises UsageError that lists missing and unexpected names and shapes that differ; nothing is changed.
        """
        expected = self.state_dict()
        given = dict(state) if strict else {**expected, **state}
        arrays = compare(expected, given, "state_dict")
        self._set({name: arrays[name] for name in self._named(Kind.PARAMETER, Kind.BUFFER)})

    def save_checkpoint(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write all state, the optimizer's and the seed included, as one safetensors file, atomically.

        overwrite: replace `path` if it exists. In a group the state is the
        same everywhere: rank 0 saves.
        """
        check_new(path, overwrite)
        save_state({name: self._state.get(name) for name in self._state.names()}, path)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Resume from a checkpoint; the following steps are bit-exact, as if training had not stopped.

        The learning rate is not part of it. Raises UsageError for the checkpoint of another model, which lists
        what differs, and MalformedModelError for a file that is damaged. In a group every process loads it.
        """
        current = {name: self._state.get(name) for name in self._state.names()}
        self._set(compare(current, load_state(path), os.fspath(path)))

    def export_inference(
        self, path: str | os.PathLike[str], *, verify: bool = True, overwrite: bool = False
    ) -> FoldResult:
        """Write the model with the current weights for inference: batch norms folded, compared with the unfolded.

        overwrite: replace `path` if it exists, as a whole.

        Raises VerificationError when the folded model differs, and UsageError where `path` exists; no file is written.
        """
        from bnexport.training import graph

        state = {name: self._state.get(name) for name in self._state.names()}
        return graph.export_inference(
            self._paths.evaluation, self._description, state, path, verify=verify, overwrite=overwrite
        )

    def _load(self, path: str) -> ir.Model:
        if not os.path.isfile(path):
            raise MissingFileError(f"{path}: got no such file, expected a training graph; check the path")
        model = model_io.load(path)
        if contract.DOMAIN in model.opset_imports:
            _require_cpu(path, self._providers or ())
        return model

    def _open(self, model: ir.Model, path: str, options: Any = None) -> Any:
        """Open a session for a checked graph of `path`: ONNX Runtime opens no file itself."""
        options = options or self._options or engine.default_options(quiet=False)
        # One block planned for all activations takes a tenth more memory than allocations one by one, and no less time.
        options.enable_mem_pattern = False
        if set(model.opset_imports) - {""}:
            library.register(options, training=True)
        try:
            return engine.open(model, self._providers, options=options, keep_options=True).session
        except engine.EngineFailure as failure:
            reason = failure.newer or f"ONNX Runtime cannot load it: {printable(failure.detail)}"
            raise MalformedModelError(f"{path}: {reason}") from failure

    def _named(self, *kinds: Kind) -> list[str]:
        return [name for name, kind in self._description.state.items() if kind in kinds]

    def _require_mode(self, mode: str) -> None:
        if self._description.mode != mode:
            own, other = ("step", "gradients") if mode == "gradients" else ("gradients", "step")
            raise UsageError(
                f"{self._paths.step}: got a graph of mode {own!r}, expected {other!r}; "
                f"use session.{own}(), or export again with mode={other!r}"
            )

    def _set(self, values: Mapping[str, Array]) -> None:
        self._state.set(values)
        self._steps.invalidate()

    def _train(self, batch: Sequence[Array], weight: float | None) -> float:
        try:
            feeds = self._feeds(batch, self._steps.inputs)
        except UsageError:
            self._steps.refuse()
            raise
        rows = next((len(array) for array in feeds.values() if array.ndim), 1)
        needed = {name: array for name, array in feeds.items() if name in self._steps.inputs}
        names = self._description.outputs
        loss, outputs = self._steps.run(needed, rows, weight, self.learning_rate, names)
        self.outputs = dict(zip(names, outputs))
        return loss

    def _feeds(self, batch: Sequence[Array], inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Return the arrays of a batch by name, checked against the inputs of a graph."""
        names = self._description.inputs
        if len(batch) != len(names):
            raise UsageError(f"batch: got {len(batch)} arrays, expected {len(names)}: {', '.join(names)}")
        feeds = {}
        for name, value in zip(names, batch):
            array = np.asarray(value, order="C")
            specification = inputs.get(name)
            if specification is not None:
                _check(name, array, specification)
                check_indices(name, array, self._description.indices.get(name, ()))
            feeds[name] = array
        return feeds


def _require_cpu(path: str, providers: Sequence[str | tuple[str, dict[str, Any]]]) -> None:
    names = [provider if isinstance(provider, str) else provider[0] for provider in providers]
    if any(name != "CPUExecutionProvider" for name in names):
        raise UsageError(
            f"providers: got {', '.join(names)}, expected CPUExecutionProvider: {path} holds kernels for CPUs; "
            "export the step with cpu_kernels=False"
        )


def _check(name: str, array: Array, specification: Any) -> None:
    dtype = DTYPES.get(specification.type, specification.type)
    if array.dtype.name != dtype:
        raise UsageError(f"{name}: got an array of {array.dtype}, expected {dtype}; convert it with .astype('{dtype}')")
    sizes = list(specification.shape)
    fits = len(sizes) == array.ndim and all(
        not isinstance(size, int) or size == actual for size, actual in zip(sizes, array.shape)
    )
    if not fits:
        shape = ", ".join(str(size) for size in sizes) + "," * (len(sizes) == 1)
        raise UsageError(f"{name}: got shape {array.shape}, expected ({shape})")
    if array.ndim and array.shape[0] == 0:
        raise UsageError(
            f"{name}: got an empty batch of shape {array.shape}, expected rows, in every process of a group"
        )
