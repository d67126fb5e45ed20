"""Substitutes in a traced model: of int(), of operators, and of parameters."""

from __future__ import annotations

import builtins
import contextlib
import dis
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from bnexport import torch_versions
from bnexport.exporting.exact_sizes import is_exact

# Adaptive pooling for any image size, composed of operators that exporters translate.
#
# Exporters write adaptive pooling as a pooling with fixed windows, which is right at the example's size only, if at all.
# Window i of k over n values is [floor(i n / k), ceil((i + 1) n / k)), so that
#
#     value j is at or behind the start  <=>  i n < (j + 1) k
#     value j is before the end          <=>  j k < (i + 1) n
#
# The average along one axis is a product with the matrix of both conditions (k, n), its rows divided by their sums. The
# maximum gathers the values of each window, the last one repeated up to the length of the longest window.
#
# Resampling to the nearest value by a factor f is a Gather where ONNX's Resize takes another neighbour at a tie: value i
# of the result is value floor((i + s) c) of the input, with c = 1 / f rounded to float32 as in torch, and s = 1/2 for
# "nearest-exact", 0 for "nearest". Resize divides i + s by f instead: 10 / 2.3 * 2.3 is 10 in one of the two only.

Tensor = torch.Tensor
# A number, or one that an exporter records: a SymInt, or a tensor in a trace.
Size = Any


