"""What a training graph says about itself, and the state of a session: its files, and its tensors in two sets of memory."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bnexport.errors import DivergedError, MalformedModelError, UsageError
from bnexport.schema import NEW_SUFFIX, TRAINING_METADATA

# Description of a training graph (inputs, outputs, state) as JSON in the model's metadata: the exporter writes it, a session
# reads it without torch.

VERSION = 2

LOSS = "loss"
LEARNING_RATE = "lr"
LOSS_WEIGHT = "loss_weight"
SEED = "seed"
STEP = "optimizer.step"
ACCUMULATED = "optimizer.accumulated"
GRADIENT_SUFFIX = ".grad"
# NumPy's names of ONNX Runtime's types.
DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    **{f"tensor({name})": name for name in ("bool", "float16", "int8", "int16", "int32", "int64", "uint8")},
}


class Kind(str, enum.Enum):
    """Kind of a state tensor. Constants are buffers that the model's state_dict leaves out."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    OPTIMIZER = "optimizer"
    SEED = "seed"

    __str__ = str.__str__  # as enum.StrEnum, which is of Python 3.11


@dataclasses.dataclass(frozen=True)
class Description:
    """Description of one training graph.

    inputs: names of a batch's arrays, the target last. outputs: the model outputs that a step returns;
    evaluation_outputs: all of them. state: kind of each state tensor, in the order of the state_dict.
    aliases: further names of shared tensors in the state_dict. gradients: parameters that have gradients;
    the graph returns them in mode "gradients", and else computes them under the same names.
    standard_ops_only: batch norm, if any, is in standard operators. learning_rate: the one that a session
    starts with. indices: for arrays of labels or indices their ranges, each [first, last, ignored...].
    """

    mode: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    evaluation_outputs: tuple[str, ...]
    state: dict[str, Kind]
    aliases: dict[str, str]
    gradients: tuple[str, ...]
    optimizer: str
    optimizer_options: dict[str, Any]
    accumulate: int
    standard_ops_only: bool
    indices: dict[str, list[list[int]]] = dataclasses.field(default_factory=dict)

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer_options.get("lr", 0.0))

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str | None, where: str) -> Description:
        """Parse the description. Raises MalformedModelError for a graph that export_training_step did not write."""
        if text is None:
            raise MalformedModelError(
                f"{where}: got a model without the metadata {TRAINING_METADATA!r}, expected a training graph; "
                "write one with `bnexport train-export` or bnexport.export_training_step"
            )
        try:
            values = json.loads(text)
            version = values.pop("version")
            if version != VERSION:
                raise MalformedModelError(
                    f"{where}: got a training graph of version {version}, expected {VERSION}; export it again"
                )
            for name in ("inputs", "outputs", "evaluation_outputs", "gradients"):
                values[name] = tuple(values[name])
            values["state"] = {name: Kind(kind) for name, kind in values["state"].items()}
            return cls(**values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MalformedModelError(
                f"{where}: its metadata {TRAINING_METADATA!r} is damaged ({error}); export the graph again"
            ) from error


if TYPE_CHECKING:
    import onnx_ir as ir


# The three files of a training step, and their joint replacement.
#
#     step.onnx           one training step; this name is what a TrainingSession takes
#     step.eval.onnx      loss and outputs in eval mode
#     step.safetensors    the initial state
#
# Both graphs hold no weights: all state comes in as inputs. The step's graph is renamed into place last.

_ENTRY = "bnexport.training.state"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Paths:
    step: str
    evaluation: str
    state: str


def step_paths(path: str | os.PathLike[str]) -> Paths:
    step = os.fspath(path)
    stem = step.removesuffix(".onnx")
    return Paths(step, f"{stem}.eval.onnx", f"{stem}.safetensors")


def write(names: Paths, step: ir.Model, evaluation: ir.Model, state: Mapping[str, np.ndarray]) -> None:
    from bnexport import model_io

    staged = []
    try:
        for model, name in ((evaluation, names.evaluation), (step, names.step)):
            staged.append(model_io.stage(model, name))
        save_state(state, names.state)
        for file in staged:
            file.commit()
    finally:
        for file in staged:
            file.discard()


def save_state(state: Mapping[str, np.ndarray], path: str | os.PathLike[str]) -> None:
    """Write a state or checkpoint atomically; the same state gives the same bytes."""
    from bnexport import model_io

    model_io.save_tensors(state, {_ENTRY: json.dumps({"version": _VERSION})}, path)


def load_state(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    from bnexport import model_io

    return model_io.load_tensors(path)[0]


def digest(path: str | os.PathLike[str]) -> str:
    """Compute the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


# Checks of the labels and indices in a batch, before a step.

Array = np.ndarray[Any, Any]


def check_indices(name: str, array: Array, ranges: Sequence[Sequence[int]]) -> None:
    """Raise UsageError for whole numbers out of a range; it names the first. ranges: each [first, last, ignored...]."""
    for first, last, *ignored in ranges:
        wrong = (array < first) | (array > last)
        if ignored and wrong.any():
            wrong &= ~np.isin(array, ignored)
        if wrong.any():
            place, row = _first(wrong)
            skipped = "".join(f", or {each}, which is ignored" for each in ignored)
            raise UsageError(
                f"{name}: {array[place]} is out of bounds{row}: expected whole numbers from {first} to {last}{skipped};"
                " nothing was changed"
            )


def _first(wrong: Array) -> tuple[tuple[int, ...], str]:
    """Return the index of the first True and, in words, its row."""
    place = tuple(int(each) for each in np.unravel_index(int(wrong.argmax()), wrong.shape))
    return place, f" in row {place[0]}" if place else ""


# State of a training session: named tensors in two sets of buffers, swapped after each step.
#
# A step reads one set and writes the other, so that nothing is copied and a step that fails leaves the state
# as it was. One set would not do: a runtime may write a new parameter before its old value was read last.
# Tensors that no step changes are held once.


class State:
    """Values by name. changing: names of those that a step replaces."""

    def __init__(self, values: Mapping[str, Array], changing: Iterable[str]) -> None:
        self._read = {name: _allocate(value) for name, value in values.items()}
        self._write = {name: _allocate(values[name]) for name in changing}
        self._sets = (dict(self._read), {**self._read, **self._write})
        self.turn = 0

    def names(self) -> list[str]:
        return list(self._read)

    def get(self, name: str) -> Array:
        """Return a copy of the current value."""
        return np.array(self._read[name].numpy())

    def new_values(self) -> Iterator[tuple[str, Array]]:
        """Yield what a step has written, before `advance`; to be read only."""
        for name, value in self._write.items():
            yield name, value.numpy()

    def set(self, values: Mapping[str, Array]) -> None:
        """Overwrite current values; shapes and types are those of the state."""
        for name, value in values.items():
            self._read[name].update_inplace(np.ascontiguousarray(value).reshape(value.shape))

    def bind(self, session: Any, fixed: Mapping[str, Any] | None = None) -> Stage:
        """Bind `session` to the state in place, as its inputs `name` and outputs `name.new`.

        fixed: OrtValues of further inputs and outputs, which stay where they are.
        """
        pairs = (self._sets, self._sets[::-1])
        return Stage(self, session, [_binding(session, read, write, fixed or {}) for read, write in pairs])

    def advance(self) -> None:
        """Make the new values the current ones, once every stage of a step has run."""
        old = {name: self._read[name] for name in self._write}
        self._read.update(self._write)
        self._write = old
        self.turn = 1 - self.turn

    def ort_values(self) -> Iterator[tuple[str, Any]]:
        """Return the current values without a copy."""
        yield from self._read.items()


class Stage:
    """One graph over a state. A step is one stage, or two with an exchange between them."""

    def __init__(self, state: State, session: Any, bindings: Sequence[tuple[Any, list[str]]]) -> None:
        self._state = state
        self._session = session
        self._bindings = bindings

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] = ()) -> list[Array]:
        """Read current values, write new ones. Return copies of `outputs`, which are neither state nor fixed."""
        binding, bound = self._bindings[self._state.turn]
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        for name in outputs:
            binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        results = dict(zip([*bound, *outputs], binding.get_outputs()))
        return [np.array(results[name].numpy()) for name in outputs]


def _binding(
    session: Any, read: Mapping[str, Any], write: Mapping[str, Any], fixed: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """Create a binding; return it with the outputs that are bound in it."""
    binding = session.io_binding()
    sources = {**read, **fixed}
    for value in session.get_inputs():
        if value.name in sources:
            binding.bind_ortvalue_input(value.name, sources[value.name])
    targets = {**{name + NEW_SUFFIX: value for name, value in write.items()}, **fixed}
    bound = [value.name for value in session.get_outputs() if value.name in targets]
    for name in bound:
        binding.bind_ortvalue_output(name, targets[name])
    return binding, bound


def changing(session: Any, names: Iterable[str]) -> list[str]:
    """Return the state tensors that a step of `session` replaces."""
    outputs = {value.name for value in session.get_outputs()}
    return [name for name in names if name + NEW_SUFFIX in outputs]


def compare(expected: Mapping[str, Array], given: Mapping[str, Array], what: str) -> dict[str, Array]:
    """Return `given` in the types of `expected`.

    Raises UsageError that lists missing and unexpected names, shapes and types that differ.
    """
    arrays = {name: np.asarray(value) for name, value in given.items()}
    problems = [f"missing: {_listed(name for name in expected if name not in arrays)}"]
    problems += [f"unexpected: {_listed(name for name in arrays if name not in expected)}"]
    both = [name for name in expected if name in arrays]
    problems += [
        "other shapes: "
        + _listed(
            f"{name} (got {arrays[name].shape}, expected {expected[name].shape})"
            for name in both
            if arrays[name].shape != expected[name].shape
        )
    ]
    problems += [
        "other types: "
        + _listed(
            f"{name} (got {arrays[name].dtype}, expected {expected[name].dtype})"
            for name in both
            if not np.can_cast(arrays[name].dtype, expected[name].dtype, "same_kind")
        )
    ]
    found = [problem for problem in problems if not problem.endswith(": ")]
    if found:
        raise UsageError(f"{what}: belongs to another model; {'; '.join(found)}")
    return {name: arrays[name].astype(expected[name].dtype, copy=False) for name in expected}


def _listed(names: Iterator[str], limit: int = 10) -> str:
    every = list(names)
    return ", ".join(every[:limit]) + (f" and {len(every) - limit} more" if len(every) > limit else "")


def _allocate(value: Array) -> Any:
    import onnxruntime

    made = onnxruntime.OrtValue.ortvalue_from_shape_and_type(value.shape, value.dtype.type)
    made.update_inplace(np.array(value, order="C"))
    return made


# NaN in a step, found before the state takes the new values.

ADVICE = "lower the learning rate, clip gradients, or leave the batch out; the state is that of the step before"


def check(loss: float, state: State, description: Description) -> None:
    """Raise DivergedError if the loss, or a value that the state would take, is NaN.

    Momenta with a NaN make their parameter NaN in the same step; sums of gradients do so later.
    """
    kinds = {Kind.PARAMETER, Kind.BUFFER} | ({Kind.OPTIMIZER} if description.accumulate > 1 else set())
    found = [LOSS] if np.isnan(loss) else []
    for name, value in state.new_values():
        # A sum of squares is NaN only where a number is; isnan takes twice the time.
        if value.dtype.kind == "f" and description.state[name] in kinds and np.isnan(np.vdot(value, value)):
            found.append(name + NEW_SUFFIX)
    if found:
        first = "the loss" if found[0] == LOSS else f"the new value of {found[0].removesuffix(NEW_SUFFIX)!r}"
        others = f"and {len(found) - 1} other results are" if len(found) > 1 else "is"
        raise DivergedError(f"{first} {others} NaN; {ADVICE}")
