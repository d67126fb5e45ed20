"""--input arguments as arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnexport.cli.common import parse_shape
from bnexport.errors import UsageError


def feeds_of(inputs: list[str] | None, seed: int, model: Path) -> dict[str, Any]:
    """--input arguments as arrays: a .npy file, or random numbers of a shape in the type the model asks for."""
    import numpy as np

    from bnexport.model_io import load

    feeds: dict[str, Any] = {}
    if not inputs:
        return feeds
    graph = load(model).graph
    types = {str(value.name): value.dtype for value in graph.inputs}
    generator = np.random.default_rng(seed)
    for text in inputs:
        name, separator, value = text.partition(":")
        if not separator or name not in types:
            raise UsageError(
                f"--input: got {text!r}, expected NAME:FILE.npy or NAME:SHAPE with NAME one of {', '.join(types) or 'none'}"
            )
        dtype = types[name]
        shape = parse_shape(value)
        if shape is not None:
            feeds[name] = generator.standard_normal(shape).astype(np.float32 if dtype is None else dtype.numpy())
            continue
        try:
            feeds[name] = np.load(value, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UsageError(f"--input {name}: cannot read {value!r} as a NumPy file: {error}") from error
    return feeds


def example_inputs(inputs: list[str], seed: int) -> tuple[list[str], tuple[Any, ...]]:
    import numpy as np
    import torch

    generator = torch.Generator().manual_seed(seed)
    names, args = [], []
    for text in inputs:
        name, separator, value = text.partition(":")
        if not separator:
            raise UsageError(f"--input: got {text!r}, expected NAME:SHAPE or NAME:FILE.npy")
        shape = parse_shape(value)
        if shape is None:
            try:
                args.append(torch.from_numpy(np.load(value, allow_pickle=False)))
            except (OSError, ValueError) as error:
                raise UsageError(f"--input {name}: cannot read {value!r} as a NumPy file: {error}") from error
        else:
            args.append(torch.randn(shape, generator=generator))
        names.append(name)
    return names, tuple(args)
