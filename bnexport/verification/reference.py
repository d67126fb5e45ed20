"""The caller's own module as the reference of a verification.

It is copied before anything is prepared for the export, and each run works on a fresh copy of that copy, so that the
reference shares no step with the exported model: an error of the conversion shows as a difference. Parameters are
shared with the caller's module, buffers are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bnexport import tolerances
from bnexport.errors import first_line
from bnexport.modules.copies import copy_model
from bnexport.modules.module_graph import ModuleGraph
from bnexport.modules.module_trace import Trace
from bnexport.modules.tensors import Array, in_double, to_array
from bnexport.runtime.engine import failures
from bnexport.sync_bn.convert import replace, to_plain
from bnexport.torch_versions import pytree
from bnexport.verification.comparison import is_same
from bnexport.verification.inputs import FeedGroup
from bnexport.verification.judge import Rules, judge
from bnexport.verification.proof.search import ENGINE, prove
from bnexport.verification.verdict import Claim, Verification

Tensors = tuple[torch.Tensor, ...]
Buffers = dict[str, torch.Tensor]


class Reference:
    """Runs the caller's module, in its own mode or in eval mode.

    cause: why the caller's module cannot run here (torch.nn.SyncBatchNorm in training needs a GPU); then its
    conversion is the reference. Empty otherwise.
    unreturned: buffers that the module's forward changes and that are no state of the exported model.
    """

    name = "torch"

    def __init__(self, model: nn.Module, *, evaluate: bool) -> None:
        self._model = copy_model(model, share_parameters=True)
        if evaluate:
            self._model.eval()
        self._converted: nn.Module | None = None
        self._state: tuple[str, ...] = ()
        self._first: tuple[Tensors, Tensors, Buffers] | None = None
        self._random: bool | None = None
        self.cause = ""

    @property
    def unreturned(self) -> tuple[str, ...]:
        if self._first is None:
            return ()
        after, known = self._first[2], set(self._state)
        return tuple(
            name
            for name, before in self._model.named_buffers()
            if name not in known and not (name in after and _equal(before, after[name]))
        )

    def run_first(self, inputs: Tensors) -> None:
        """Run the caller's module on the example inputs and keep the results for the next call with them."""
        try:
            self._first = (inputs, *_run(self._model, inputs))
        except Exception as error:  # what the model's code raises
            self.cause = first_line(error)

    def complete(self, converted: nn.Module, state: Sequence[str] = ()) -> None:
        """Set the stand-in for a module that cannot run here, and what a call returns after the outputs.

        converted: returns the outputs, and the new values of the state, as one tuple; its calls change nothing.
        state: names, as in the state_dict, of the buffers whose new values are compared.
        """
        self._converted, self._state = converted, tuple(state)

    def __call__(self, inputs: Tensors) -> Tensors:
        """Return the output tensors, then the new value of each state tensor. Raises what the module raises."""
        if self._first is None and not self.cause:
            self.run_first(inputs)
        if self.cause:
            return self._run_converted(inputs)
        assert self._first is not None
        outputs, buffers = self._first[1:] if self._first[0] is inputs else _run(self._model, inputs)
        return outputs + self._new_state(buffers, inputs)

    def is_random(self, inputs: Tensors) -> bool:
        """Whether a second run on the example gives other values, as with Dropout in train mode."""
        if self._random is not None:
            return self._random
        first = self(inputs)
        if self.cause:
            second = self._run_converted(inputs)
        else:
            outputs, buffers = _run(self._model, inputs)
            second = outputs + self._new_state(buffers, inputs)
        self._random = not all(_equal(one, two) for one, two in zip(first, second))
        return self._random

    def run(self, feeds: Mapping[str, torch.Tensor], outputs: Sequence[str]) -> list[Array]:
        """Return all outputs as arrays: the reference as an engine. Raises EngineFailure."""
        with failures(self.name, "run"):
            return list(map(to_array, self(tuple(feeds.values()))))

    def exact(self, feeds: Sequence[Mapping[str, torch.Tensor]], outputs: Sequence[str]) -> list[list[Array]]:
        """Return the same, computed in float64 from these inputs. Raises EngineFailure."""
        with failures(self.name, "run"):
            return [list(map(to_array, self._in_float64(feed))) for feed in feeds]

    def _in_float64(self, feeds: Mapping[str, torch.Tensor]) -> Tensors:
        wide = tuple(in_double(feeds).values())
        if self.cause:
            assert self._converted is not None
            return _run(copy_model(self._converted).double(), wide)[0]
        outputs, buffers = _run(copy_model(self._model).double(), wide)
        return outputs + self._new_state(buffers, tuple(feeds.values()))

    def _run_converted(self, inputs: Tensors) -> Tensors:
        assert self._converted is not None
        return _run(self._converted, inputs)[0]

    def _new_state(self, buffers: Buffers, inputs: Tensors) -> Tensors:
        """Return the new state; a counter that only the conversion has is taken from it."""
        missing = [name for name in self._state if name not in buffers]
        if missing:
            converted = self._run_converted(inputs)[-len(self._state) :]
            buffers = {**dict(zip(self._state, converted)), **buffers}
        return tuple(buffers[name] for name in self._state)


