"""Data-parallel training: the exchange of a session with a torch.distributed group.

A step of N processes is the step of one process with the joint batch, but for rounding:

    agree       a short row from each rank: batch size, learning rate, what goes wrong is an error on every rank
    gradients   each rank runs its rows with its share of the loss; batch norms exchange statistics
    add up      gradients and loss, which lie one behind the other in one piece of memory
    update      each rank computes the same new parameters from the same sums

torch is imported here, and only for a group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bnexport import model_io
from bnexport.errors import DivergedError, GroupError, UsageError
from bnexport.training import graph, state
from bnexport.training.state import (
    GRADIENT_SUFFIX,
    LEARNING_RATE,
    LOSS,
    LOSS_WEIGHT,
    Description,
    State,
    changing,
)

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch.distributed import ProcessGroup


# Steps of a session in one process; `parallel` runs those of several.

Array = np.ndarray[Any, Any]


class SingleProcess:
    """A step's graph and its state."""

    def __init__(self, session: Any, description: Description, initial: Mapping[str, Array]) -> None:
        self.session = session
        self.inputs = {value.name: value for value in session.get_inputs()}
        self.state = State(initial, changing(session, initial))
        self._stage = self.state.bind(session)
        self._description = description
        self._names = description.gradients if description.mode == "gradients" else ()
        self._gradients: dict[str, Array] = {}

    def run(
        self, feeds: Mapping[str, Array], rows: int, weight: float | None, learning_rate: float, outputs: Sequence[str]
    ) -> tuple[float, list[Array]]:
        """Run one step. Return the loss and the outputs. Raises DivergedError."""
        del rows, weight  # one process has all of the loss
        if LEARNING_RATE in self.inputs:
            feeds = {**feeds, LEARNING_RATE: np.array(learning_rate, np.float64)}
        wanted = [LOSS, *outputs, *(name + GRADIENT_SUFFIX for name in self._names)]
        loss, *arrays = self._stage.run(feeds, wanted)
        state.check(float(loss), self.state, self._description)
        self.state.advance()
        self._gradients = dict(zip(self._names, arrays[len(outputs) :]))
        return float(loss), arrays[: len(outputs)]

    def gradients(self) -> dict[str, Array]:
        """Return the gradients of the last step, by parameter name, of a graph in mode "gradients"."""
        return self._gradients

    def invalidate(self) -> None:
        """Ignore that the state was set from outside."""

    def refuse(self) -> None:
        """Ignore that a batch was refused before the step."""


LossReduction = Literal["mean", "sum"]
LOSS_REDUCTIONS = ("mean", "sum")

# Elements of one collective: few and large, yet gloo's working memory stays bounded.
_BUCKET = 2**24
# Slices start at multiples of 64 bytes and more.
_ALIGNMENT = 16
_REFUSED = -1.0


class Group:
    """A torch.distributed group with a backend for CPU tensors, registered for the nodes of a graph."""

    def __init__(self, process_group: ProcessGroup) -> None:
        from bnexport.runtime.groups import register_group
        from bnexport.sync_bn import distributed

        if not distributed.is_initialized():
            raise GroupError(
                "group: torch.distributed is not initialised; call torch.distributed.init_process_group first"
            )
        self._name = distributed.name_of(process_group)
        group = distributed.resolve(self._name)
        self.size, self.rank = group.size(), group.rank()
        # Nodes find the group under its public name.
        known = distributed.published_name(self._name)
        self.public_name = known or f"training.{self._name}"
        register_group(self.public_name, process_group)
        if known is None:
            # A name for the nodes of this session; no export may write it.
            distributed.withdraw(self.public_name)

    def gather(self, row: Sequence[float]) -> Array:
        """Gather rows (n,) of all ranks to float64 (size, n). Raises GroupError."""
        import torch

        from bnexport.sync_bn import distributed

        return distributed.all_gather(torch.tensor(row, dtype=torch.float64), self._name).numpy()

    def add_up(self, buffer: Array) -> None:
        """Sum a flat array over the ranks, in place; every rank gets the same bits. Raises GroupError."""
        import torch

        from bnexport.sync_bn import distributed

        for start in range(0, buffer.size, _BUCKET):
            distributed.all_reduce(torch.from_numpy(buffer[start : start + _BUCKET]), self._name)


