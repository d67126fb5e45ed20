"""tract, through its Python package."""

from __future__ import annotations

from importlib.metadata import version as version_of

import numpy as np
import tract


def version() -> str:
    return version_of("tract")


def run(path: str, inputs: dict[str, np.ndarray], outputs: list[str], libraries: list[str]) -> dict[str, np.ndarray]:
    model = tract.onnx().load(path)
    feeds = [inputs[model.input_name(index)] for index in range(model.input_count())]
    results = model.into_model().into_runnable().run(feeds)
    # Its outputs have names of its own, in the order of the file's.
    return {name: value.to_numpy() for name, value in zip(outputs, results, strict=True)}