def _run(model: nn.Module, inputs: Tensors) -> tuple[Tensors, Buffers]:
    """Run a copy; return the output tensors and the buffers. `model` and the inputs stay as they are."""
    model = copy_model(model, share_parameters=True)
    with torch.no_grad():
        leaves = pytree.tree_leaves(model(*(value.clone() for value in inputs)))
    outputs = tuple(value.detach() for value in leaves if isinstance(value, torch.Tensor))
    return outputs, dict(model.named_buffers(remove_duplicate=False))


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    return is_same(to_array(one), to_array(two))


# Verify folds of a torch module: both modules run on the caller's inputs, and each fold is proved where it stands.
#
# The proof reads the graph of each module (`modules.module_graph`), as that of a file.

# A folded module against the original, both in torch, on the caller's inputs.


def compare(original: nn.Module, folded: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Verification:
    """Runs both, as they are, and compares every output tensor.

    The bound is that of `bnexport.tolerances.model`, in the coarsest float type of any parameter or input. An original
    that cannot run here is replaced by its copy with torch's batch norms, unfolded.
    """
    reference, candidate = (Reference(module, evaluate=False) for module in (original, folded))
    for engine in (reference, candidate):
        engine.run_first(inputs)
    if reference.cause:  # some packages' batch norms run on GPUs only
        reference.complete(replace(original, to_plain))
    if candidate.cause:  # where it misses its batch norms
        return Verification("failed", f"the folded module fails: {candidate.cause}")
    expected = [to_array(value) for value in reference(inputs)]
    if reference.is_random(inputs):
        return Verification.skipped("the model draws random numbers")
    names = ["output"] if len(expected) == 1 else [f"output {index}" for index in range(len(expected))]
    feeds = FeedGroup([{str(index): value for index, value in enumerate(inputs)}], [expected])
    verdict = judge(reference, candidate, [feeds], Rules(names, _working_type(original, inputs)))
    label = "converted" if reference.cause else "original"
    return dataclasses.replace(verdict, reference=label, engine=f"torch {torch.__version__}")


def _working_type(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> str:
    """Return the coarsest float type of any parameter or input."""
    used: list[Any] = [tensor.dtype for tensor in (*model.parameters(), *inputs) if tensor.is_floating_point()]
    names = {str(dtype).removeprefix("torch.") for dtype in used} & set(tolerances.UNIT_ROUNDOFF)
    return max(names, key=lambda name: tolerances.UNIT_ROUNDOFF[name], default="float32")


def prove_module(
    original: ModuleGraph, folded: Trace, examples: Mapping[str, torch.Tensor], claims: Sequence[Claim]
) -> Verification:
    """Prove each fold, and that everything else is the same. claims: of nodes of the original's graph.

    examples: tensors like the values, by name, as far as they are known; without them what changes a value of any rank may not be provable.
    """
    try:
        return prove(original.model, ModuleGraph(folded, examples).model, claims)
    except Exception as error:  # whatever a module's classes make of their tensors
        reason = f"the module cannot be written as a graph: {type(error).__name__}: {first_line(error)[:200]}"
        return Verification("not_verified", reason, engine=ENGINE, method="local")
