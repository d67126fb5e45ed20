"""Report of a re-estimation: old and new statistics of each batch norm."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnexport import pages

if TYPE_CHECKING:
    from rich.table import Table

Vector = NDArray[np.float64]

# First layers whose means shift by this many standard deviations in this share of channels have seen other data.
_SHIFTED, _SHARE = 0.5, 0.75


@dataclasses.dataclass(frozen=True)
class LayerChange:
    """Statistics of one batch norm before and after, float64 (C,); running variances as the model stores them.

    count: values of a channel that they come from. eps: added to the variance. first: no other batch norm comes before it.
    calls: the most times that it ran for one batch.
    """

    name: str
    count: int
    eps: float
    first: bool
    calls: int
    old_mean: Vector
    old_var: Vector
    new_mean: Vector
    new_var: Vector

    @property
    def shift(self) -> Vector:
        """Return the change of the mean of each channel, in old standard deviations."""
        return (self.new_mean - self.old_mean) / self._std(self.old_var)

    @property
    def stretch(self) -> Vector:
        """Return the new standard deviation of each channel, in old ones."""
        return self._std(self.new_var) / self._std(self.old_var)

    @property
    def largest(self) -> float:
        """Return the largest change of a mean or a standard deviation, in old standard deviations."""
        return float(np.maximum(np.abs(self.shift), np.abs(self.stretch - 1)).max(initial=0.0))

    def _std(self, var: Vector) -> Vector:
        return np.sqrt(np.maximum(var + self.eps, np.finfo(np.float64).tiny))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, vectors as lists, for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
        return {**plain, "largest_change": self.largest}


@dataclasses.dataclass(frozen=True)
class RecalibrationReport:
    """Result of a re-estimation.

    left: batch norms that kept their statistics, with the reason. passes: how often the batches were gone through. batches: of
    this process. rows: of all processes. notes: lines for the user.
    """

    layers: tuple[LayerChange, ...]
    left: tuple[tuple[str, str], ...]
    mode: str
    passes: int
    batches: int
    rows: int
    notes: tuple[str, ...] = ()

    @property
    def largest(self) -> float:
        """Return the largest change of all layers, in old standard deviations."""
        return max((layer.largest for layer in self.layers), default=0.0)

    @property
    def other_data(self) -> bool:
        """Whether the means of the first layers shift as they do for data that was preprocessed differently: by half a
        standard deviation or more in three quarters of the channels.
        """
        first = [np.abs(layer.shift) for layer in self.layers if layer.first]
        return bool(first) and float((np.concatenate(first) >= _SHIFTED).mean()) >= _SHARE

    def warnings(self) -> list[str]:
        """Return the lines that a user should read."""
        found = [f"{name} keeps its statistics: {reason}" for name, reason in self.left]
        for layer in self.layers:
            if layer.calls > 1:
                found.append(
                    f"{layer.name} runs {layer.calls} times a batch; its statistics are those of all its inputs"
                )
        if self.other_data:
            found.append(
                "the means of the first layers shift by half a standard deviation or more: "
                "were these rows preprocessed as in training?"
            )
        return [*found, *self.notes]

    def summary(self) -> str:
        """Return one line."""
        if not self.layers:
            return "no batch norms with running statistics: nothing was changed"
        worst = max(self.layers, key=lambda layer: layer.largest)
        return (
            f"{len(self.layers)} batch norm{'s' * (len(self.layers) > 1)} re-estimated on {self.rows} rows, "
            f"{self.passes} pass{'es' * (self.passes > 1)}; "
            f"largest change {worst.largest:.3g} standard deviations, in {worst.name}"
        )

    def tables(self, title: str = "") -> list[Table]:
        """Return a table of the layers, if there are any."""
        rows = [
            (
                layer.name,
                len(layer.old_mean),
                layer.count,
                f"{abs(layer.shift).max():.3g}",
                f"{layer.stretch.min():.3g} to {layer.stretch.max():.3g}",
            )
            for layer in self.layers
        ]
        columns = ("batch norm", "channels", "values a channel", "largest shift, std", "std, new / old")
        return [pages.table(title, columns, rows, right=columns[1:])] if rows else []

    def _repr_html_(self) -> str:
        return pages.fragment([self.summary(), *self.warnings()], self.tables())

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "layers": [layer.to_dict() for layer in self.layers],
            "left": [{"name": name, "reason": reason} for name, reason in self.left],
            **{name: getattr(self, name) for name in ("mode", "passes", "batches", "rows")},
            "largest_change": self.largest,
            "warnings": self.warnings(),
        }
