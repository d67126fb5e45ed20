"""Attempts on a tool that opens model files, numbered, each with its verdict.

An attempt writes files into a folder of its own, `victim/`, and returns the model to open. Beside that
folder lies `secret`, which no attempt may read. The verdict is the class of the refusal, or HANDLED where
the file is odd and harmless. A number is never used twice; a new finding becomes a new attempt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
from onnx import TensorProto

from bnexport.errors import BnexportError, UnsafeModelError
from tests.support.onnx_text import model

SECRET = b"the secret" * 1024
WEIGHT = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
# The weight has the size of the secret's first bytes, so that reading it would succeed.
assert len(SECRET) > WEIGHT.nbytes
Verdict = type[BnexportError] | None
HANDLED: Verdict = None


@dataclasses.dataclass(frozen=True)
class Attempt:
    number: int
    name: str
    verdict: Verdict
    build: Callable[[Path], Path]
    source: str = ""

    @property
    def id(self) -> str:
        return f"{self.number:03d}-{self.name}"


ATTEMPTS: list[Attempt] = []


def example() -> onnx.ModelProto:
    return model("g (float[N,64] x) => (float[N,32] y) { y = Gemm (x, w) }", values={"w": WEIGHT})


def write(folder: Path, proto: onnx.ModelProto | bytes) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
    return path


def external(
    folder: Path, location: str = "data", offset: str | None = "0", length: str | None = None, **more: str
) -> Path:
    """The example with its weight outside."""
    proto = example()
    outside(proto.graph.initializer[0], location, offset, str(WEIGHT.nbytes) if length is None else length, **more)
    return write(folder, proto)


def outside(
    tensor: TensorProto, location: str, offset: str | None = "0", length: str | None = None, **more: str
) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": offset, "length": length, **more}.items():
        if value is not None:
            tensor.external_data.add(key=key, value=value)


def data(folder: Path, name: str = "data") -> Path:
    path = folder / name
    path.write_bytes(WEIGHT.tobytes())
    return path


def attempt(
    number: int, name: str, verdict: Verdict, source: str = ""
) -> Callable[[Callable[[Path], Path]], Callable[[Path], Path]]:
    def register(build: Callable[[Path], Path]) -> Callable[[Path], Path]:
        ATTEMPTS.append(Attempt(number, name, verdict, build, source))
        return build

    return register


def on_proto(
    number: int, name: str, verdict: Verdict, change: Callable[[onnx.ModelProto], object], source: str = ""
) -> None:
    """An attempt that is a change of the example."""

    def build(folder: Path) -> Path:
        proto = example()
        change(proto)
        return write(folder, proto)

    ATTEMPTS.append(Attempt(number, name, verdict, build, source))


def on_location(number: int, name: str, location: str, source: str = "", **fields: str) -> None:
    """An attempt that is a location, or other entries, of external data."""

    def build(folder: Path) -> Path:
        data(folder)
        (folder / "sub").mkdir()
        return external(folder, location, **fields)

    ATTEMPTS.append(Attempt(number, name, UnsafeModelError, build, source))


def weight_of(proto: onnx.ModelProto) -> TensorProto:
    return proto.graph.initializer[0]


def add_functions(proto: onnx.ModelProto, calls: dict[str, str]) -> None:
    for name, callee in calls.items():
        function = proto.functions.add(name=name, domain="local")
        function.input.append("i")
        function.output.append("o")
        function.opset_import.add(domain="local", version=1)
        function.node.add(op_type=callee, domain="local", input=["i"], output=["o"])
