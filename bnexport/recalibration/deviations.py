"""Stored running statistics against those of data, in one pass over the rows; nothing is changed or written.

Each layer is measured behind the stored statistics of the layers in front of it, as inference runs it. With the stored mean m and
standard deviation s = sqrt(var + eps), and M and S of the data, a value that the data normalise to z is normalised to

    (M + S z - m) / s = shift + stretch z        shift = (M - m) / s,    stretch = S / s

and is wrong by sqrt(shift^2 + (stretch - 1)^2), the root mean square over the data, in standard deviations. The deviation of a
layer is the root mean square over its channels.

Chance: rows are independent, the values of one row may be equal. So M has a standard error of S / sqrt(rows) at most, and S
has that at most where the kurtosis is up to 5 (normal data have 3). Both together give sqrt(2 mean(stretch^2) / rows), with
a stretch of 1 at least, since few rows may have too small an S.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from bnexport import pages
from bnexport.model_io.read import Source, open_source
from bnexport.recalibration.files import measure_file
from bnexport.recalibration.report import LayerChange, RecalibrationReport

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn
    from torch.distributed import ProcessGroup

# Allowed for a layer, in standard deviations: between the networks that lose accuracy and those that do not, which
# docs/guides/statistics.md names. For one channel: the error where data are constant that were not.
DEVIATION, CHANNEL = 0.3, 1.0
# Standard errors that chance explains.
_ERRORS = 3
# Next to its mean or to eps, a smaller standard deviation is a rounding error of float32.
_ULP = 2.0**-23
_NAMED, _LONGEST = 4, 16
_INITIAL, _SMALL, _DEAD = "never updated", "variance below eps", "dead"
_MEANING = {
    _INITIAL: "every mean is 0 and every variance 1",
    _SMALL: "eps decides the scale",
    _DEAD: "constant on these rows",
}


@dataclasses.dataclass(frozen=True)
class LayerFit:
    """One batch norm: `change` has its stored statistics as old ones, those of the data as new ones.

    chance: the deviation that the number of rows explains. Vectors of bool are (C,).
    """

    change: LayerChange
    chance: float

    @property
    def errors(self) -> Any:
        """Return the error of each channel's normalised values, root mean square, in standard deviations, (C,)."""
        return np.hypot(self.change.shift, self.change.stretch - 1)

    @property
    def deviation(self) -> float:
        """Return the root mean square of `errors`."""
        return math.sqrt(float((self.errors**2).mean()))

    @property
    def deviates(self) -> bool:
        """Whether the layer, or one channel, is wrong by more than is allowed; chance does not explain initial statistics."""
        chance = 0.0 if self.never_updated else self.chance
        return self.deviation > max(DEVIATION, chance) or float(self.errors.max()) >= max(CHANNEL, chance)

    @property
    def never_updated(self) -> bool:
        """Whether the stored statistics are the initial ones: means of 0 and variances of 1."""
        return not self.change.old_mean.any() and bool((self.change.old_var == 1).all())

    @property
    def below_eps(self) -> Any:
        """Return the channels whose stored variance is below eps, which then decides their scale."""
        return self.change.old_var < self.change.eps

    @property
    def dead(self) -> Any:
        """Return the channels that are constant over the data."""
        size = np.maximum(np.abs(self.change.new_mean), math.sqrt(self.change.eps))
        return np.sqrt(np.maximum(self.change.new_var, 0)) <= _ULP * size

    def findings(self) -> dict[str, str]:
        """Return what is wrong with it, by kind, with the channels."""
        found = {_INITIAL: ""} if self.never_updated else {}
        for kind, channels in ((_SMALL, self.below_eps), (_DEAD, self.dead)):
            if channels.any():
                found[kind] = _channels(np.flatnonzero(channels).tolist(), channels.size)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        names = {
            "old_mean": "stored_mean",
            "old_var": "stored_var",
            "new_mean": "measured_mean",
            "new_var": "measured_var",
        }
        found = {names.get(name, name): value for name, value in self.change.to_dict().items()}
        channels = {name: np.flatnonzero(getattr(self, name)).tolist() for name in ("below_eps", "dead")}
        found["errors"] = self.errors.tolist()
        others = {name: getattr(self, name) for name in ("deviation", "chance", "deviates", "never_updated")}
        return {**found, **others, **channels}


def _channels(numbers: list[int], count: int) -> str:
    if len(numbers) == count:
        return f"all {count} channels"
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    named = ", ".join(map(str, numbers[:_NAMED]))
    return f"channel{'s' * (len(numbers) > 1)} {named}{more} of {count}"


