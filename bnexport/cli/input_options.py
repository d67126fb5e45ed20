"""--input arguments as arrays, checked against what the model declares before anything runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnexport.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

    from bnexport.graph.shapes import Shape


_FORM = "expected NAME:SHAPE such as x:1,3,224,224, or NAME:FILE.npy"


@dataclasses.dataclass(frozen=True)
class Argument:
    """One --input: the values of a file, or a shape that gets random ones."""

    name: str
    shape: tuple[int, ...]
    values: np.ndarray | None


def parse(texts: Sequence[str]) -> list[Argument]:
    arguments: dict[str, Argument] = {}
    for text in texts:
        name, _, value = text.rpartition(":")
        if not name or not value:
            other = text.replace("=", ":", 1)
            hint = f"; did you mean {other!r}?" if ":" not in text and "=" in text else ""
            raise UsageError(f"--input: got {text!r}, {_FORM}{hint}")
        if name in arguments:
            raise UsageError(f"--input: got {name!r} twice, expected each input once")
        arguments[name] = _read_argument(name, value)
    return list(arguments.values())


def missing_input(model: str) -> UsageError:
    """Make the error for a model whose input sizes nothing states."""
    return UsageError(
        f"Missing option '--input' / '-i': nothing states the sizes of the inputs of {model}; "
        "give them, such as --input x:1,3,224,224; see bnexport export --help"
    )


def _read_argument(name: str, value: str) -> Argument:
    if re.fullmatch(r"\d+(,\d+)*", value):
        return Argument(name, tuple(map(int, value.split(","))), None)
    if not Path(value).is_file():
        raise UsageError(f"--input {name}: {value!r} is neither a shape nor a file that exists; {_FORM}")
    import numpy as np

    try:
        values = np.load(value, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--input {name}: cannot read {value!r}, expected a file that numpy.save wrote") from error
    if not isinstance(values, np.ndarray):
        raise UsageError(f"--input {name}: {value!r} holds several arrays, expected one, as numpy.save writes it")
    return Argument(name, values.shape, values)


def feeds_of(
    inputs: list[str] | None, seed: int, model: Path, *, all_of_them: bool = False, free: tuple[int, int] | None = None
) -> dict[str, np.ndarray]:
    """Return the arrays to feed to `model`, by name.

    Random ones are of the type that the model asks for, in the order of its inputs. Inputs that are not given
    are made up where all their sizes are fixed. Without any --input the result is empty, unless `all_of_them`
    are needed. free: the first size and the others of inputs that leave them open, for want of which they are an
    error; the same name of a dimension gets the same size.
    """
    import numpy as np

    from bnexport.model_io import load

    if not inputs and not all_of_them:
        return {}
    given = {argument.name: argument for argument in parse(inputs or ())}
    graph_inputs = load(model).graph.inputs
    declared = {str(value.name): value for value in graph_inputs}
    for name in given:
        if name not in declared:
            choices = "; ".join(_describe(value) for value in declared.values()) or "none"
            raise UsageError(f"--input: {model} has no input {name!r}, expected one of: {choices}")
    generator = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {}
    named: dict[str, int] = {}
    for name, value in declared.items():
        argument = given.get(name)
        if argument is None and not value.is_initializer():
            argument = Argument(name, _own_shape(value, model, free, named), None)
        if argument is not None:
            feeds[name] = _fitting(argument, value, generator)
    return feeds


def _own_shape(value: ir.Value, model: Path, free: tuple[int, int] | None, named: dict[str, int]) -> tuple[int, ...]:
    sizes = _sizes(value)
    if free is not None and sizes is not None:
        chosen = []
        for axis, size in enumerate(sizes):
            default = free[0] if axis == 0 else free[1]
            if isinstance(size, str):
                default = named.setdefault(size, default)
            chosen.append(size if isinstance(size, int) else default)
        return tuple(chosen)
    sizes = (None,) if sizes is None else sizes
    shape = tuple(size for size in sizes if isinstance(size, int))
    if len(shape) != len(sizes):
        raise UsageError(
            f"--input: missing {value.name}; {model} takes {_describe(value)}; give its sizes, such as "
            f"--input {value.name}:{','.join(_example(axis, size) for axis, size in enumerate(sizes))}"
        )
    return shape


def _sizes(value: ir.Value) -> Shape | None:
    from bnexport.graph.shapes import sizes_of

    return None if value.shape is None else sizes_of(value.shape)


def _example(axis: int, size: int | str | None) -> str:
    return str(size) if isinstance(size, int) else ("1" if axis == 0 else "64")


def _fitting(argument: Argument, value: ir.Value, generator: np.random.Generator) -> np.ndarray:
    """Return the values of the argument, or random ones."""
    import numpy as np

    dtype = np.dtype(np.float32) if value.dtype is None else value.dtype.numpy()
    where = f"--input {argument.name}"
    if not _fits(argument.shape, value):
        raise UsageError(f"{where}: got shape {_shape(argument.shape)}, expected {_describe(value)}")
    if argument.values is not None:
        if value.dtype is not None and argument.values.dtype != dtype:
            raise UsageError(f"{where}: got {argument.values.dtype}, expected {_describe(value)}; convert it first")
        return argument.values
    if dtype.kind == "O":
        return np.full(argument.shape, "a", dtype=object)
    if dtype.kind in "iub":
        # Indices into anything are valid when they are 0 or 1.
        return generator.integers(0, 2, argument.shape).astype(dtype)
    return generator.standard_normal(argument.shape).astype(dtype)


def _fits(shape: tuple[int, ...], value: ir.Value) -> bool:
    sizes = _sizes(value)
    return sizes is None or (
        len(sizes) == len(shape)
        and all(got == expected for got, expected in zip(shape, sizes) if isinstance(expected, int))
    )


def _describe(value: ir.Value) -> str:
    dtype, sizes = "" if value.dtype is None else f" {value.dtype.numpy().name}", _sizes(value)
    return f"{value.name}:{dtype}{'' if sizes is None else ' ' + _shape(sizes)}"


def _shape(sizes: Shape) -> str:
    return "(" + ", ".join("?" if size is None else str(size) for size in sizes) + ")"


def chosen_dimensions(
    texts: Sequence[str] | None, dynamic: bool, names: Sequence[str]
) -> bool | dict[str, dict[int, str]]:
    """Return the argument `dynamic` of an export: --dynamic-dims by input, with the names given, or the switch.

    names: of the inputs that --input gives; empty where the model's own are not known yet.
    """
    if not texts:
        return dynamic
    if not dynamic:
        raise UsageError("--dynamic-dims, --static: got both, expected one of them")
    found: dict[str, dict[int, str]] = {}
    for text in texts:
        name, _, listed = text.rpartition(":")
        parts = [part.partition("=") for part in listed.split(",")]
        if not name or not all(re.fullmatch(r"\d+", index) and (label or not equals) for index, equals, label in parts):
            raise UsageError(f"--dynamic-dims: got {text!r}, expected NAME:DIMENSIONS such as x:0,2,3 or x:0=batch")
        if names and name not in names:
            raise UsageError(f"--dynamic-dims: got {name!r}, expected an input among {', '.join(names)}")
        found.setdefault(name, {}).update({int(index): label for index, _, label in parts})
    return found


def example_inputs(arguments: Sequence[Argument], seed: int) -> tuple[list[str], tuple[Any, ...]]:
    """Return the names and tensors of an export, in the order given; random ones are float32."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = tuple(
        torch.randn(argument.shape, generator=generator)
        if argument.values is None
        else torch.from_numpy(argument.values)
        for argument in arguments
    )
    return [argument.name for argument in arguments], tensors
