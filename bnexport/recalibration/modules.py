"""Re-estimation of the running statistics of a torch module, in place.

The module runs in inference: a batch norm normalises with its running statistics. `one_by_one` measures the input of one
layer in each pass; the layers before it have their new statistics already. `together` measures all of them in one pass, and
gives each layer the statistics of its batch just before it runs. Nothing else changes: no mode, no counter, no weight; on
an error the old statistics return.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bnexport import interface
from bnexport.errors import GroupError, UsageError
from bnexport.interface import check_choice
from bnexport.recalibration import moments
from bnexport.recalibration.report import LayerChange, RecalibrationReport
from bnexport.sync_bn import distributed, passes
from bnexport.sync_bn.recognition import is_sync_batch_norm, recognise

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MODES = ("one_by_one", "together")
# What a process tells the others at the head of a row: it is in a layer, behind its batch, behind all, or has failed.
_WORKS, _ENDED, _IDLE, _FAILED = 1.0, 2.0, 3.0, 4.0
_UNCHANGED = "nothing was changed"
_TRACK = "set track_running_stats = True, running_mean = torch.zeros(C) and running_var = torch.ones(C) to give it some"


def recalibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    process_group: ProcessGroup | None = None,
    layers: str | Sequence[Sequence[str]] = "one_by_one",
    method: str = "exact",
) -> RecalibrationReport:
    """Re-estimate the running statistics of every batch norm of `model` on data, in place; nothing else changes.

    Dropout and the like stay off. Frozen batch norms and those without running statistics are left alone.

    Args:
        model: any module; its batch norms and sync batch norms are those that `export` knows.
        batches: inputs of the model: tensors or NumPy arrays, tuples or lists whose first element is the input (as torch's
            `update_bn` takes them), or mappings of keyword arguments. `one_by_one` goes through them once for each layer: a list or a
            DataLoader, not a generator.
        process_group: processes that have different batches, any number of them; None: the world, if torch.distributed is
            initialised. All of them get the statistics of all rows.
        layers: "one_by_one": layer after layer in the order of the forward, each on inputs that the layers before it have
            normalised with their new statistics: the result of one pass over all rows, whatever the batches and
            processes. "together": one pass, in which layers normalise with the statistics of the batch (sync batch norms:
            of the group's); only the first layers are independent of the batches. Or groups of names, in the order of the
            forward, whose layers do not feed each other: as one_by_one, with one pass for each group.
        method: "exact": mean and unbiased variance of all values. "cumulative": means over batches, as torch's
            `update_bn`, which lack the variance of the batch means.

    Raises:
        UsageError: no rows, one value a channel, a value that is not finite (its row is named), unknown layers, or a
            generator where several passes are needed. The statistics are the old ones.
        GroupError: the processes have different models, or one of them failed.

    Source of the formulas: bnexport.recalibration.moments.

    Examples:
        >>> import torch, bnexport
        >>> model = torch.nn.BatchNorm1d(1).double()
        >>> report = bnexport.recalibrate(model, [torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[6.0]]).double()])
        >>> model.running_mean.item(), model.running_var.item()
        (3.0, 7.0)
    """
    check_choice("method", method, moments.METHODS)
    if isinstance(layers, str):
        check_choice("layers", layers, MODES)
    found, left = _batch_norms(model)
    groups = None if isinstance(layers, str) else _stated(layers, found)
    together = layers == "together"
    if not together and isinstance(batches, Iterator) and len(found) > 1 and (groups is None or len(groups) > 1):
        raise UsageError(
            f"batches: got a {type(batches).__name__}, which can be gone through once; one_by_one needs a pass for each "
            "layer: give a list or a DataLoader, or layers='together'"
        )
    run = _Run(model, found, batches, method, process_group)
    old = {name: _statistics(layer) for name, layer in found.items()}
    passes = 0
    with _inference(model), torch.no_grad():
        try:
            if found:
                passes = run.together() if together else run.one_by_one(groups)
        except BaseException:
            for name, layer in found.items():
                _write(layer, *old[name])
            raise
    left += [(name, "it did not run on these rows") for name in found if name not in run.sums]
    return RecalibrationReport(
        tuple(run.change(name, old[name]) for name in run.order if name in run.sums),
        tuple(left),
        layers if isinstance(layers, str) else "groups",
        method,
        passes,
        len(run.calls),
        run.rows,
    )


def _batch_norms(model: nn.Module) -> tuple[dict[str, nn.Module], list[tuple[str, str]]]:
    """Return the batch norms to estimate, by name, and those that are left alone, with the reason."""
    found: dict[str, nn.Module] = {}
    left = []
    for name, module in model.named_modules():
        kind = recognise(module)
        if kind is None:
            continue
        shown = name or type(module).__name__
        if kind.kind == "frozen" or type(module).__name__.startswith("Frozen"):
            left.append((shown, "it is frozen"))
        elif kind.changed:
            left.append((shown, f"its class changes {', '.join(kind.changed)}: what its statistics mean is not known"))
        elif getattr(module, "running_mean", None) is None or getattr(module, "running_var", None) is None:
            left.append((shown, f"it has no running statistics; {_TRACK}"))
        elif is_lazy(module.running_mean):
            left.append((shown, "it is lazy and has never run"))
        else:
            found[shown] = module
    return found, left


def _stated(groups: Sequence[Sequence[str]], found: Mapping[str, nn.Module]) -> list[list[str]]:
    stated = [[group] if isinstance(group, str) else list(group) for group in groups]
    names = [name for group in stated for name in group]
    missing, unknown = [name for name in found if name not in names], [name for name in names if name not in found]
    if missing or unknown or len(set(names)) < len(names):
        got = f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r}" if unknown else "has a name twice"
        raise UsageError(
            f"layers: {got}; expected 'one_by_one', 'together', or groups that hold each batch norm once: {', '.join(found)}"
        )
    return stated


@contextlib.contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    """Put the whole model into inference; give each module its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _statistics(layer: nn.Module) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    mean, var = (
        getattr(layer, name).detach().cpu().double().numpy().copy() for name in ("running_mean", "running_var")
    )
    return mean, var


