"""State of a training session: named tensors in two sets of buffers, swapped after each step.

A step reads one set and writes the other, so that nothing is copied and a step that fails leaves the state
as it was. One set would not do: a runtime may write a new parameter before its old value was read last.
Tensors that no step changes are held once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bnexport.errors import UsageError
from bnexport.schema import NEW_SUFFIX

Array = np.ndarray[Any, Any]


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
