"""A known mistake of a real tool: a model, the tool's wrong rewrite of it, and a right one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

import numpy as np
import onnx

from tests.support.onnx_text import model

Values = Mapping[str, np.ndarray]
OURS = "bnexport 712e782"
# The newest operator set that IR version 8 covers.
_OPSET_OF_IR_8 = 18


@dataclasses.dataclass(frozen=True)
class Known:
    """A wrong rewrite that bnexport still passes. methods: of `verify` that do."""

    why: str
    methods: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Triple:
    """A model, a wrong rewrite and a right one, as nodes in ONNX text.

    right: by default the original behind an Identity. graph: inputs => outputs; wrong_graph: of the wrong rewrite, where
    they differ. values: initializers; each model gets those that its nodes name. wrong_domain: under which the wrong one
    names its opset. inputs: that show the difference; None for random ones. sizes: of those. runs: False where no engine runs
    the wrong rewrite, None where none runs the original, or its numbers are random. method: of `verify` that passes the
    right one.
    """

    name: str
    _: dataclasses.KW_ONLY
    graph: str
    original: str
    wrong: str
    right: str = ""
    values: Values = dataclasses.field(default_factory=dict)
    opset: int = 17
    wrong_graph: str | None = None
    wrong_opset: int | None = None
    wrong_domain: str = ""
    right_opset: int | None = None
    inputs: Values | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    runs: bool | None = True
    method: Literal["both", "local"] = "both"
    known: Known | None = None
    known_right: str = ""

    def model(self, which: Literal["original", "wrong", "right"]) -> onnx.ModelProto:
        """Build one of the three models."""
        graph, opset, domain = self.graph, self.opset, ""
        if which == "wrong":
            graph, opset, domain = self.wrong_graph or graph, self.wrong_opset or opset, self.wrong_domain
        elif which == "right":
            opset = self.right_opset or opset
        right = self.right or "i = Identity (x) " + re.sub(r"\bx\b", "i", self.original)
        nodes = {"original": self.original, "wrong": self.wrong, "right": right}[which]
        used = {name: value for name, value in self.values.items() if re.search(rf"\b{name}\b", nodes)}
        header = f'<ir_version: {8 if opset <= _OPSET_OF_IR_8 else 10}, opset_import: ["{domain}": {opset}]>'
        first, last = graph.split("=>")
        return model(f"g ({first}) => ({last}) {{ {nodes} }}", values=used, header=header)


@dataclasses.dataclass(frozen=True)
class Mistake(Triple):
    """A triple that a tool made.

    source: repository#number of the public thread, or the commit of bnexport or the release that made the mistake. what: went wrong.
    verdict: of `verify` by default. known, known_right: what bnexport itself gets wrong.
    """

    source: str
    operators: str
    what: str
    _: dataclasses.KW_ONLY
    verdict: Literal["failed", "not_verified", "refused"] = "failed"


def affine(values: Values, prefix: str = "p", epsilon: float = 1e-5) -> tuple[np.ndarray, np.ndarray]:
    """Return k and h of a batch norm, y = k x + h, in float64."""
    scale, bias, mean, var = (values[f"{prefix}_{name}"].astype(np.float64) for name in "sbmv")
    k = scale / np.sqrt(var + epsilon)
    return k, bias - mean * k


def column(k: np.ndarray, rank: int = 4) -> np.ndarray:
    """Return factors of output channels, to multiply a Conv's weight with."""
    return k.reshape(-1, *[1] * (rank - 1))


def floats(array: object) -> np.ndarray:
    """Round to float32, as a weight is stored."""
    return np.asarray(array, np.float64).astype(np.float32)


def ints(*numbers: int) -> np.ndarray:
    """Return axes, pads or a shape."""
    return np.asarray(numbers, np.int64)
