"""Copies of a model's functions that see names of their own, while everybody else sees the functions as they are.

    module.forward -> a copy, whose globals are those of its file with `names` in front
        calls of resize(...), ops.resize(...), self.method(...), super().forward(...) reach copies in turn

Replacing a name in a Python module would change it for all models and threads that run the module's code.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_OTHERS = {"torch", "builtins", "bnexport"}
# What Python itself looks up in a function's globals.
_OF_THE_FILE = ("__name__", "__package__", "__spec__", "__file__", "__builtins__")
_ABSENT = object()


class OwnNames:
    """Copies of functions that the packages of a model's classes define, with `names` in front of their globals."""

    def __init__(self, names: Mapping[str, Any], model: nn.Module) -> None:
        self._names = dict(names)
        self._model = model
        packages = {kind.__module__.partition(".")[0] for module in model.modules() for kind in type(module).__mro__}
        self._packages = packages - _OTHERS
        self._copies: dict[int, tuple[Any, Any]] = {}  # by identity of the original, which is kept alive

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let the modules of the model call copies of their methods."""
        changed = []
        try:
            for module in self._model.modules():
                attributes = module.__dict__
                for name, own in [*self._methods(module), *self._functions(attributes)]:
                    changed.append((attributes, name, attributes.get(name, _ABSENT)))
                    attributes[name] = own
            yield
        finally:
            for attributes, name, old in reversed(changed):
                attributes.pop(name, None)
                if old is not _ABSENT:
                    attributes[name] = old

    def _methods(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        seen = set(module.__dict__)
        for kind in type(module).__mro__:
            for name, value in vars(kind).items():
                if name in seen or name.startswith("__"):
                    continue
                seen.add(name)
                function = value.__func__ if isinstance(value, staticmethod) else value
                own = self.own(function) if isinstance(function, types.FunctionType) else function
                if own is not function:
                    yield name, own if isinstance(value, staticmethod) else types.MethodType(own, module)

    def _functions(self, attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in attributes.items():
            if self.own(value) is not value:
                yield name, self.own(value)

    def own(self, value: Any) -> Any:
        """Return the copy of a function, method or Python module of the model's packages; anything else as it is."""
        if isinstance(value, types.MethodType):
            function = self.own(value.__func__)
            return value if function is value.__func__ else types.MethodType(function, value.__self__)
        if not isinstance(value, (types.FunctionType, types.ModuleType)):
            return value
        place = value.__module__ if isinstance(value, types.FunctionType) else value.__name__
        if (place or "").partition(".")[0] not in self._packages:
            return value
        if id(value) not in self._copies:
            if isinstance(value, types.ModuleType):
                self._copies[id(value)] = value, _Attributes(value, self)
            else:
                self._copy(value)
        return self._copies[id(value)][1]

    def _copy(self, function: types.FunctionType) -> None:
        names = {name: value for name, value in self._names.items() if not _compares(function.__code__, name)}
        cells = function.__closure__ or ()
        # Filled afterwards: a function may refer to itself.
        own_cells = [types.CellType() if _holds_function(cell) else cell for cell in cells]
        copied = types.FunctionType(
            function.__code__,
            _Globals(function.__globals__, {**names, "super": self._super}, self),
            function.__name__,
            function.__defaults__,
            tuple(own_cells),
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
        copied.__annotations__, copied.__doc__ = function.__annotations__, function.__doc__
        copied.__dict__.update(function.__dict__)
        self._copies[id(function)] = function, copied
        for cell, own_cell in zip(cells, own_cells, strict=True):
            if own_cell is not cell:
                own_cell.cell_contents = self.own(cell.cell_contents)

    def _super(self, *arguments: Any) -> _Attributes:
        if not arguments:
            frame = sys._getframe(1)
            arguments = frame.f_locals["__class__"], frame.f_locals[frame.f_code.co_varnames[0]]
        return _Attributes(builtins.super(*arguments), self)


class _Globals(dict[str, Any]):
    """Globals of a copy: names of its own, then those of the original's file as they are now."""

    def __init__(self, file: dict[str, Any], names: Mapping[str, Any], copies: OwnNames) -> None:
        super().__init__({name: file[name] for name in _OF_THE_FILE if name in file})
        self.update({name: value for name, value in names.items() if name not in file})
        self._file, self._copies = file, copies

    def __missing__(self, name: str) -> Any:
        return self._copies.own(self._file[name])


class _Attributes:
    """A Python module, or super(), whose functions are copies."""

    def __init__(self, original: Any, copies: OwnNames) -> None:
        self.__original, self.__copies = original, copies

    def __getattr__(self, name: str) -> Any:
        return self.__copies.own(getattr(self.__original, name))


def _holds_function(cell: types.CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, (types.FunctionType, types.MethodType))
    except ValueError:  # an empty one
        return False


def _compares(code: types.CodeType, name: str) -> bool:
    """Whether code asks if something `is` a name: another object under that name would change the answer."""
    for instruction, following in itertools.pairwise(dis.get_instructions(code)):
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval == name and following.opname == "IS_OP":
            return True
    return any(isinstance(constant, types.CodeType) and _compares(constant, name) for constant in code.co_consts)
