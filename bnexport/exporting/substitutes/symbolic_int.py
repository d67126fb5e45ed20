"""Symbolic int(): sizes stay symbolic while an exporter traces a model.

`F.interpolate(x, (int(h * 0.5), int(w * 0.5)))`, or the `int(n) for n in size` of MMSegmentation's resize, turn a size
that the exporter records into a number, and the file is right for one image size. int() cannot return anything else, so
the model under export gets copies of its own functions (`own_names.py`), in which the name `int` is another one.

Exporters compute in float32 what Python computes in float64: int(90 * 0.7) is 62 there and 63 in float32. So a number
stays symbolic only if float32 computes it exactly, with factors as 0.5 and 1.375, or rounds once, at the end: int(h / 3)
and int(n ** 0.5), where rounding cannot reach the next integer.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bnexport.exporting.substitutes.own_names import OwnNames

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
        if isinstance(value, torch.SymFloat) and _expression_mark(value.node.expr):
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


def _expression_mark(expression: Any) -> str:
    """Return the mark of a sympy expression of torch.export's sizes."""
    if expression.is_Float:
        return _mark(float(expression))
    if expression.is_Symbol or expression.is_integer:
        return _EXACT
    names = {
        "Add": "add",
        "Mul": "mul",
        "ToFloat": "add",
        "IntTrueDiv": "div",
        "FloatTrueDiv": "div",
        "FloatPow": "pow",
    }
    last = expression.args[-1]
    number = float(last) if last.is_number else None
    name = names.get(type(expression).__name__, "")
    return _mark_of_result(name, number, [_expression_mark(each) for each in expression.args])