class FlatArrays:
    """Arrays that are slices of one flat array for each dtype, so that a collective needs no copy."""

    def __init__(self, specifications: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        import onnxruntime

        sizes: dict[np.dtype[Any], int] = {}
        places = {}
        for name, (shape, dtype) in specifications.items():
            places[name] = sizes.get(dtype, 0)
            count = int(np.prod(shape, dtype=np.int64))
            sizes[dtype] = places[name] + -(-count // _ALIGNMENT) * _ALIGNMENT
        self.buffers = {dtype: np.zeros(size, dtype) for dtype, size in sizes.items()}
        self.arrays: dict[str, Array] = {}
        for name, (shape, dtype) in specifications.items():
            count = int(np.prod(shape, dtype=np.int64))
            self.arrays[name] = self.buffers[dtype][places[name] : places[name] + count].reshape(shape)
        # These refer to the arrays' memory and do not own it.
        self.values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in self.arrays.items()}


class Parallel:
    """The two graphs of a step and their exchange.

    Args:
        path: the step's file.
        description: what it says about itself.
        initial: its state.
        group: a torch.distributed group.
        loss_reduction: how the loss joins rows: "mean" or "sum".
        open_model: makes an ONNX Runtime session of a model from a file.
    """

    def __init__(
        self,
        path: str,
        description: Description,
        initial: Mapping[str, Array],
        group: ProcessGroup,
        loss_reduction: LossReduction,
        open_model: Callable[[ir.Model, str], Any],
    ) -> None:
        if loss_reduction not in LOSS_REDUCTIONS:
            raise UsageError(f"loss_reduction: got {loss_reduction!r}, expected one of {', '.join(LOSS_REDUCTIONS)}")
        self._path, self._open = path, open_model
        self._group = Group(group)
        self._mean = loss_reduction == "mean"
        self._description = description
        session = self._open(self._gradients_graph(), path)
        self.inputs = {value.name: value for value in session.get_inputs()}
        summed = {LOSS, *(name + GRADIENT_SUFFIX for name in description.gradients)}
        outputs = [value for value in session.get_outputs() if value.name in summed]
        self._sums = FlatArrays(
            {value.name: (tuple(value.shape), np.dtype(state.DTYPES[value.type])) for value in outputs}
        )
        replaced = changing(session, description.state)
        updating = None
        if description.mode == "step":
            model = model_io.load(path)
            graph.keep_update(model, description, path)
            updating = self._open(model, path)
            replaced += changing(updating, description.state)
        self.state = State(initial, replaced)
        self._forward = self.state.bind(session, self._sums.values)
        self._update = None if updating is None else self.state.bind(updating, self._sums.values)
        self._digest = state.digest(path)
        self._checked = False
        self._broken = False

    def invalidate(self) -> None:
        """Mark the state as set from outside: the ranks compare it before the next step."""
        self._checked = False

    def refuse(self) -> None:
        """Tell the other ranks that this rank's batch is refused; called in place of `run`."""
        self._group.gather([_REFUSED, 0.0, 0.0, 1.0])

    def run(
        self, feeds: Mapping[str, Array], rows: int, weight: float | None, learning_rate: float, outputs: Sequence[str]
    ) -> tuple[float, list[Array]]:
        """Run one step. Return the joint loss and this rank's outputs; gradients are in `gradients`.

        Raises DivergedError for NaN; GroupError when ranks disagree, when one refuses its batch, and when one does not answer; whatever
        else stops a step between its exchanges leaves the others waiting, so that no other step can follow it.
        """
        if self._broken:
            raise GroupError(
                "an earlier step failed between its exchanges; start the processes again from a checkpoint"
            )
        share = self._agree(rows, weight, learning_rate)
        self._broken = True
        try:
            results = self._forward.run({**feeds, LOSS_WEIGHT: np.array(share)}, outputs)
        except Exception as error:  # ONNX Runtime raises one class for each status code
            if "the collective failed" in str(error):
                raise GroupError(
                    f"the step failed on rank {self._group.rank}: {' '.join(str(error).split())}"
                ) from error
            raise
        loss = self._sums.arrays[LOSS]
        own = float(loss)
        loss *= share
        for buffer in self._sums.buffers.values():
            self._group.add_up(buffer)
        if self._update is not None:
            self._update.run({LEARNING_RATE: np.array(learning_rate, np.float64)})
        self._broken = False
        self._check_numbers(float(loss), own)
        self.state.advance()
        return float(loss), results

    def gradients(self) -> dict[str, Array]:
        """Return copies of the joint loss's gradients, by parameter name."""
        return {name: self._sums.arrays[name + GRADIENT_SUFFIX].copy() for name in self._description.gradients}

    def _check_numbers(self, loss: float, own: float) -> None:
        """Raise DivergedError on every rank alike, since sums and state have the same bits on all."""
        try:
            state.check(loss, self.state, self._description)
        except DivergedError as error:
            ranks = np.flatnonzero(np.isnan(self._group.gather([own])[:, 0]))
            if not ranks.size:
                raise
            raise DivergedError(f"the loss of rank {ranks[0]} is NaN; {state.ADVICE}") from error

    def _gradients_graph(self) -> ir.Model:
        model = model_io.load(self._path)
        graph.keep_gradients(
            model, self._description, self._group.public_name, self._group.size, self._group.rank, self._path
        )
        return model

    def _agree(self, rows: int, weight: float | None, learning_rate: float) -> float:
        """Return this rank's share of the joint loss."""
        own = float(rows) if weight is None else float(weight)
        table = self._group.gather([rows, own, learning_rate, 0.0 if self._checked else 1.0])
        refusing = np.flatnonzero(table[:, 0] == _REFUSED)
        if refusing.size:
            raise GroupError(f"the batch of rank {refusing[0]} was refused there; no rank made the step")
        if table[:, 3].any():
            self._compare_state()
        if len(set(table[:, 2])) > 1:
            raise GroupError(f"learning_rate: the ranks have {_listed(table[:, 2])}; set the same on every rank")
        return share_of_loss(table[:, 1], self._group.rank, self._mean)

    def _compare_state(self) -> None:
        digest = hashlib.sha256(self._digest.encode())
        for name in self.state.names():
            digest.update(name.encode())
            digest.update(self.state.get(name).tobytes())
        number = float(int.from_bytes(digest.digest()[:6], "big"))  # exact in float64
        numbers = self._group.gather([number])[:, 0]
        different = np.flatnonzero(numbers != numbers[0])
        if different.size:
            raise GroupError(
                f"the state or the graph of rank {different[0]} is not that of rank 0; give every rank the same "
                "files, and load the same state_dict, checkpoint or seed on every rank"
            )
        self._checked = True


def share_of_loss(weights: Array, rank: int, mean: bool) -> float:
    """Return w_r of a rank: its share of the sum of all weights for a mean, 1 for a sum.

    weights: float64 (ranks,). Raises GroupError for weights that no mean can have.
    """
    if not mean:
        return 1.0
    total = float(weights.sum())
    if not (np.isfinite(weights).all() and (weights >= 0).all() and total > 0):
        raise GroupError(f"weight: the ranks have {_listed(weights)}, expected numbers >= 0, one of them > 0")
    return float(weights[rank]) / total


def _listed(values: Array) -> str:
    return ", ".join(f"{value:g}" for value in values)
