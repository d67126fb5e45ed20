"""The state of a training session: named tensors in two sets of memory that change places.

A step reads one set and writes the other, so that nothing is copied and a step that fails leaves the state
as it was. One set would not do: a runtime may write a new parameter before its old value was read last.
Tensors that no step changes are held once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bnexport.errors import UsageError
from bnexport.training.description import NEW_SUFFIX

Array = np.ndarray[Any, Any]


class State:
    """Values by name, held in memory that `session` reads and writes in place."""

    def __init__(self, session: Any, values: Mapping[str, Array]) -> None:
        self._session = session
        self._read = {name: _allocate(value) for name, value in values.items()}
        outputs = {output.name for output in session.get_outputs()}
        changing = [name for name in values if name + NEW_SUFFIX in outputs]
        self._write = {name: _allocate(values[name]) for name in changing}
        inputs = {value.name for value in session.get_inputs()}
        self._bound = [name for name in values if name in inputs]
        self._bindings = (self._bind(self._read, self._write), self._bind({**self._read, **self._write}, self._read))

    def names(self) -> list[str]:
        return list(self._read)

    def get(self, name: str) -> Array:
        """A copy of the current value."""
        return np.array(self._read[name].numpy())

    def set(self, values: Mapping[str, Array]) -> None:
        """Overwrites current values; shapes and types are those of the state."""
        for name, value in values.items():
            self._read[name].update_inplace(np.ascontiguousarray(value).reshape(value.shape))

    def step(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Runs the graph and moves to the new state. Returns copies of the outputs, which are no state."""
        binding = self._bindings[0]
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        for name in outputs:
            binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        names = [*self._write, *outputs]
        results = dict(zip(names, binding.get_outputs()))
        arrays = [np.array(results[name].numpy()) for name in outputs]
        old = {name: self._read[name] for name in self._write}
        self._read.update(self._write)
        self._write = old
        self._bindings = (self._bindings[1], self._bindings[0])
        return arrays

    def ort_values(self) -> Iterator[tuple[str, Any]]:
        """The current values where they lie."""
        yield from self._read.items()

    def _bind(self, read: Mapping[str, Any], write: Mapping[str, Any]) -> Any:
        binding = self._session.io_binding()
        for name in self._bound:
            binding.bind_ortvalue_input(name, read[name])
        for name in self._write:
            binding.bind_ortvalue_output(name + NEW_SUFFIX, write[name])
        return binding


def compare(expected: Mapping[str, Array], given: Mapping[str, Array], what: str) -> dict[str, Array]:
    """`given` in the types of `expected`.

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
