"""Re-estimation of the running statistics of a torch module, in place.

The module runs in inference: a batch norm normalises with its running statistics. `one_by_one` measures the input of one
layer in each pass; the layers before it have their new statistics already. `together` measures all of them in one pass, and
gives each layer the statistics of its batch just before it runs; `stored` measures all of them with their own. Nothing else
changes: no mode, no counter, no weight; on an error the old statistics return.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bnexport import interface
from bnexport.errors import UsageError
from bnexport.interface import check_choice
from bnexport.recalibration import moments
from bnexport.recalibration.report import LayerChange, RecalibrationReport
from bnexport.sync_bn import passes
from bnexport.sync_bn.recognition import FrozenSyncBatchNorm, recognise

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TRACK = "set track_running_stats = True, running_mean = torch.zeros(C) and running_var = torch.ones(C) to give it some"


def recalibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    process_group: ProcessGroup | Callable[[Any], list[Any]] | None = None,
    layers: str = "one_by_one",
) -> RecalibrationReport:
    """Re-estimate the running statistics of every batch norm of `model` on data, in place; nothing else changes.

    Dropout and the like stay off. Frozen batch norms and those without running statistics are left alone.

    Args:
        model: any module; its batch norms and sync batch norms are those that `export` knows.
        batches: inputs of the model: tensors or NumPy arrays, tuples or lists whose first element is the input (as torch's
            `update_bn` takes them), or mappings of keyword arguments. `one_by_one` goes through them once for each layer: a list or a
            DataLoader, not a generator.
        process_group: processes that have different batches, any number of them; None: the world, if torch.distributed is
            initialised. All of them get the statistics of all rows. They exchange sums behind each pass. For processes of
            another library a function that takes a picklable value and returns those of all processes in one order, as
            mpi4py's `comm.allgather` does.
        layers: "one_by_one": layer after layer in the order of the forward, each on inputs that the layers before it have
            normalised with their new statistics: the result of one pass over all rows, whatever the batches and
            processes. "together": one pass, in which layers normalise with the statistics of the batch of their own process;
            only the first layers are independent of the batches.

    Raises:
        UsageError: no rows, one value a channel, a value that is not finite (its row is named), or a generator where
            several passes are needed. The statistics are the old ones.
        GroupError: the processes have different models, or one of them failed.

    Source of the formulas: bnexport.recalibration.moments.

    Examples:
        >>> import torch, bnexport
        >>> model = torch.nn.BatchNorm1d(1).double()
        >>> report = bnexport.recalibrate(model, [torch.tensor([[1.0], [2.0]]).double(), torch.tensor([[6.0]]).double()])
        >>> model.running_mean.item(), model.running_var.item()
        (3.0, 7.0)
    """
    check_choice("layers", layers, moments.MODES)
    return measure_module(model, batches, process_group, layers)


def measure_module(model: nn.Module, batches: Iterable[Any], process_group: Any, layers: str) -> RecalibrationReport:
    """Measure the batch norms of a module, and replace their statistics unless `layers` is "stored": then one pass, in which
    each normalises with its stored statistics.
    """
    found, left = _batch_norms(model)
    old = {name: _statistics(layer) for name, layer in found.items()}
    buffers: Iterator[Any] = (layer.running_mean for layer in found.values())
    device: torch.device = next((buffer.device for buffer in buffers), torch.device("cpu"))
    # A group without a backend for the CPU exchanges on the current device.
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with current, _inference(model), torch.no_grad():
        sums = moments.Measurement({name: (name, len(old[name][0])) for name in found}, process_group)
        run = _ModuleRun(model, found, sums, device)
        try:
            if found:
                run.one_by_one(batches) if layers == "one_by_one" else run.in_one_pass(batches, layers == "stored")
        except BaseException:
            for name, layer in found.items():
                _write(layer, *old[name])
            raise
    left += [(name, "it did not run on these rows") for name in found if name not in sums.done]
    changes = [run.change(name, old[name]) for name in run.order if name in sums.done]
    return RecalibrationReport(tuple(changes), tuple(left), layers, sums.passes, sums.batches, sums.rows)


def _batch_norms(model: nn.Module) -> tuple[dict[str, nn.Module], list[tuple[str, str]]]:
    """Return the batch norms to estimate, by name, and those that are left alone, with the reason."""
    found: dict[str, nn.Module] = {}
    left = []
    for name, module in model.named_modules():
        kind = recognise(module)
        if kind is None:
            continue
        shown = name or type(module).__name__
        if kind.kind == "frozen" or isinstance(module, FrozenSyncBatchNorm):
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


class _ModuleRun:
    """One re-estimation. order: names in the order of the forward. calls: the most of each layer for one batch."""

    def __init__(
        self, model: nn.Module, found: dict[str, nn.Module], sums: moments.Measurement, device: torch.device
    ) -> None:
        self._model, self._found, self._sums, self._device = model, found, sums, device
        self.order = list(found)
        self._calls: collections.Counter[str] = collections.Counter()

    def change(self, name: str, old: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> LayerChange:
        row, eps = self._sums.done[name], float(getattr(self._found[name], "eps", 0.0))
        first = name == self.order[0]
        return LayerChange(name, int(row[0]), eps, first, self._calls[name], *old, *moments.statistics(row))

    def one_by_one(self, batches: Iterable[Any]) -> None:
        """Finish the layers in their order, one in a pass."""
        count = len(self._found)
        if count > 1:
            self._measure(batches, (), passes=count, look=True)
        for number, name in enumerate(self.order):
            interface.report("pass", number, count)
            self._measure(batches, (name,))
            if name in self._sums.done:
                _write(self._found[name], *moments.statistics(self._sums.done[name]))

    def in_one_pass(self, batches: Iterable[Any], stored: bool) -> None:
        """Finish all layers in one pass; `stored` ones keep their statistics."""
        self._measure(batches, self._found, replace=not stored)
        for name, row in () if stored else self._sums.done.items():
            _write(self._found[name], *moments.statistics(row))

    def _measure(
        self, batches: Iterable[Any], names: Collection[str], *, replace: bool = False, **options: Any
    ) -> None:
        """Go through the batches once and measure the layers `names`.

        replace: each gets the statistics of its batch, with which it normalises next.
        """
        calls: collections.Counter[str] = collections.Counter()

        def before(name: str, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = inputs[0] if inputs else next(iter(named.values()))
            calls[name] += 1
            self._sums.see(name)
            if name in names:
                backend, arranged = passes.arrange(x.detach())
                row = backend.forward_row(arranged, "exact").cpu().numpy()
                self._sums.add(name, row, x)
                if replace and row[0]:
                    _write(module, *self._sums.of_batch(name, row))

        def run(batch: Any) -> None:
            calls.clear()
            positional, named = _inputs(batch)
            self._sums.size = _size(positional, named)
            self._forward(positional, named)
            self._calls |= calls

        with contextlib.ExitStack() as hooks:
            for name, layer in self._found.items():
                hook = functools.partial(before, name)
                hooks.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            self._sums.measure(batches, run, **options)
        if len(names) != 1:  # a pass for one layer follows one for all
            self.order = list(dict.fromkeys([*self._sums.order, *self.order]))

    def _forward(self, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        if named:
            self._check_names(named)
        self._model(
            *(_moved(value, self._device) for value in positional),
            **{name: _moved(value, self._device) for name, value in named.items()},
        )

    def _check_names(self, named: Mapping[str, Any]) -> None:
        try:
            inspect.signature(self._model.forward).bind(**named)
        except TypeError as error:
            raise UsageError(
                f"batches: got a mapping with {', '.join(map(str, named))}, expected the keyword arguments of the model's "
                f"forward ({error}); give the inputs alone, such as [batch[{next(iter(named))!r}] for batch in loader]; "
                "nothing was changed"
            ) from error


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
    return torch.from_numpy(np.require(value, requirements="W")) if isinstance(value, np.ndarray) else value


def _size(positional: tuple[Any, ...], named: dict[str, Any]) -> int:
    tensors = [value for value in (*positional, *named.values()) if isinstance(value, torch.Tensor) and value.dim()]
    return len(tensors[0]) if tensors else 1


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