class AnySize(TorchFunctionMode):
    """Context that computes adaptive pooling and resampling to the nearest value by the formulas above.

    dynamic: whether image sizes may vary; else windows of one length are left to the exporter. Pooling to one value is
    always left: exporters write it for any size.
    """

    def __init__(self, *, dynamic: bool) -> None:
        super().__init__()
        self._dynamic = dynamic
        # Those of resampling, by what they are in float32.
        self.factors: dict[float, float] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _POOLINGS:
            axes, along = _POOLINGS[func]
            return self._pool(axes, along, func, *args, **kwargs)
        if func is F.interpolate:
            return self._interpolate(*args, **kwargs)
        if func in _RESAMPLINGS:  # of an ExportedProgram
            data, size, factors = (*args, *kwargs.values())
            return self._interpolate(data, size, factors, _RESAMPLINGS[func])
        if func is F.batch_norm and (args[1] if len(args) > 1 else kwargs.get("running_mean")) is None:
            return _normalised(*args, **kwargs)
        return func(*args, **kwargs)

    def _interpolate(
        self,
        input: Tensor,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Compute resampling by area as adaptive average pooling, and to the nearest value by indices where it has to be."""
        axes = input.dim() - 2
        spread = list(scale_factor) if isinstance(scale_factor, (list, tuple)) else [scale_factor] * axes
        factors = [float(each) for each in spread if each is not None]
        recomputed = mode == "area" or kwargs.get("recompute_scale_factor") or (len(args) > 1 and args[1])
        factors = factors if size is None and len(factors) == axes else []
        sizes = [_scaled(input, axis - axes, factor) for axis, factor in enumerate(factors)]
        if mode == "area" and 1 <= axes <= 3 and (sizes or size is not None):
            pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[axes - 1]
            return self._pool(axes, _average, pool, input, sizes or size)
        own = mode == "nearest-exact" or (mode == "nearest" and not all(map(_resize_is_exact, factors)))
        if factors and own:
            for axis, length, factor in zip(range(-axes, 0), sizes, factors):
                step = input.shape[axis] / length if recomputed else 1 / factor
                input = _nearest(input, axis, length, step, 0.5 if mode == "nearest-exact" else 0.0)
            return input
        if factors and recomputed:
            return F.interpolate(input, sizes, None, mode, *args[:1], **{**kwargs, "recompute_scale_factor": None})
        self.factors.update((float(np.float32(factor)), factor) for factor in factors)
        return F.interpolate(input, size, scale_factor, mode, *args, **kwargs)

    def _pool(
        self,
        axes: int,
        along: Callable[[Tensor, int, Size, Size], Tensor],
        func: Any,
        input: Tensor,
        output_size: Any,
        return_indices: bool = False,
    ) -> Any:
        sizes = list(output_size) if isinstance(output_size, (list, tuple)) else [output_size] * axes
        given = [input.shape[axis - axes] if self._dynamic else int(input.shape[axis - axes]) for axis in range(axes)]
        if return_indices or all(_has_equal_windows(n, k) for n, k in zip(given, sizes)):
            return func(input, output_size, **({"return_indices": True} if return_indices else {}))
        for axis, n, k in zip(range(-axes, 0), given, sizes):
            if k is not None:
                input = along(input, axis, n, k)
        return input


def _normalised(
    input: Tensor,
    running_mean: None,
    running_var: None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute a batch norm without running statistics."""
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    axes, shape = [0, *range(2, input.dim())], [1, -1, *[1] * (input.dim() - 2)]
    centred = wide - wide.mean(axes, keepdim=True)
    result = centred / (centred.square().mean(axes, keepdim=True) + eps).sqrt()
    if weight is not None:
        result = result * weight.to(wide.dtype).view(shape)
    if bias is not None:
        result = result + bias.to(wide.dtype).view(shape)
    return result.to(input.dtype)


def _resize_is_exact(factor: float) -> bool:
    """Whether ONNX's Resize by a factor gives the same sizes as torch, and takes the same values up to the 4096th."""
    i = np.arange(4096, dtype=np.float32)
    return is_exact(factor) and np.array_equal(np.floor(i / np.float32(factor)), np.floor(i * np.float32(1 / factor)))


def _scaled(input: Tensor, axis: int, factor: float) -> Size:
    """Compute the size of an axis that is resized. A trace computes numbers in float32, unless they are a tensor with a dimension."""
    n = input.shape[axis]
    if isinstance(n, Tensor):
        return (n.reshape(1).double() * torch.tensor([factor], dtype=torch.float64)).long().reshape(())
    return torch.sym_int(n * factor)


def _nearest(input: Tensor, axis: int, size: Size, step: Size, shift: float) -> Tensor:
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    index = ((torch.arange(size, device=input.device, dtype=dtype) + shift) * step).long()
    return input.index_select(axis, index.clamp(max=input.shape[axis] - 1))


def _has_equal_windows(n: Size, k: Size) -> bool:
    """Whether the output size is 1, or all windows have one length that is known at export."""
    if type(k) is not int:
        return False
    return k == 1 or (type(n) is int and n % k == 0)


def _windows(n: Size, k: Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute masks of the values at or after the start of a window and before its end: bool (k, n)."""
    i = torch.arange(k, device=device)[:, None]
    j = torch.arange(n, device=device)
    return i * n < (j + 1) * k, j * k < (i + 1) * n


def _average(input: Tensor, axis: int, n: Size, k: Size) -> Tensor:
    if type(k) is int and k == 1:
        return input.mean(axis, keepdim=True)
    if input.dtype in (torch.float16, torch.bfloat16):  # torch sums them in float32
        return _average(input.float(), axis, n, k).to(input.dtype)
    behind_start, before_end = _windows(n, k, input.device)
    inside = (behind_start & before_end).to(input.dtype)
    matrix = inside / inside.sum(1, keepdim=True)
    if axis == -2:
        return matrix @ input
    if axis == -1:
        return input @ matrix.t()
    return (input.transpose(axis, -1) @ matrix.t()).transpose(axis, -1)


def _maximum(input: Tensor, axis: int, n: Size, k: Size) -> Tensor:
    if type(k) is int and k == 1:
        return input.amax(axis, keepdim=True)
    behind_start, before_end = _windows(n, k, input.device)
    start, end = (~behind_start).sum(1, keepdim=True), before_end.sum(1, keepdim=True)
    longest = n // k + 2
    index = torch.minimum(start + torch.arange(longest, device=input.device), end - 1)
    # An index of two dimensions becomes one Gather; a reshape would bake the example's sizes into declared shapes.
    # ONNX Runtime's ReduceMax leaves an empty tensor as it is: with the axis kept, Squeeze says so.
    return input.transpose(axis, -1)[..., index].amax(-1, keepdim=True).squeeze(-1).transpose(axis, -1)


_POOLINGS: dict[Any, tuple[int, Callable[[Tensor, int, Size, Size], Tensor]]] = {
    F.adaptive_avg_pool1d: (1, _average),
    F.adaptive_avg_pool2d: (2, _average),
    F.adaptive_avg_pool3d: (3, _average),
    F.adaptive_max_pool1d: (1, _maximum),
    F.adaptive_max_pool2d: (2, _maximum),
    F.adaptive_max_pool3d: (3, _maximum),
}


_RESAMPLINGS: dict[Any, str] = {
    getattr(torch.ops.aten, f"{prefix}upsample_nearest{'_exact' * bool(prefix)}{axes}d").vec: mode
    for prefix, mode in (("", "nearest"), ("_", "nearest-exact"))
    for axes in (1, 2, 3)
}


# Parametrized weights as plain parameters, for TorchScript: torch refuses to script torch.nn.utils.parametrize.


def with_plain_parameters(copied: nn.Module) -> nn.Module:
    """Give each parametrized weight of `copied`, a copy in eval mode, the value that it has there, in place.

    torch's remove_parametrizations changes the class, which the original shares, and the tensors, which layers share.
    """
    for module in [module for module in copied.modules() if parametrize.is_parametrized(module)]:
        names = list(module.parametrizations)  # type: ignore[arg-type]
        with torch.no_grad():
            values = {name: getattr(module, name).clone() for name in names}
        module.__class__ = parametrize.type_before_parametrizations(module)
        del module._modules["parametrizations"]
        module._parameters.update({name: nn.Parameter(value) for name, value in values.items()})
    return copied


# torch.nn.utils.weight_norm in operators that every exporter knows.
#
#     weight = v * (g / norm),   norm = sqrt(sum of v^2 over all axes but `dim`)
#
# torch.onnx translates aten::_weight_norm for matrices and kernels; for a vector, such as the weight of a
# batch norm, it sums over no axes, which in ONNX means over all of them. Training steps have no translation.


class PlainWeightNorm(TorchFunctionMode):
    """Context that records the formula above instead of the operator."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch_versions.weight_norm:
            return _weight_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Compute the formula. dim: -1 for one norm of the whole tensor."""
    axes = [axis for axis in range(v.dim()) if axis != dim]
    norm = v.square().sum(axes, keepdim=dim != -1).sqrt() if axes else v.abs()
    return v * (g / norm)


# Copies of a model's functions that see names of their own, while everybody else sees the functions as they are.
#
#     module.forward -> a copy, whose globals are those of its file with `names` in front
#         calls of resize(...), ops.resize(...), self.method(...), super().forward(...) reach copies in turn
#
# Replacing a name in a Python module would change it for all models and threads that run the module's code.

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


# Symbolic int(): sizes stay symbolic while an exporter traces a model.
#
# `F.interpolate(x, (int(h * 0.5), int(w * 0.5)))`, or the `int(n) for n in size` of MMSegmentation's resize, turn a size
# that the exporter records into a number, and the file is right for one image size. int() cannot return anything else, so
# the model under export gets copies of its own functions (`own_names.py`), in which the name `int` is another one.
#
# A trace computes in float32 what Python computes in float64: int(90 * 0.7) is 62 there and 63 in float32. So a number
# of a trace stays symbolic only if float32 computes it exactly, with factors as 0.5 and 1.375, or rounds once, at the end: int(h / 3)
# and int(n ** 0.5), where rounding cannot reach the next integer.

# What a traced float is marked with: EXACT as computed in float32, or ROUNDED once; and what int() returns.
_MARK, _EXACT, _ROUNDED, _INTEGER = "_bnexport_mark", "exact", "rounded", "int"
# Sizes up to 4096, with 12 bits, times factors of 12 bits fit into the 24 bits of float32.
_FRACTION, _LARGEST = 64, 64


class _Integer(type):
    """Stand-in for int that leaves recorded sizes as they are. It equals int, and NumPy takes it for int's type."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(value, torch.SymInt):
            return value
        if isinstance(value, torch.SymFloat):
            return torch.sym_int(value)
        if isinstance(value, torch.Tensor) and _is_tracing() and _mark(value):
            symbol = value.to(torch.int64)
            setattr(symbol, _MARK, _INTEGER)
            return symbol
        return int(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (int, torch.SymInt)) or getattr(instance, _MARK, "") == _INTEGER

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, int)

    def __eq__(cls, other: object) -> bool:
        return other is int or other is cls

    def __hash__(cls) -> int:
        return hash(int)


class MarkedSizes(TorchFunctionMode):
    """Mode that marks results of arithmetic on traced sizes, for torch's tracer, where a size is an int64 tensor.

    torch.export knows where its sizes come from; there the mode would only cost time, some 10 us for each call.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() == 0 and not kwargs and _is_tracing():
            name = getattr(func, "__name__", "")
            mark = _mark_of_result(name, args[-1], [_mark(arg) for arg in args])
            if mark:
                setattr(result, _MARK, mark)
        return result


def symbolic_int(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Replace `int` in the functions that `model` runs; nothing else sees it, and no other thread."""
    integer = _Integer("int", (int,), {"dtype": np.dtype(int)})
    return OwnNames({"int": integer}, model).installed()


def _is_tracing() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def _mark(value: Any) -> str:
    """Return the mark of a number or a traced tensor: EXACT, ROUNDED, or empty."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 and value.dtype == torch.int64:
            return _EXACT
        return str(getattr(value, _MARK, ""))
    if isinstance(value, int):
        return _EXACT
    return _EXACT if isinstance(value, float) and abs(value) < _LARGEST and (value * _FRACTION).is_integer() else ""


def _mark_of_result(name: str, last: Any, marks: list[str]) -> str:
    """Return the mark of an operation on marked values; last: its last argument, the divisor of a division."""
    if any(mark != _EXACT for mark in marks):
        return ""
    if name in ("add", "sub", "mul", "__rsub__"):
        return _EXACT
    if name == "div" and isinstance(last, (int, float)) and math.frexp(last)[0] == 0.5:
        return _EXACT
    return _ROUNDED if name in ("div", "pow") else ""
