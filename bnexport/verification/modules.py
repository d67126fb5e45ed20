"""A folded module against the original, both in torch, on the caller's inputs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bnexport import tolerances
from bnexport.errors import UnsupportedModelError
from bnexport.runtime.engine import EngineFailure, failures
from bnexport.sync_bn.convert import replace, to_plain
from bnexport.torch_versions import pytree
from bnexport.verification.inputs.feeds import FeedGroup
from bnexport.verification.judge import Rules, judge
from bnexport.verification.torch_outputs import Array, in_double, to_array
from bnexport.verification.verdict import Verification


def compare(original: nn.Module, folded: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Verification:
    """Runs both, which are in eval mode and may change by it, and compares every output tensor.

    The bound is that of `bnexport.tolerances.model`, in the coarsest float type of any parameter or input. An original
    that cannot run here is replaced by its copy with torch's batch norms, unfolded.
    """
    feed = {str(index): value for index, value in enumerate(inputs)}
    label, reference = "original", _ModuleEngine(original)
    try:
        names, expected = reference.named(feed)
    except EngineFailure:  # some packages' batch norms run on GPUs only
        label, reference = "converted", _ModuleEngine(replace(original, to_plain))
        names, expected = reference.named(feed)
    again = reference.run(feed, names)
    if any(one.tobytes() != two.tobytes() for one, two in zip(expected, again)):
        return Verification.skipped("the model draws random numbers")
    try:
        rules = Rules(names, _working_type(original, inputs))
        verdict = judge(reference, _ModuleEngine(folded), [FeedGroup([feed], [expected])], rules)
    except EngineFailure as failure:  # where it misses its batch norms
        verdict = Verification("failed", f"the folded module fails: {failure.detail}")
    except UnsupportedModelError as error:
        verdict = Verification("failed", str(error))
    return dataclasses.replace(verdict, reference=label, engine=f"torch {torch.__version__}")


class _ModuleEngine:
    """A module whose outputs have the names of their places."""

    name = "torch"

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def named(self, feeds: Mapping[str, torch.Tensor]) -> tuple[list[str], list[Any]]:
        """Return the places of the output tensors, and their values. Raises EngineFailure."""
        with failures(self.name, "run"), torch.no_grad():
            # Code that works in place may change its inputs.
            leaves = pytree.tree_flatten_with_path(self._module(*(value.clone() for value in feeds.values())))[0]
        tensors = [(path, value) for path, value in leaves if isinstance(value, torch.Tensor)]
        return [f"output{pytree.keystr(path)}" for path, _ in tensors], [to_array(value) for _, value in tensors]

    def run(self, feeds: Mapping[str, torch.Tensor], outputs: Sequence[str]) -> list[Array]:
        names, values = self.named(feeds)
        if names != list(outputs):
            raise UnsupportedModelError(f"the outputs differ: {list(outputs)[:8]} and {names[:8]}")
        return values

    def exact(self, feeds: Sequence[Mapping[str, torch.Tensor]], outputs: Sequence[str]) -> list[list[Array]]:
        with failures(self.name, "run"):
            wide = _ModuleEngine(copy.deepcopy(self._module).double())
        return [wide.run(in_double(feed), outputs) for feed in feeds]


def _working_type(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> str:
    """Return the coarsest float type of any parameter or input."""
    used: list[Any] = [tensor.dtype for tensor in (*model.parameters(), *inputs) if tensor.is_floating_point()]
    names = {str(dtype).removeprefix("torch.") for dtype in used} & set(tolerances.UNIT_ROUNDOFF)
    return max(names, key=lambda name: tolerances.UNIT_ROUNDOFF[name], default="float32")
