"""pt2 files: torch.export of the folded module, with its own inputs and outputs, and dynamic sizes."""

from __future__ import annotations

import contextlib
import inspect
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bnexport import torch_versions
from bnexport.errors import UnsupportedModelError
from bnexport.exporting import dynamo
from bnexport.exporting.dimensions.dynamic import Dimensions
from bnexport.exporting.dimensions.size_conditions import SMALLEST

NAMESPACES = ("aten", "prims", "prim")
_PYTHON = ("_operator", "operator", "math", "builtins", "torch")


def build(model: nn.Module, dimensions: Dimensions) -> tuple[torch.export.ExportedProgram, Dimensions]:
    """Return the program, and what it left dynamic. `model` is in eval mode.

    Raises UnsupportedModelError where torch.export fails, or where operators of other libraries remain.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    with dynamo.quiet():
        try:
            program, left = _program(model, dimensions, variadic)
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(model).__name__}: torch.export fails: {str(error).strip()[:400]}; use format='torchscript',"
                " which keeps control flow where it can script it"
            ) from error
    _refuse_foreign_operators(program, type(model).__name__)
    return program, left


def _program(
    model: nn.Module, dimensions: Dimensions, variadic: bool
) -> tuple[torch.export.ExportedProgram, Dimensions]:
    """Record the model, before torch 2.6 with fewer dynamic sizes where it fails: there none may become constant."""
    try:
        return dynamo.export_program(model, dimensions, variadic=variadic)
    except Exception:
        if not torch_versions.has((2, 6)):
            for narrower in dimensions.narrower("this torch cannot record it for other sizes"):
                with contextlib.suppress(Exception):
                    return dynamo.export_program(model, narrower, variadic=variadic)
        raise


def allows(program: torch.export.ExportedProgram, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether the ranges of the program allow inputs of these sizes; its guards may ask for more."""
    for value, given in zip(dynamo.program_inputs(program), inputs):
        for size, actual in zip(value.shape, given.shape):
            low, high = _limits(program, size)
            # Ranges start at 2 where sizes of 0 and 1 were not looked at.
            if (actual < low and low > SMALLEST) or (high is not None and actual > high):
                return False
    return True


def _limits(program: torch.export.ExportedProgram, size: int | torch.SymInt) -> tuple[int, int | None]:
    """Return smallest and largest value of an input's dimension; None for no largest."""
    constant = dynamo.constant(size)
    if constant is not None:
        return constant, constant
    assert isinstance(size, torch.SymInt)
    limits = program.range_constraints.get(size.node.expr)
    if limits is None:
        return 0, None
    return int(limits.lower), int(limits.upper) if limits.upper.is_Integer else None


def save(program: torch.export.ExportedProgram, path: Path) -> None:
    with dynamo.quiet(), path.open("wb") as file:
        torch.export.save(program, file)


def operators(program: torch.export.ExportedProgram) -> set[str]:
    """Return names of all called operators, those of inner graphs included."""
    found: set[str] = set()
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            found.update(_name(node.target) for node in module.graph.nodes if node.op == "call_function")
    return found


def _name(target: Any) -> str:
    if isinstance(target, torch_versions.Operator):
        return target.name()
    if isinstance(target, (types.FunctionType, types.BuiltinFunctionType)):
        return f"{target.__module__}.{target.__name__}"
    return f"torch.{target}" if isinstance(target, torch_versions.HigherOrderOperator) else str(target)


def _refuse_foreign_operators(program: torch.export.ExportedProgram, name: str) -> None:
    foreign = sorted(
        operator
        for operator in operators(program)
        if (
            operator.partition("::")[0] not in NAMESPACES if "::" in operator else operator.split(".")[0] not in _PYTHON
        )
    )
    if foreign:
        raise UnsupportedModelError(
            f"{name}: the program needs {', '.join(foreign[:8])}, which torch alone cannot load;"
            " replace it by torch's own operators before export"
        )
