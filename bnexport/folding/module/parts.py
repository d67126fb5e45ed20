"""Tracing of a model as a whole by torch.fx, or else of its self-contained submodules.

A submodule of code that cannot be traced is a part if it is traced on its own, and if all that the code does with it
is to call it with one input (`reach`): then each of its batch norms gets its input from the same layer in every call,
whatever the code around it decides. What a part gets is not known to be a tensor, nor is its rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import fx, nn

from bnexport.errors import UnsupportedModelError
from bnexport.folding.module import reach, tracing
from bnexport.folding.module.tracing import Trace
from bnexport.sync_bn.copies import copy_model
from bnexport.torch_versions import BatchNormBase


def trace(model: nn.Module, example_inputs: tuple[torch.Tensor, ...] | None) -> Trace:
    """Trace `model` and the parts of its opaque submodules, as `tracing.trace`.

    Raises UnsupportedModelError where the outermost forward cannot be traced and no part has a batch norm.
    """
    found, failure = _trace(model, example_inputs, shapes=True)
    parts = [model.get_submodule(path) for path in found.parts]
    if failure is not None and not any(
        isinstance(module, BatchNormBase) for part in parts for module in part.modules()
    ):
        raise failure
    return found


def trace_again(model: nn.Module, example_inputs: tuple[torch.Tensor, ...] | None) -> Trace:
    """Trace a model without shapes after its batch norms were folded."""
    return _trace(model, example_inputs, shapes=False)[0]


def _trace(
    model: nn.Module, example_inputs: tuple[torch.Tensor, ...] | None, *, shapes: bool
) -> tuple[Trace, UnsupportedModelError | None]:
    failure = None
    try:
        found = tracing.trace(model, example_inputs, shapes=shapes)
    except UnsupportedModelError as error:
        failure = error
        if shapes and example_inputs is not None:
            tracing.run(copy_model(model, share_parameters=True), example_inputs)
        found = Trace((), {}, {"": tracing.reason(error)}, frozenset(), (), {})
    paths = {module: path for path, module in model.named_modules()}
    for part, inner in _Search(model).run(model.get_submodule(path) for path in found.opaque).items():
        found = _joined(found, paths[part], inner)
    return found, failure


class _Search:
    """Search for traceable parts below modules that cannot be traced."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._read: set[nn.Module] = set()  # modules whose code `reach` has read
        self._called: set[nn.Module] = set()
        self._used: set[nn.Module] = set()
        self._parts: dict[nn.Module, Trace] = {}

    def run(self, opaque: Iterable[nn.Module]) -> dict[nn.Module, Trace]:
        self._read_all(opaque)
        while unfit := [part for part, inner in self._parts.items() if not self._is_whole(part, inner)]:
            for part in unfit:
                del self._parts[part]
            self._read_all(unfit)
        return self._parts

    def _read_all(self, pending: Iterable[nn.Module]) -> None:
        """Read the code of modules, and of the modules that they call and that are no parts."""
        queue = list(pending)
        while queue:
            module = queue.pop()
            if module in self._read:
                continue
            self._read.add(module)
            uses = reach.read(module)
            self._used.update(below for used in uses.used for below in used.modules())
            for child, simple in uses.called.items():
                self._called.add(child)
                if not simple:
                    self._used.add(child)
                if child in self._parts or child in self._read or _is_torch_layer(child):
                    continue
                inner = _trace_alone(child) if simple else None
                if inner is None:
                    queue.append(child)
                else:
                    self._parts[child] = inner
                    queue += [child.get_submodule(path) for path in inner.opaque]

    def _is_whole(self, part: nn.Module, inner: Trace) -> bool:
        """Whether code outside the trace only calls `part` itself."""
        hidden = {module for path in inner.opaque for module in part.get_submodule(path).modules()}
        seen = set(part.modules()) - hidden
        if part in self._used or (seen - {part}) & (self._called | self._used):
            return False
        owners = (owner for owner in self._model.modules() if owner not in seen and owner not in hidden)
        return not any(child in seen and child is not part for owner in owners for child in owner.children())


def _is_torch_layer(module: nn.Module) -> bool:
    return not module._modules and type(module).__module__.startswith("torch.nn.modules.")


def _trace_alone(module: nn.Module) -> Trace | None:
    try:
        return tracing.trace(module, None, shapes=False, count=1)
    except UnsupportedModelError:
        return None


def _joined(whole: Trace, path: str, part: Trace) -> Trace:
    """Return `whole` extended by the graph of the submodule at `path`."""

    def full(inner: str) -> str:
        return f"{path}.{inner}" if inner else path

    paths: dict[fx.Node, str] = {node: full(inner) for node, inner in part.paths.items() if inner}
    return dataclasses.replace(
        whole,
        graphs=whole.graphs + part.graphs,
        paths=whole.paths | paths,
        opaque=whole.opaque | {full(inner): reason for inner, reason in part.opaque.items()},
        seen_by_hooks=whole.seen_by_hooks | part.seen_by_hooks,
        read=whole.read + tuple(full(inner) for inner in part.read),
        parts=(*whole.parts, path),
    )
