"""TrainingSession: runs a training graph in ONNX Runtime on NumPy arrays. Nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bnexport.errors import LibraryError, MalformedModelError, UsageError
from bnexport.runtime import library
from bnexport.runtime.session import import_onnxruntime
from bnexport.training import files
from bnexport.training.description import GRADIENT_SUFFIX, LEARNING_RATE, LOSS, METADATA_KEY, SEED, Description, Kind
from bnexport.training.state import State, compare

if TYPE_CHECKING:
    from bnexport.folding import FoldResult

Array = np.ndarray[Any, Any]

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    **{f"tensor({name})": name for name in ("float16", "int8", "int16", "int32", "int64", "uint8")},
}


class Evaluation(NamedTuple):
    """The loss in eval mode, and the model's outputs by name."""

    loss: float
    outputs: dict[str, Array]


class TrainingSession:
    """A training step that `bnexport.export_training_step` wrote, with its state.

    Args:
        path: the step's graph; its two companions lie beside it (docs/training.md).
        providers: ONNX Runtime's execution providers in order of preference; None for CPU.
        session_options: an onnxruntime.SessionOptions to start from, for the number of threads and such.

    learning_rate may be set before each step. The same state and batches give the same bits. A step that
    fails leaves the state as it was. Not for several threads at a time.

    Raises:
        MalformedModelError: a file is missing, damaged, or not a training graph.
        LibraryError: the graph holds our nodes and the compiled library cannot be loaded.
        MissingDependencyError: onnxruntime or safetensors is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        providers: Sequence[str | tuple[str, dict[str, Any]]] | None = None,
        *,
        session_options: Any = None,
    ) -> None:
        self._paths = files.paths(path)
        self._providers = providers
        self._options = session_options
        self._session = self._open(self._paths.step)
        metadata = self._session.get_modelmeta().custom_metadata_map
        self._description = Description.from_json(metadata.get(METADATA_KEY), self._paths.step)
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self.learning_rate = self._description.learning_rate
        self.outputs: dict[str, Array] = {}
        initial = files.load_state(self._paths.state)
        expected = self._description.state
        if set(initial) != set(expected):
            differing = ", ".join(sorted(set(initial) ^ set(expected))[:5])
            raise MalformedModelError(
                f"{self._paths.state}: got the state of another graph than {self._paths.step}: {differing}; export it again"
            )
        self._state = State(self._session, {name: initial[name] for name in expected})
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
            self._state.set({SEED: np.array(value, np.int64)})

    def step(self, batch: Sequence[Array]) -> float:
        """One training step on (*inputs, target). Returns the loss, that of the old parameters.

        The model outputs that were chosen at export are in `outputs` afterwards, by name.
        """
        self._require_mode("step")
        learning_rate = {LEARNING_RATE: np.array(self.learning_rate, np.float64)}
        loss, *outputs = self._run({**self._feeds(batch), **learning_rate}, [LOSS, *self._description.outputs])
        self.outputs = dict(zip(self._description.outputs, outputs))
        return float(loss)

    def gradients(self, batch: Sequence[Array]) -> tuple[float, dict[str, Array]]:
        """The loss on (*inputs, target) and the gradients by parameter name, of a graph with mode="gradients".

        Statistics of batch norms are updated; parameters are not: update them with `load_state_dict`.
        """
        self._require_mode("gradients")
        names = self._description.gradients
        wanted = [LOSS, *self._description.outputs, *(name + GRADIENT_SUFFIX for name in names)]
        results = dict(zip(wanted, self._run(self._feeds(batch), wanted)))
        self.outputs = {name: results[name] for name in self._description.outputs}
        return float(results[LOSS]), {name: results[name + GRADIENT_SUFFIX] for name in names}

    def evaluate(self, batch: Sequence[Array]) -> Evaluation:
        """Loss and model outputs on (*inputs, target) in eval mode, with the current state."""
        onnxruntime = import_onnxruntime()
        if self._evaluation is None:
            self._evaluation = self._open(self._paths.evaluation)
        names = {value.name for value in self._evaluation.get_inputs()}
        values = {name: value for name, value in self._state.ort_values() if name in names}
        for name, array in self._feeds(batch).items():
            if name in names:
                values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        wanted = [LOSS, *self._description.evaluation_outputs]
        loss, *outputs = (value.numpy() for value in self._evaluation.run_with_ort_values(wanted, values))
        return Evaluation(float(loss), {name: np.array(array) for name, array in zip(wanted[1:], outputs)})

    def state_dict(self) -> dict[str, Array]:
        """Copies of parameters and buffers under torch's names, as the model's state_dict has them."""
        tensors = {name: self._state.get(name) for name in self._named(Kind.PARAMETER, Kind.BUFFER)}
        return {**tensors, **{alias: tensors[name] for alias, name in self._description.aliases.items()}}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Takes over parameters and buffers: NumPy arrays or what NumPy converts, such as torch tensors.

        The optimizer's state stays. strict: every name must be there; else those that are missing stay.

        Raises UsageError that lists missing and unexpected names and shapes that differ; nothing is changed.
        """
        expected = self.state_dict()
        given = dict(state) if strict else {**expected, **state}
        arrays = compare(expected, given, "state_dict")
        self._state.set({name: arrays[name] for name in self._named(Kind.PARAMETER, Kind.BUFFER)})

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Writes all state, the optimizer's and the seed included, as one safetensors file, atomically."""
        files.save_state({name: self._state.get(name) for name in self._state.names()}, path)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Goes on from a checkpoint: the steps that follow give the bits they would have given without a stop.

        The learning rate is not part of it. Raises UsageError for the checkpoint of another model, which lists
        what differs, and MalformedModelError for a file that is damaged.
        """
        current = {name: self._state.get(name) for name in self._state.names()}
        self._state.set(compare(current, files.load_state(path), os.fspath(path)))

    def export_inference(self, path: str | os.PathLike[str], *, verify: bool = True) -> FoldResult:
        """Writes the model with the current weights for inference: batch norms folded, compared with the unfolded.

        Raises VerificationError when the folded model differs; no file is written.
        """
        from bnexport.training import inference

        state = {name: self._state.get(name) for name in self._state.names()}
        return inference.export_inference(self._paths.evaluation, self._description, state, path, verify=verify)

    def _open(self, path: str) -> Any:
        """A session for one of the two graphs. One of standard operators needs no library."""
        onnxruntime = import_onnxruntime()
        if not os.path.isfile(path):
            raise MalformedModelError(f"{path}: got no such file, expected a training graph; check the path")
        options = self._options if self._options is not None else onnxruntime.SessionOptions()
        missing: LibraryError | None = None
        if path == self._paths.step:
            try:
                library.register(options)
            except LibraryError as error:
                missing = error
        try:
            return onnxruntime.InferenceSession(
                path, options, providers=list(self._providers) if self._providers else ["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime raises one class for each status code
            if missing is not None:
                raise missing from error
            raise MalformedModelError(f"{path}: ONNX Runtime cannot load it: {str(error).strip()}") from error

    def _named(self, *kinds: Kind) -> list[str]:
        return [name for name, kind in self._description.state.items() if kind in kinds]

    def _require_mode(self, mode: str) -> None:
        if self._description.mode != mode:
            own, other = ("step", "gradients") if mode == "gradients" else ("gradients", "step")
            raise UsageError(
                f"{self._paths.step}: got a graph of mode {own!r}, expected {other!r}; "
                f"use session.{own}(), or export again with mode={other!r}"
            )

    def _run(self, feeds: dict[str, Array], outputs: list[str]) -> list[Array]:
        return self._state.step({name: array for name, array in feeds.items() if name in self._inputs}, outputs)

    def _feeds(self, batch: Sequence[Array]) -> dict[str, Array]:
        """The arrays of a batch by name, checked against the graph's inputs."""
        names = self._description.inputs
        if len(batch) != len(names):
            raise UsageError(f"batch: got {len(batch)} arrays, expected {len(names)}: {', '.join(names)}")
        feeds = {}
        for name, value in zip(names, batch):
            array = np.asarray(value, order="C")
            specification = self._inputs.get(name)
            if specification is not None:
                _check(name, array, specification)
            feeds[name] = array
        return feeds


def _check(name: str, array: Array, specification: Any) -> None:
    dtype = _DTYPES.get(specification.type, specification.type)
    if array.dtype.name != dtype:
        raise UsageError(f"{name}: got an array of {array.dtype}, expected {dtype}; convert it with .astype('{dtype}')")
    sizes = list(specification.shape)
    fits = len(sizes) == array.ndim and all(
        not isinstance(size, int) or size == actual for size, actual in zip(sizes, array.shape)
    )
    if not fits:
        shape = ", ".join(str(size) for size in sizes)
        raise UsageError(f"{name}: got shape {array.shape}, expected ({shape})")
    if array.ndim and array.shape[0] == 0:
        raise UsageError(f"{name}: got an empty batch of shape {array.shape}, expected rows")
