"""Arguments of an export: the unwrapped module and its flattened example inputs."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from bnexport.errors import MalformedModelError, MissingFileError, UnsupportedModelError, UsageError, first_line
from bnexport.exporting.dimensions import Note
from bnexport.torch_versions import compiled_module, key_of, pytree

_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")
_WRAPPER = """
    class Wrapped(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model
        def forward(self, x):
            return self.model(...)  # make the argument of tensors"""
_CONSTANTS = (bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A module that takes tensors by position, these tensors, and their names."""

    model: nn.Module
    inputs: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    notes: tuple[Note, ...]


def read(model: Any, args: Any, kwargs: Mapping[str, Any]) -> Arguments:
    """Return the tensors in `args`, the positional arguments, and `kwargs`, as torch.export takes them.

    Dicts, lists, tuples and dataclasses that pytree knows are taken apart; numbers, strings and None are constants of the file.
    The returned module shares submodules, parameters and buffers with `model`, which stays as it is.

    Raises UsageError for what is no module or no example of its inputs, UnsupportedModelError for quantised modules.
    """
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise UsageError(
            f"model: got a {type(model).__name__}; export the module that it was made from, or, if there is only TorchScript,"
            " call torch.onnx.export(model, args, path, dynamo=False) and bnexport.fold(path, ...)"
        )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model: got {type(model).__name__}, expected a torch.nn.Module, a torch.export.ExportedProgram or a .pt2 file;"
            " the order is export(model, args, path)"
        )
    model, notes = _unwrapped(model)
    _check_values(model)
    _check_dict(model, args)
    given = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    if not kwargs and all(isinstance(value, torch.Tensor) for value in given):
        return Arguments(model, given, tuple(input_names(model, len(given))), notes)
    _check_keywords(model, len(given), kwargs)
    paths, spec = pytree.tree_flatten_with_path((given, dict(kwargs)))
    positional = input_names(model, len(given))
    tensors: dict[str, torch.Tensor] = {}
    constants: list[Any] = []
    for (group, first, *rest), leaf in paths:
        start = positional[key_of(first)] if key_of(group) == 0 else str(key_of(first))
        name = "_".join((start, *(str(key_of(key)) for key in rest)))
        constants.append(None if isinstance(leaf, torch.Tensor) else leaf)
        if isinstance(leaf, torch.Tensor):
            tensors[next(each for each in _numbered(name) if each not in tensors)] = leaf
        elif not isinstance(leaf, _CONSTANTS):
            raise UsageError(
                f"args: {name}: got {type(leaf).__name__}, expected tensors, numbers, strings and None, alone or in dicts,"
                f" lists and tuples; else export a module around the model:{_WRAPPER}"
            )
        elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            notes += (Note("argument", f"input {name!r} is the constant {leaf} in the file; only tensors are inputs"),)
    if constants and not tensors:
        raise UsageError("args: got no tensor, expected one at least: tensors are what a file has as inputs")
    is_tensor = [isinstance(leaf, torch.Tensor) for _, leaf in paths]
    return Arguments(_by_position(model, constants, is_tensor, spec), tuple(tensors.values()), tuple(tensors), notes)


def program_of(model: Any) -> torch.export.ExportedProgram | None:
    """Return the program that `model` is, or that a .pt2 file of that name holds; None for anything else.

    Raises MissingFileError, and MalformedModelError for a file that torch cannot load.
    """
    if not (isinstance(model, (str, os.PathLike)) and os.fspath(model).endswith(".pt2")):
        return model if isinstance(model, torch.export.ExportedProgram) else None
    try:
        return torch.export.load(model)
    except FileNotFoundError as error:
        raise MissingFileError(f"model: {os.fspath(model)}: no such file") from error
    except Exception as error:  # torch raises what it likes
        text = f"model: {os.fspath(model)!r}: torch.export.load cannot read it: {first_line(error)}"
        raise MalformedModelError(text) from error


def input_names(model: nn.Module, count: int) -> list[str]:
    """Return the names of forward's parameters, one for each positional input."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "input")
    names += [f"{variadic}_{index}" for index in range(count)]
    return names[:count]


def check_path(path: Any, overwrite: bool) -> None:
    """Raise UsageError for what is no path, and for a file that exists and must not be replaced."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        got = "none" if isinstance(path, str) else type(path).__name__
        raise UsageError(
            f"path: got {got}, expected the name of a file, as in export(model, args, path); export to a file and read its bytes"
        )
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise MissingFileError(f"path: the folder {folder!r} does not exist; create it first")
    if not overwrite and os.path.lexists(path):
        raise UsageError(f"path: {os.fspath(path)!r} exists; write to another file, or replace it with overwrite=True")


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{index}" for index in itertools.count(1))


def _unwrapped(model: nn.Module) -> tuple[nn.Module, tuple[Note, ...]]:
    """Return the module inside wrappers of torch that add nothing to what it computes."""
    notes: tuple[Note, ...] = ()
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel) and model.training and model.broadcast_buffers:
            text = "DistributedDataParallel copies buffers from its first process in every forward; the file does not"
            notes += (Note("unwrapped", text),)
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif (inner := compiled_module(model)) is not None:
            model = inner
        else:
            return model, notes


def _check_values(model: nn.Module) -> None:
    """Raise for modules whose parameters are no float numbers: quantised ones, and those without values."""
    for path, module in model.named_modules():
        if type(module).__module__.startswith(_QUANTIZED):
            raise UnsupportedModelError(
                f"{path or 'model'}: a quantised {type(module).__name__}, which ONNX has no form of; export the model before"
                " torch.ao.quantization.convert, and quantise the file"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UsageError(
                f"model: {name!r} is on the meta device and has no values; build the model on the CPU, or call"
                " model.to_empty(device='cpu') and load a checkpoint"
            )


def _check_dict(model: nn.Module, args: Any) -> None:
    """Raise UsageError for keyword arguments in place of `args`, as other exporters take them."""
    if isinstance(args, Mapping) and args and set(args) <= set(inspect.signature(model.forward).parameters):
        listed = ", ".join(f"{name!r}: ..." for name in args)
        raise UsageError(
            f"args: got a dict of forward's parameters; write args=(), kwargs={{{listed}}}; where forward takes the dict "
            f"itself, args=({{{listed}}},)"
        )


def _check_keywords(model: nn.Module, count: int, kwargs: Mapping[str, Any]) -> None:
    parameters = inspect.signature(model.forward).parameters
    any_name = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    unknown = [name for name in kwargs if name not in parameters]
    if unknown and not any_name:
        raise UsageError(f"kwargs: got {', '.join(unknown)}, expected among {', '.join(parameters)}")
    positional = [each.name for each in parameters.values() if each.kind is not each.KEYWORD_ONLY][:count]
    twice = [name for name in positional if name in kwargs]
    if twice:
        raise UsageError(f"kwargs: got {', '.join(twice)}, which args hold already")


def _by_position(model: nn.Module, constants: list[Any], is_tensor: list[bool], spec: Any) -> nn.Module:
    """Return the module with a forward that takes tensors by position and puts them into their places."""
    cls = type(model)

    def forward(self: Any, *inputs: torch.Tensor) -> Any:
        tensors = iter(inputs)
        leaves = [next(tensors) if is_input else value for is_input, value in zip(is_tensor, constants)]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return cls.forward(self, *args, **kwargs)

    wrapped = copy.copy(model)
    wrapped.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    return wrapped
