"""A graph to fold: what is left of it, or why it stays."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from tests.support.onnx_text import model

# Options of the fold: branches are not merged, and the form of what stays.
ALONE = {"skip": ["parallel"]}
ARITHMETIC, CONV = {"leftover": "arithmetic"}, {"leftover": "conv"}
TYPES = {"float16": "float16[", "float64": "double["}
MMCV = '<ir_version: 10, opset_import: ["": 17, "mmdeploy": 1]>'


@dataclasses.dataclass(frozen=True)
class Case:
    """Nodes in ONNX text that make `outs` of `ins`, with the shapes of their parameters (`onnx_text.model`).

    left: operators of the folded graph, in order. refused: code of a reason that the report gives; alone, it is why the batch
    norm stays. options: of the fold. sizes: of the run, for those that are free. judge: what the numbers are compared with:
    "exact" for onnx.reference in float64, "run" for ONNX Runtime, "proof" where neither has the operators. method: of the
    proof of each fold. functions: of the model, as text.
    """

    nodes: str
    left: str = ""
    refused: str = ""
    ins: str = "float[N,6,H,W] x"
    outs: str = "y"
    opset: int = 17
    header: str | None = None
    values: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    judge: str = "exact"
    method: str = "proved"
    functions: str = ""

    def model(self, seed: int = 0) -> onnx.ModelProto:
        """Build the model, with other parameters for another seed."""
        text = f"g ({self.ins}) => ({self.outs}) {{ {self.nodes} }}{self.functions}"
        ir_version = 10 if self.opset > 18 else 8
        words = set(re.findall(r"\w+", self.nodes))
        values = {name: value for name, value in self.values.items() if {name, name.split("_")[0]} & words}
        dtype = next((name for name in ("float16", "float64") if TYPES[name] in self.ins), "float32")
        return model(
            text, values=values, opset=self.opset, ir_version=ir_version, header=self.header, seed=seed, dtype=dtype
        )


def ints(*numbers: int) -> np.ndarray:
    """Return axes, pads or a shape."""
    return np.array(numbers, np.int64)


def floats(*numbers: float) -> np.ndarray:
    """Return scales, or other numbers of one axis."""
    return np.array(numbers, np.float32)