def _write(layer: nn.Module, mean: np.ndarray[Any, Any], var: np.ndarray[Any, Any]) -> None:
    with torch.no_grad():
        for buffer, new in ((layer.running_mean, mean), (layer.running_var, var)):
            assert isinstance(buffer, torch.Tensor)
            buffer.copy_(torch.from_numpy(new))


class _Enough(BaseException):
    """Ends a forward whose remaining layers are not measured; no error, so that no `except Exception` sees it."""


class _Group:
    """The processes that share the statistics; one process without torch.distributed."""

    def __init__(self, group: ProcessGroup | None, channels: Mapping[str, int], device: torch.device) -> None:
        self.size = distributed.size_of(group)
        self._name = distributed.name_of(group)
        cpu = self.size == 1 or distributed.backend_of(self._name, "cpu") is not None
        self._device = torch.device("cpu") if cpu else device
        # gloo aborts a process that receives a longer row than it expects: those of all layers have one length.
        self._length = 2 + 2 * max(channels.values(), default=0)
        known = zlib.crc32(repr(list(channels.items())).encode())
        if len({row[1] for row in self.share(_WORKS, [known])}) > 1:
            raise GroupError("the processes have different batch norms; give every process the same model")

    def share(self, state: float, vector: Any) -> list[np.ndarray[Any, Any]]:
        """Gather [state, *vector] of all processes. Raises GroupError where another one failed."""
        row = torch.from_numpy(np.array([state, *vector], np.float64))
        rows = [row] if self.size == 1 else list(distributed.all_gather(row.to(self._device), self._name).cpu())
        found = [each.numpy() for each in rows]
        failed = [rank for rank, each in enumerate(found) if each[0] == _FAILED]
        if failed and state != _FAILED:
            raise GroupError(f"process {failed[0]} of the group failed, see its error; {_UNCHANGED}")
        return found

    def meet(self, state: float, number: int = 0, row: Any = ()) -> list[np.ndarray[Any, Any]]:
        """Gather the rows of the layer `number` from the processes that are in it, whatever the others do."""
        padded = np.zeros(self._length)
        padded[0], padded[1 : 1 + len(row)] = number, row
        found = [each for each in self.share(state, padded) if each[0] == _WORKS]
        if len({each[1] for each in found}) > 1:
            raise GroupError(f"the processes run different layers; every one must run the same layers; {_UNCHANGED}")
        return [each[2 : 2 + len(row)] for each in found]

    def wait(self, state: float) -> bool:
        """Stay out of layers until no process is in one; return whether all of them are behind all batches."""
        while True:
            states = {each[0] for each in self.share(state, np.zeros(self._length))}
            if _WORKS not in states:
                return states == {_IDLE}

    def fail(self, length: int) -> None:
        """Tell the others, which wait for a row of `length`, that this process cannot go on."""
        if self.size > 1:
            self.share(_FAILED, np.zeros(length or self._length))


@dataclasses.dataclass
class _Sum:
    """Sum of one layer over batches. values: of a channel."""

    values: float
    row: moments.Row

    @classmethod
    def empty(cls, channels: int) -> _Sum:
        return cls(0.0, np.zeros(2 * channels + 1))

    def add(self, row: moments.Row, method: str) -> None:
        self.values += row[0]
        self.row = moments.merge(self.row, moments.start(row, method), method)


