"""What the checks of a model file cost, of the time to load 1 GB of weights: `python -m benchmarks.bench_checking`.

A chain of convolutions with its weights as external data is loaded and every weight is read, from a warm page
cache, which is where checks weigh most. The time inside the checks (walking the wire format, validating the
graph, locations, offsets and lengths, and opening each file component by component) is taken by wrapping them.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper

from bnexport.model_io import external, load, read, validate, wire

LAYERS, CHANNELS = 114, 512  # 3 x 3 kernels of 9 MiB each
RUNS = 7


def write(folder: Path) -> Path:
    """1 GiB of weights in a file of their own."""
    nodes, weights = [], []
    size = CHANNELS * CHANNELS * 9 * 4
    with (folder / "weights").open("wb") as file:
        for index in range(LAYERS):
            file.write(np.full(size // 4, index, np.float32).tobytes())
            weight = onnx.TensorProto(
                name=f"w{index}", data_type=1, dims=[CHANNELS, CHANNELS, 3, 3], data_location=onnx.TensorProto.EXTERNAL
            )
            for key, value in {"location": "weights", "offset": index * size, "length": size}.items():
                weight.external_data.add(key=key, value=str(value))
            weights.append(weight)
            nodes.append(onnx.helper.make_node("Conv", [f"x{index}", f"w{index}"], [f"x{index + 1}"]))
    ends = [onnx.helper.make_tensor_value_info(name, 1, ["N", CHANNELS, "H", "W"]) for name in ("x0", f"x{LAYERS}")]
    graph = onnx.helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    path = folder / "model.onnx"
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    return path


def load_all(path: Path) -> list[np.ndarray]:
    """The weights, in memory."""
    return [value.const_value.numpy() for value in load(path).graph.initializers.values()]  # type: ignore[union-attr]


@contextlib.contextmanager
def timed_checks() -> Iterator[list[float]]:
    """Seconds inside the checks, one entry a call."""
    spent: list[float] = []

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent.append(time.perf_counter() - start)

        return run

    places = ((wire, "cut"), (validate, "validate"), (external.Folder, "check"), (external, "_open_below"))
    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, function in before:
        setattr(owner, name, wrapped(function))
    try:
        yield spent
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def main() -> None:
    assert read.wire is wire
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder))
        load_all(path)
        totals, checks = [], []
        for _ in range(RUNS):
            with timed_checks() as spent:
                start = time.perf_counter()
                held = load_all(path)
                totals.append(time.perf_counter() - start)
            del held
            checks.append(sum(spent))
    total, check = statistics.median(totals), statistics.median(checks)
    gigabytes = LAYERS * CHANNELS * CHANNELS * 36 / 1e9
    print(
        f"{gigabytes:.2f} GB, {LAYERS} tensors: {total * 1e3:.0f} ms, checks {check * 1e3:.2f} ms, {check / total:.2%}"
    )


if __name__ == "__main__":
    main()
