"""What tests ask of an exported file."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

import bnexport


def run(path: Path, *inputs: torch.Tensor, library: bool = False, threads: int = 0) -> dict[str, np.ndarray]:
    """Outputs by name, in ONNX Runtime with our library or without."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    session = (bnexport if library else onnxruntime).InferenceSession(path, options)
    names = [value.name for value in session.get_outputs()]
    feeds = {value.name: x.detach().numpy() for value, x in zip(session.get_inputs(), inputs, strict=True)}
    return dict(zip(names, session.run(None, feeds), strict=True))


def output(path: Path, *inputs: torch.Tensor) -> np.ndarray:
    return next(iter(run(path, *inputs).values()))


def assert_right(path: Path, model: nn.Module, *sizes: tuple[int, ...], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """The first output is the module's at each size of its one input."""
    for size in sizes:
        x = torch.randn(size)
        np.testing.assert_allclose(output(path, x), model(x).detach(), rtol=rtol, atol=atol, err_msg=str(size))


def declared(path: Path) -> list[Any]:
    return onnxruntime.InferenceSession(path).get_inputs()[0].shape


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


def is_tracer_note(note: str) -> bool:
    """Whether a note says what a trace keeps."""
    return note.startswith("the trace keeps what it found for the example")
