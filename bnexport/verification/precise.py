"""A model in float64: what it would compute without rounding, for all that float32 shows.

Every float type of the graph becomes DOUBLE: inputs, initializers, constants, declared types, and the
targets of Cast. onnx.reference then computes in float64, since NumPy does. Its values are believed where it evaluates
each node as ONNX Runtime does (`oracle`).
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bnexport.errors import UnsupportedModelError
from bnexport.verification import oracle
from bnexport.verification.runner import Serialised, whole
from bnexport.verification.smaller_inputs import is_float

# Parameters of a model that is worth the time, which is that of NumPy.
LARGEST_BYTES = 1 << 28


class PreciseModel:
    """A model to run in float64; in a main thread only.

    seconds: for all of its runs.
    """

    def __init__(self, model: Serialised, seconds: float) -> None:
        self._model, self._seconds = model, seconds
        self._proto: Any = None
        self._evaluator: Any = None
        self._agreed: set[oracle.Form] = set()

    def run(self, samples: Sequence[Mapping[str, np.ndarray]], outputs: Sequence[str]) -> list[list[Any]]:
        """Compute the values of `outputs` for each sample.

        Raises UnsupportedModelError where they cannot be computed or believed, or not in the time that is left.
        """
        if self._model.nbytes > LARGEST_BYTES:
            raise UnsupportedModelError("the model is too large to be run in float64")
        start = time.monotonic()
        try:
            with _alarm(self._seconds):
                self._load()
                return [self._values(sample, outputs, first=not index) for index, sample in enumerate(samples)]
        except Exception as error:  # onnx.reference raises whatever an operator raises
            raise UnsupportedModelError(f"the model cannot be run in float64: {error}") from error
        finally:
            self._seconds = max(0.1, self._seconds - (time.monotonic() - start))

    def _load(self) -> None:
        if self._evaluator is None:
            import onnx

            from bnexport.verification.onnx_reference import Evaluator

            self._proto = oracle.inlined(whole(self._model))
            oracle.retype(self._proto, onnx.TensorProto.DOUBLE)
            self._evaluator = Evaluator(self._proto)

    def _values(self, sample: Mapping[str, np.ndarray], outputs: Sequence[str], *, first: bool) -> list[Any]:
        values = self._evaluator.run(None, {name: _wide(array) for name, array in sample.items()}, intermediate=True)
        if first:
            doubt = oracle.find_doubt(self._proto, values, self._agreed)
            if doubt:
                raise UnsupportedModelError(doubt)
        return [values[name] for name in outputs]


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """TimeoutError after so many seconds."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if is_float(array) else array
