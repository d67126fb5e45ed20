"""Sums over batches and processes from which running statistics are estimated, of modules and of files.

A row is float64 (2 C + 1,), as the kernels write it: [n, mean.., M2..] with n the values of a channel and M2 the sum of
squared deviations from their mean. The rows of batches, then those of processes, combine to the row of the joint data. Source:
Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance".

Each process adds up its own batches; one exchange follows each pass.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnexport.errors import GroupError, LibraryError, UsageError

Row = NDArray[np.float64]

MODES = ("one_by_one", "together")
# Values of one piece of an array that is reduced without the kernels, in float64.
_PIECE = 1 << 20
_UNCHANGED = "nothing was changed"


def parts(row: Row) -> tuple[float, Row, Row]:
    """Return the count and the two vectors (C,) of a row."""
    channels = len(row) // 2
    return float(row[0]), row[1 : channels + 1], row[channels + 1 :]


def merge(a: Row, b: Row) -> Row:
    """Combine the rows of disjoint data."""
    (n_a, mean_a, m2_a), (n_b, mean_b, m2_b) = parts(a), parts(b)
    if n_a == 0 or n_b == 0:
        return a if n_b == 0 else b
    n, delta = n_a + n_b, mean_b - mean_a
    share = n_b / n
    return np.concatenate([[n], mean_a + delta * share, m2_a + m2_b + delta * delta * (n_a * share)])


def statistics(row: Row) -> tuple[Row, Row]:
    """Return running mean and running variance, which is unbiased, both (C,)."""
    count, mean, m2 = parts(row)
    return mean, m2 / (count - 1)


def of_array(x: np.ndarray[Any, Any]) -> Row:
    """Compute the row of an array (N, C, *), by the compiled kernel where its library and type allow it."""
    x = np.ascontiguousarray(x)
    kernel = _kernel()
    if kernel is not None and str(x.dtype) in kernel.DTYPES and x.size:
        row = np.empty(2 * x.shape[1] + 1)
        statistics_type = "float64" if x.dtype == np.float64 else "float32"
        params = kernel.forward_params(
            x=x.ctypes.data,
            dtype=kernel.DTYPES[str(x.dtype)],
            stats_dtype=kernel.DTYPES[statistics_type],
            layout=kernel.LAYOUTS["NCS"],
            N=x.shape[0],
            C=x.shape[1],
            S=int(np.prod(x.shape[2:])),
            threads=min(os.cpu_count() or 1, 1024),
        )
        kernel.run("moments", params, row.ctypes.data)
        return row
    return functools.reduce(merge, _pieces(x))


def _pieces(x: np.ndarray[Any, Any]) -> Iterable[Row]:
    """Compute rows of a few samples each: a float64 copy of all of them may not fit."""
    step = max(1, _PIECE // max(1, x[:1].size))
    axes = (0, *range(2, x.ndim))
    for first in range(0, max(len(x), 1), step):
        piece = x[first : first + step].astype(np.float64)
        count = piece.size // max(1, x.shape[1])
        mean = piece.mean(axes) if count else np.zeros(x.shape[1])
        deviation = piece - mean.reshape(1, -1, *(1,) * (x.ndim - 2))
        yield np.concatenate([[count], mean, (deviation * deviation).sum(axes)])


def _kernel() -> Any:
    from bnexport.native import capi

    try:
        capi.library()
    except LibraryError:
        return None
    return capi


@dataclasses.dataclass
class _Part:
    """What one process tells the others behind a pass. order: of the layers, as they ran."""

    rows: int = 0
    order: dict[Any, None] = dataclasses.field(default_factory=dict)
    sums: dict[Any, Row] = dataclasses.field(default_factory=dict)


class Measurement:
    """Measure layers in passes over batches. layers: the name and the channels of each, by any key.

    done: the rows of the layers that are measured, over all processes. rows: of all processes. batches: of this one.
    order: the layers as they ran in the last pass, on the first process that had a batch. batch: the number of the one that
    runs. size: its rows, which `run` states.
    """

    def __init__(self, layers: Mapping[Any, tuple[str, int]], process_group: Any) -> None:
        self._layers, self._process_group = dict(layers), process_group
        self._part = _Part()
        self.done: dict[Any, Row] = {}
        self.order: list[Any] = []
        self.passes = self.batches = self.rows = self.batch = self.size = 0
        if any(each != self._layers for each in _gather(self._layers, process_group)):
            raise GroupError("the processes have different batch norms; give every process the same model")

    def measure(
        self, batches: Iterable[Any], run: Callable[[Any], None], *, passes: int = 1, look: bool = False
    ) -> None:
        """Run the batches and finish the layers that `run` adds. Raises UsageError, GroupError.

        passes: how many there will be. look: run the first batch alone, for the order of the layers.
        """
        self._part = part = _Part()
        count = 0
        try:
            if passes > 1 and not self.passes and isinstance(batches, Iterator):
                raise UsageError(
                    f"batches: got a {type(batches).__name__}, which can be gone through once; one_by_one needs {passes} "
                    f"passes: give a list or a DataLoader, or layers='together'; {_UNCHANGED}"
                )
            for count, batch in enumerate(itertools.islice(batches, 1) if look else batches, 1):
                self.batch = count - 1
                run(batch)
                part.rows += self.size
            if self.passes and count != self.batches:
                raise UsageError(
                    f"batches: got {count} in a later pass, expected {self.batches} as in the first: each pass must give "
                    f"the same rows; {_UNCHANGED}"
                )
        except Exception:
            _gather(None, self._process_group)  # the others wait
            raise
        joined = _gather(part, self._process_group)
        if None in joined:
            raise GroupError(f"process {joined.index(None)} of the group failed, see its error; {_UNCHANGED}")
        self.order = next((list(each.order) for each in joined if each.order), [])
        if not look:
            self.batches, self.rows, self.passes = count, sum(each.rows for each in joined), self.passes + 1
            self._finish([each.sums for each in joined])

    def see(self, key: Any) -> None:
        """Note that a layer runs."""
        self._part.order[key] = None

    def add(self, key: Any, row: Row, x: Any) -> None:
        """Add a layer's input `x`, of the batch that runs, by its row. Raises UsageError where it is not finite."""
        if not np.isfinite(row).all():
            bad = [index for index, sample in enumerate(x) if not bool((abs(sample) < math.inf).all())]
            known = bad and len(x) == self.size
            where = f"batch {self.batch}" + (f", row {self._part.rows + bad[0]}" if known else "")
            raise UsageError(f"batches: {where} gives NaN or infinity to {self._layers[key][0]}; {_UNCHANGED}")
        sums = self._part.sums
        sums[key] = merge(sums[key], row) if key in sums else row

    def of_batch(self, key: Any, row: Row) -> tuple[Row, Row]:
        """Return the mean and the biased variance with which a layer normalises its batch in training."""
        count, mean, m2 = parts(row)
        if count == 1:
            raise UsageError(
                f"batches: {self._layers[key][0]} got one value a channel in a batch, expected two or more; give larger "
                f"batches, or layers='one_by_one'; {_UNCHANGED}"
            )
        return mean, m2 / max(count, 1)

    def _finish(self, sums: list[dict[Any, Row]]) -> None:
        if not self.rows:
            raise UsageError(f"batches: got no rows, expected one or more; {_UNCHANGED}")
        for key, (name, _) in self._layers.items():
            found = [each[key] for each in sums if key in each]
            row = functools.reduce(merge, found) if found else np.zeros(1)
            if row[0] == 1:
                raise UsageError(f"batches: {name} saw one value a channel in all, which has no variance; {_UNCHANGED}")
            if row[0]:
                self.done[key] = row


def _gather(part: Any, process_group: Any) -> list[Any]:
    """Return what each process of the group gives; without torch there is one."""
    if callable(process_group):
        found: list[Any] = process_group(part)
        return found
    if process_group is None and "torch" not in sys.modules:
        return [part]
    from bnexport.sync_bn import distributed

    return distributed.all_gather_objects(part, process_group)
