"""Copies of torch modules, and the nested values that they take and return."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from bnexport.errors import UnsupportedModelError
from bnexport.sync_bn.recognition import is_sync_batch_norm

# Room on Python's stack for models of deeply nested modules: copies and exporters take many calls for each level.

# Calls for each level of nesting: 8 of copy.deepcopy, 13 of torch.export. And levels that fit on the system's stack.
_CALLS, _LEVELS = 20, 400
_lock = threading.Lock()
_needs: list[int] = []
_before: list[int] = []  # the limit while nobody needs more


@contextlib.contextmanager
def room_for(model: nn.Module) -> Iterator[None]:
    """Raise Python's recursion limit as far as `model` needs it. Several threads may do so at a time."""
    need = _CALLS * min(_depth(model), _LEVELS)
    with _lock:
        if not _needs:
            _before[:] = [sys.getrecursionlimit()]
        _needs.append(need)
        sys.setrecursionlimit(_before[0] + max(_needs))
    try:
        yield
    finally:
        with _lock:
            _needs.remove(need)
            # A limit below the calls of now is an error; the next one in another place sets it.
            with contextlib.suppress(RecursionError):
                sys.setrecursionlimit(_before[0] + max(_needs, default=0))


def _depth(model: nn.Module) -> int:
    """Return the levels of modules below `model`; itself without recursion."""
    depth, level, seen = 0, [model], {id(model)}
    while level:
        children = [child for module in level for child in module._modules.values() if child is not None]
        level = [child for child in children if id(child) not in seen]
        seen.update(id(child) for child in level)
        depth += bool(level)
    return depth


# Copies of modules that share process groups and redirect functions to the copy.


def copy_model(model: nn.Module, *, share_parameters: bool = False) -> nn.Module:
    """Copy a model deeply but share its process groups, which cannot be copied.

    Python does not copy functions. A forward set on an instance, or a hook, may refer to the model's
    modules and tensors (`norm.forward = lambda x: relu(plain(x))`); in the copy it refers to the copy's.

    share_parameters: the copy holds the same parameters, for runs and traces that do not change them;
    buffers, which a forward may change, are its own.

    Raises UnsupportedModelError for a module that holds something else that cannot be copied, such as a lock or the
    shards of FSDP.
    """
    _refuse_shards(model)
    memo: dict[int, Any] = {}
    for module in model.modules():
        synchronises = is_sync_batch_norm(module)
        for name, value in module.__dict__.items():
            if _is_process_group(value) or (synchronises and name in ("process_group", "group")):
                if value is not None:
                    memo[id(value)] = value
            elif isinstance(value, torch.Tensor) and not value.is_leaf:
                # A result of an earlier forward, or the weight that torch.nn.utils.weight_norm computes.
                memo[id(value)] = value.detach().clone()
    if share_parameters:
        # The first forward of a lazy module makes its parameters, in place.
        memo.update((id(p), p) for p in model.parameters() if not isinstance(p, UninitializedParameter))
    try:
        with room_for(model):
            copied = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__}: cannot be copied, and bnexport works on a copy: {error};"
            " move what cannot be copied out of the module"
        ) from error
    references = _References(model, memo)
    for module in copied.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, Mapping) and name.endswith("_hooks"):
                for key, hook in value.items():
                    value[key] = references.moved(hook)  # type: ignore[index]
            elif isinstance(value, (types.FunctionType, functools.partial)):
                module.__dict__[name] = references.moved(value)
    return copied


def _refuse_shards(model: nn.Module) -> None:
    """Raise UnsupportedModelError for a module of whose parameters this process holds a share."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and who has such a module has done so
    kinds = tuple(getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name))
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            raise UnsupportedModelError(
                f"{name or 'model'}: FSDP spreads its parameters over the processes; gather them on all processes, and"
                " go on with a model that is not wrapped: state = get_model_state_dict(model, options=StateDictOptions("
                "full_state_dict=True)) of torch.distributed.checkpoint.state_dict; plain.load_state_dict(state)"
            )


def _is_process_group(value: Any) -> bool:
    return torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup)


class _References:
    """Redirection of functions from a model to its copy; functions that do not refer to the model are shared."""

    def __init__(self, model: nn.Module, memo: dict[int, Any]) -> None:
        tensors = (*model.parameters(), *model.buffers())
        self._copies = {id(old): memo.get(id(old), old) for old in (*model.modules(), *tensors)}
        self._moved: dict[int, Any] = {}
        self._kept: list[Any] = []  # identities above stay those of live objects

    def moved(self, value: Any) -> Any:
        if isinstance(value, (nn.Module, torch.Tensor)):
            return self._copies.get(id(value), value)
        if isinstance(value, types.MethodType):
            owner = self.moved(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            return self._moved_partial(value)
        return self._moved_function(value) if isinstance(value, types.FunctionType) else value

    def _moved_partial(self, value: functools.partial[Any]) -> Any:
        function = self.moved(value.func)
        args = tuple(self.moved(arg) for arg in value.args)
        keywords = {name: self.moved(arg) for name, arg in value.keywords.items()}
        olds = (value.func, *value.args, *value.keywords.values())
        news = (function, *args, *keywords.values())
        same = all(old is new for old, new in zip(olds, news))
        return value if same else functools.partial(function, *args, **keywords)

    def _moved_function(self, function: types.FunctionType) -> Any:
        if id(function) in self._moved:
            return self._moved[id(function)]
        self._moved[id(function)] = function  # for one that refers to itself
        self._kept.append(function)
        closure = function.__closure__ or ()
        cells = [cell.cell_contents if _is_filled(cell) else None for cell in closure]
        names = [name for name in function.__code__.co_names if name in function.__globals__]
        values = [function.__globals__[name] for name in names]
        defaults = function.__defaults__ or ()
        keywords = function.__kwdefaults__ or {}
        old = [*cells, *values, *defaults, *keywords.values()]
        new = [self.moved(value) for value in old]
        if all(one is other for one, other in zip(old, new)):
            return function
        rest = iter(new)
        new_cells = [
            types.CellType(value) if value is not cell else old for cell, old, value in zip(cells, closure, rest)
        ]
        moved = types.FunctionType(
            function.__code__,
            {**function.__globals__, **dict(zip(names, rest))},
            function.__name__,
            tuple(value for _, value in zip(defaults, rest)) or None,
            tuple(new_cells),
        )
        moved.__kwdefaults__ = dict(zip(keywords, rest)) or None
        self._moved[id(function)] = moved
        return moved


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True