class _Run:
    """One re-estimation. sums: of the finished layers, over all processes. order: names in the order of the forward.

    calls: of each layer, for each batch of this process in the first pass. rows: of all processes.
    """

    def __init__(
        self,
        model: nn.Module,
        found: dict[str, nn.Module],
        batches: Iterable[Any],
        method: str,
        process_group: ProcessGroup | None,
    ) -> None:
        buffers: dict[str, Any] = {name: layer.running_mean for name, layer in found.items()}
        self._channels = {name: len(buffer) for name, buffer in buffers.items()}
        self._device: torch.device = next((buffer.device for buffer in buffers.values()), torch.device("cpu"))
        self._group = _Group(process_group, self._channels, self._device)
        self._model, self._found, self._batches, self._method = model, found, batches, method
        # A forward that ends early would leave the parameters of FSDP gathered.
        self._may_stop = not any(type(module).__module__.startswith("torch.distributed") for module in model.modules())
        self.order = list(found)
        self.sums: dict[str, _Sum] = {}
        self.calls: list[collections.Counter[str]] = []
        self.rows = 0

    def change(self, name: str, old: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> LayerChange:
        done, eps = self.sums[name], float(getattr(self._found[name], "eps", 0.0))
        calls = max((counts[name] for counts in self.calls), default=0)
        new = moments.statistics(done.row, self._method)
        return LayerChange(name, int(done.values), eps, name == self.order[0], calls, *old, *new)

    def one_by_one(self, groups: list[list[str]] | None) -> int:
        """Finish the layers in their order; return the number of passes."""
        if len(self._found) > 1:
            self._find_order(groups)
        groups = groups or [[name] for name in self.order]
        for number, names in enumerate(groups):
            interface.report("pass", number, len(groups))
            self._pass(names, together=False)
        return len(groups)

    def together(self) -> int:
        """Finish all layers in one pass."""
        self._pass(list(self._found), together=True)
        self.order = list(dict.fromkeys([name for counts in self.calls[:1] for name in counts] + self.order))
        return 1

    def _pass(self, names: list[str], *, together: bool) -> None:
        """Go through the batches once and finish the layers `names`."""
        sums = {name: _Sum.empty(self._channels[name]) for name in names}
        synchronised = together and self._group.size > 1
        numbers = {name: number for number, name in enumerate(names) if is_sync_batch_norm(self._found[name])}
        if not synchronised:
            numbers = {}
        length = sum(2 * self._channels[name] + 2 for name in names) + 1
        try:
            rows = self._measure(sums, together, numbers)
        except GroupError:
            raise
        except Exception:
            self._group.fail(0 if numbers else length)
            raise
        own = np.concatenate([[rows], *([each.values, *each.row] for each in sums.values())])
        joined = self._group.share(_WORKS, own)
        self.rows = int(sum(each[1] for each in joined))
        if not self.rows:
            raise UsageError(f"batches: got no rows, expected one or more; {_UNCHANGED}")
        place = 2
        for name in names:
            end = place + 2 * self._channels[name] + 2
            parts = [each[place:end] for each in joined]
            place = end
            self._finish(
                name, _Sum(sum(part[0] for part in parts), moments.total((p[1:] for p in parts), self._method))
            )

    def _finish(self, name: str, done: _Sum) -> None:
        if done.values == 0:
            return
        if done.values < 2:
            raise UsageError(f"batches: {name} saw one value a channel in all, which has no variance; {_UNCHANGED}")
        self.sums[name] = done
        _write(self._found[name], *moments.statistics(done.row, self._method))

    def _measure(self, sums: dict[str, _Sum], together: bool, numbers: Mapping[str, int]) -> int:
        """Add what this process's batches give to the layers of `sums`; return the number of rows."""
        first = not self.sums and not self.calls
        rows = 0
        left: collections.Counter[str] = collections.Counter()

        def see(name: str, x: torch.Tensor) -> None:
            if first:
                self.calls[-1][name] += 1
            if name not in sums:
                return
            row = self._row(name, x, batch_size, rows, index)
            sums[name].add(row, self._method)
            if together:
                self._replace(name, row, numbers)
            left[name] -= 1
            if not first and self._may_stop and not +left:
                raise _Enough

        index = -1
        with self._hooks(see):
            for index, batch in enumerate(self._batches):
                if first:
                    self.calls.append(collections.Counter())
                elif index >= len(self.calls):
                    raise self._other_batches(index + 1)
                left.clear()
                left.update({name: self.calls[index][name] for name in sums})
                inputs = _inputs(batch)
                batch_size = _size(inputs)
                if first or not self._may_stop or +left:
                    self._forward(inputs)
                rows += batch_size
                if numbers:
                    self._group.wait(_ENDED)
        if index + 1 != len(self.calls):
            raise self._other_batches(index + 1)
        while numbers and not self._group.wait(_IDLE):
            pass
        return rows

    def _other_batches(self, got: int) -> UsageError:
        return UsageError(
            f"batches: got {got} in a later pass, expected {len(self.calls)} as in the first: each pass must give the same "
            f"rows; {_UNCHANGED}"
        )

    def _row(self, name: str, x: torch.Tensor, batch_size: int, before: int, index: int) -> moments.Row:
        """Compute the moments of a layer's input. Raises UsageError for values that are not finite, or too few."""
        backend, arranged = passes.arrange(x.detach())
        row = backend.forward_row(arranged, "exact").cpu().numpy()
        if not np.isfinite(row).all():
            place = moments.unfinished_row(x, torch.isfinite)
            where = f"batch {index}" + (f", row {before + place}" if place is not None and len(x) == batch_size else "")
            raise UsageError(f"batches: {where} gives NaN or infinity to {name}; {_UNCHANGED}")
        return row

    def _replace(self, name: str, row: moments.Row, numbers: Mapping[str, int]) -> None:
        """Give a layer the statistics of its batch, with which it normalises next."""
        if name in numbers:
            row = moments.total(self._group.meet(_WORKS, numbers[name], row), "exact")
        if row[0] == 1:
            raise UsageError(
                f"batches: {name} got one value a channel in a batch, expected two or more; give larger batches, or "
                f"layers='one_by_one'; {_UNCHANGED}"
            )
        if row[0]:
            _write(self._found[name], *moments.batch_statistics(row))

    @contextlib.contextmanager
    def _hooks(self, see: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
        """Call `see` with the input of each layer before it runs."""

        def before(name: str, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            see(name, inputs[0] if inputs else next(iter(named.values())))

        handles = [
            layer.register_forward_pre_hook(functools.partial(before, name), with_kwargs=True)
            for name, layer in self._found.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _forward(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        if inputs[1]:
            self._check_names(inputs[1])
        positional = [_moved(value, self._device) for value in inputs[0]]
        with contextlib.suppress(_Enough):
            self._model(*positional, **{name: _moved(value, self._device) for name, value in inputs[1].items()})

    def _check_names(self, named: Mapping[str, Any]) -> None:
        try:
            inspect.signature(self._model.forward).bind(**named)
        except TypeError as error:
            raise UsageError(
                f"batches: got a mapping with {', '.join(map(str, named))}, expected the keyword arguments of the model's "
                f"forward ({error}); give the inputs alone, such as [batch[{next(iter(named))!r}] for batch in loader]; "
                f"{_UNCHANGED}"
            ) from error

    def _find_order(self, groups: list[list[str]] | None) -> None:
        """Run the first batch for the order of the layers, and check stated groups against it."""
        seen: dict[str, None] = {}
        batch = next(iter(self._batches), None)
        names = list(self._found)
        try:
            if batch is not None:
                with self._hooks(lambda name, _: seen.setdefault(name)):
                    self._forward(_inputs(batch))
                if groups is not None:
                    self._check(groups, _inputs(batch))
        except Exception:
            self._group.fail(len(names))
            raise
        known = self._group.share(_WORKS, [*(names.index(name) for name in seen), *[-1] * (len(names) - len(seen))])
        found = next((row[1:] for row in known if row[1] >= 0), ())
        self.order = list(dict.fromkeys([names[int(place)] for place in found if place >= 0] + names))

    def _check(self, groups: list[list[str]], inputs: Any) -> None:
        """Raise UsageError if a layer feeds one of its own group, or of one before: its NaN arrive there."""
        places = {name: number for number, group in enumerate(groups) for name in group}
        for name, layer in self._found.items():
            seen: list[tuple[str, bool]] = []
            handle = layer.register_forward_hook(_spoil)
            try:
                with self._hooks(lambda other, x, seen=seen: seen.append((other, bool(x.isnan().any())))):  # type: ignore[misc]
                    self._forward(inputs)
            finally:
                handle.remove()
            wrong = [other for other, spoiled in seen if spoiled and other != name and places[other] <= places[name]]
            if wrong:
                raise UsageError(
                    f"layers: {name} feeds {wrong[0]}, which is in the same group or an earlier one; put it into a later one"
                )


def _spoil(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return torch.full_like(output, torch.nan)


def _inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward, as torch's `update_bn` takes them from a batch."""
    if isinstance(batch, Mapping):
        return (), {name: _tensor(value) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        if not batch:
            raise UsageError("batches: got an empty tuple, expected the input as its first element")
        batch = batch[0]
    return (_tensor(batch),), {}


def _tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _size(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    tensors = [value for value in (*inputs[0], *inputs[1].values()) if isinstance(value, torch.Tensor) and value.dim()]
    return len(tensors[0]) if tensors else 1


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