@dataclasses.dataclass(frozen=True)
class StatisticsReport:
    """Result of `statistics`, layers in the order in which they run. measured: rows, batches, and batch norms left out.

    mend: the command that re-estimates the statistics.
    """

    layers: tuple[LayerFit, ...]
    measured: RecalibrationReport
    mend: str

    @property
    def start(self) -> LayerFit | None:
        """Return the first layer that deviates: its input is right, the statistics in front of it fit."""
        return next((layer for layer in self.layers if layer.deviates), None)

    def summary(self) -> str:
        """Return one line."""
        count = len(self.layers)
        if not count:
            return "no batch norms with running statistics: nothing was measured"
        text = f"{count} batch norm{'s' * (count != 1)} measured on {self.measured.rows} rows in one pass: "
        if self.start is None:
            return text + ("none deviates" if any(layer.findings() for layer in self.layers) else "nothing found")
        wrong, start = sum(layer.deviates for layer in self.layers), self.start
        worst = int(start.errors.argmax())
        text += f"{wrong} deviate{'s' * (wrong == 1)}, first {start.change.name}, by {start.deviation:.3g} std"
        return f"{text}, its channel {worst} by {start.errors[worst]:.3g} ({DEVIATION:g} and {CHANNEL:g} are allowed)"

    def warnings(self) -> list[str]:
        """Return the lines that a user should read."""
        found = [f"{name} is left out: {reason}" for name, reason in self.measured.left]
        for kind, meaning in _MEANING.items():
            each = [(layer.change.name, layer.findings().get(kind)) for layer in self.layers]
            named = [f"{name}{f' ({channels})' if channels else ''}" for name, channels in each if channels is not None]
            more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
            found += [f"{kind} ({meaning}): {', '.join(named[:_NAMED])}{more}"] if named else []
        chance = max((layer.chance for layer in self.layers if not layer.deviates), default=0.0)
        if chance > DEVIATION:
            wanted = math.ceil(self.measured.rows * (chance / DEVIATION) ** 2)
            found.append(
                f"{self.measured.rows} rows explain deviations up to {chance:.2g} std; {wanted} rows would show {DEVIATION}"
            )
        if self.start is not None:
            if self.start.change.first and not self.start.never_updated:
                found.append("no batch norm comes before it: were these rows preprocessed as in training?")
            found.append(f"to re-estimate all of them on these rows: {self.mend}")
        return [*found, *self.measured.notes]

    def tables(self, title: str = "") -> list[Table]:
        """Return a table of the layers, with the largest shift, and a bar for each deviation: a block for each third of `DEVIATION`."""
        rows = [
            (
                layer.change.name,
                layer.change.old_mean.size,
                f"{np.abs(layer.change.shift).max():.3g}",
                f"{layer.change.stretch.min():.3g} to {layer.change.stretch.max():.3g}",
                f"{layer.deviation:.3g}",
                "\u2588" * min(round(3 * layer.deviation / DEVIATION), _LONGEST),
                "; ".join([*(["starts here"] if layer is self.start else []), *layer.findings()]),
            )
            for layer in self.layers
        ]
        columns = ("batch norm", "channels", "shift, std", "stretch", "deviation, std", "", "found")
        return [pages.table(title, columns, rows, right=columns[1:5], whole=("batch norm", "stretch"))] if rows else []

    def _repr_html_(self) -> str:
        return pages.fragment([self.summary(), *self.warnings()], self.tables())

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "layers": [layer.to_dict() for layer in self.layers],
            "start": None if self.start is None else self.start.change.name,
            "allowed": {"layer": DEVIATION, "channel": CHANNEL},
            "left": [{"name": name, "reason": reason} for name, reason in self.measured.left],
            **{name: getattr(self.measured, name) for name in ("passes", "batches", "rows")},
            "mend": self.mend,
            "warnings": self.warnings(),
        }


def statistics(
    model: nn.Module | Source,
    batches: Iterable[Any],
    *,
    process_group: ProcessGroup | Callable[[Any], list[Any]] | None = None,
) -> StatisticsReport:
    """Compare the running statistics that a model stores with those of data, in one pass; nothing is changed or written.

    Args:
        model: a module, whatever mode it is in, or an ONNX file as `bnexport.recalibrate_file` takes it.
        batches, process_group: as `bnexport.recalibrate` and `bnexport.recalibrate_file` take them; a generator is fine.

    Raises:
        UsageError: no rows, one value a channel, a value that is not finite (its row is named), inputs that do not fit.
        ModelError: the file is refused, or ONNX Runtime cannot run it.

    Source of the bounds: bnexport.recalibration.deviations.

    Examples:
        >>> import torch, bnexport
        >>> model = torch.nn.BatchNorm1d(1).double()
        >>> next(iter(bnexport.statistics(model, torch.randn(100, 1).double().split(50)).layers[0].findings()))
        'never updated'
    """
    module: Any = model
    if hasattr(module, "named_modules"):
        from bnexport.recalibration.modules import measure_module

        measured, mend = (
            measure_module(module, batches, process_group, "stored"),
            "bnexport.recalibrate(model, batches)",
        )
    else:
        opened = open_source(module)
        _, measured = measure_file(opened, batches, process_group, "stored")
        mend = f"bnexport.recalibrate_file({opened.path or 'model'!r}, 'better.onnx', batches)"
    fits = [LayerFit(change, _chance(change, measured.rows)) for change in measured.layers]
    return StatisticsReport(tuple(fits), measured, mend)


def _chance(change: LayerChange, rows: int) -> float:
    return _ERRORS * math.sqrt(2 * float((np.maximum(change.stretch, 1) ** 2).mean()) / rows)
