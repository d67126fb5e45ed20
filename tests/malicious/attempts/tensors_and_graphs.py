"""Attempts 3xx and 4xx: tensors inside the model, and graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from bnexport.errors import MalformedModelError, UnsafeModelError, UnsupportedModelError
from bnexport.model_io.wire import field
from tests.malicious.attempts.base import HANDLED, attempt, on_proto, weight_of, write
from tests.support.onnx_text import model

on_proto(
    301, "too-little-data", MalformedModelError, lambda p: setattr(weight_of(p), "raw_data", b"1234"), "CVE-2024-27319"
)
on_proto(304, "dimensions-that-overflow", UnsafeModelError, lambda p: weight_of(p).dims.extend([2**40, 2**40]))
on_proto(305, "dimensions-that-wrap-to-nothing", UnsafeModelError, lambda p: weight_of(p).dims.extend([2**32, 2**32]))
on_proto(313, "bomb-of-zeros", UnsafeModelError, lambda p: _bomb(p, [2**31, 2**31]))
on_proto(314, "bomb-below-the-limit", MalformedModelError, lambda p: _bomb(p, [2**19, 2**18]))


def _bomb(proto: onnx.ModelProto, dims: list[int]) -> None:
    """A terabyte that the file does not carry."""
    del weight_of(proto).dims[:]
    weight_of(proto).dims.extend(dims)
    weight_of(proto).ClearField("raw_data")


# Found by fuzzing.
on_proto(316, "more-dimensions-than-numpy", UnsupportedModelError, lambda p: weight_of(p).dims.extend([1] * 31))
on_proto(317, "size-of-six-thousand-digits", UnsupportedModelError, lambda p: weight_of(p).dims.extend([2**62] * 300))


@attempt(315, "bomb-of-expansion", HANDLED)
def expansion(folder: Path) -> Path:
    """Constant nodes that would make a terabyte when folded: left for the runtime."""
    proto = model(
        """g (float[N,4,H,W] x) => (float[N,4,H,W] y) {
            size = Constant <value_ints = [1048576, 1048576]> ()
            huge = ConstantOfShape (size)
            one = ReduceMax <keepdims = 0> (huge)
            y = Mul (x, one) }"""
    )
    return write(folder, proto)


# 4xx: graphs. tests/model_io/test_validate.py has the refusals of one message each.
def _cycle(proto: onnx.ModelProto) -> None:
    proto.graph.node.extend(
        [onnx.helper.make_node("Add", ["b", "x"], ["a"]), onnx.helper.make_node("Relu", ["a"], ["b"])]
    )


on_proto(401, "cycle", MalformedModelError, _cycle)
on_proto(406, "initializer-twice", HANDLED, lambda p: p.graph.initializer.append(weight_of(p)))
on_proto(410, "training-info", HANDLED, lambda p: p.training_info.add())
on_proto(412, "endless-name", UnsafeModelError, lambda p: setattr(p.graph.node[0], "name", "n" * 10**6))
on_proto(413, "endless-operator", UnsafeModelError, lambda p: setattr(p.graph.node[0], "op_type", "n" * 10**6))
on_proto(
    414,
    "terminal-commands-in-a-name",
    MalformedModelError,
    lambda p: p.graph.node[0].input.append("\x1b]0;owned\x07\x1b[2J"),
)
on_proto(
    415,
    "attribute-not-a-number",
    HANDLED,
    lambda p: p.graph.node[0].attribute.append(onnx.helper.make_attribute("alpha", float("nan"))),
)
on_proto(
    416,
    "attribute-infinite",
    HANDLED,
    lambda p: p.graph.node[0].attribute.append(onnx.helper.make_attribute("beta", float("inf"))),
)
on_proto(
    417,
    "huge-attribute-string",
    HANDLED,
    lambda p: p.graph.node[0].attribute.append(onnx.helper.make_attribute("note", "n" * 10**7)),
)
on_proto(
    418,
    "attribute-of-another-type",
    HANDLED,
    lambda p: p.graph.node[0].attribute.append(onnx.helper.make_attribute("transB", "yes")),
)


# Found by fuzzing, each once with another exception than ours, or more than one line.
def _constant(proto: onnx.ModelProto, name: str, **fields: object) -> None:
    """Scales the output by a Constant whose attribute is not what its name says, in front of a Gemm's bias."""
    proto.graph.node[0].output[0] = "z"
    proto.graph.node.add(op_type="Constant", output=["k"]).attribute.add(name=name, **fields)
    proto.graph.node.add(op_type="Mul", input=["z", "k"], output=["s"])
    proto.graph.node.add(op_type="Add", input=["s", "k"], output=["y"])


def _sync(proto: onnx.ModelProto, outputs: list[str], **attributes: object) -> None:
    node = onnx.helper.make_node("MMCVSyncBatchNorm", ["x", *"abcd"], outputs, domain="mmcv", **attributes)
    proto.graph.node.append(node)
    proto.opset_import.add(domain="mmcv", version=1)
    for name in "abcd":
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(64, np.float32), name))


def _without_opset(proto: onnx.ModelProto) -> None:
    proto.ir_version = 1
    proto.ClearField("opset_import")


on_proto(426, "constant-that-is-no-tensor", HANDLED, lambda p: _constant(p, "value", type=2, i=1))
on_proto(427, "constant-of-another-type", HANDLED, lambda p: _constant(p, "value_ints", type=2, i=1))
on_proto(428, "group-that-is-a-list", HANDLED, lambda p: _sync(p, ["o"], group=[1, 2], group_size=[2]))
on_proto(429, "sync-batch-norm-without-outputs", HANDLED, lambda p: _sync(p, [], training_mode=0))
on_proto(430, "node-without-outputs", MalformedModelError, lambda p: p.graph.node.add(op_type="Relu", input=["x"]))
on_proto(431, "old-model-without-opset", MalformedModelError, _without_opset)
on_proto(
    432,
    "terminal-commands-for-onnxruntime-to-repeat",
    HANDLED,
    lambda p: p.graph.node.add(op_type="\x1b]0;owned\x07\x1b[2J", name="\r\n\x1b[2J", input=["x"], output=["o"]),
)


@attempt(420, "subgraphs-ten-thousand-deep", UnsafeModelError, "CVE-2025-4565")
def deep(folder: Path) -> Path:
    """Wrapped from the inside out: protobuf could not write this."""
    graph = b""
    for _ in range(10_000):
        graph = field(1, field(4, b"If") + field(5, field(6, graph)))
    return write(folder, b"\x08\x08" + field(7, graph))


@attempt(421, "subgraphs-deep-and-long", UnsafeModelError, "CVE-2025-4565")
def deep_and_long(folder: Path) -> Path:
    """Every level is long enough to be searched for tensors."""
    graph = field(2, b"g" * 10_000)
    for _ in range(1_000):
        graph = field(1, field(4, b"If") + field(5, field(6, graph)))
    return write(folder, b"\x08\x08" + field(7, graph))


@attempt(422, "types-in-types", MalformedModelError, "CVE-2025-4565, CVE-2026-0994")
def deep_types(folder: Path) -> Path:
    """Sequences of sequences of sequences."""
    kind = b""
    for _ in range(10_000):
        kind = field(4, field(1, kind))
    return write(folder, b"\x08\x08" + field(7, field(11, field(1, b"x") + field(2, kind))))


@attempt(423, "many-empty-nodes", UnsafeModelError)
def empty_nodes(folder: Path) -> Path:
    """Two bytes a node."""
    graph = field(1, b"") * 300_000
    return write(folder, b"\x08\x08" + field(8, b"\x10\x11") + field(7, graph))


@attempt(424, "one-body-shared-many-times-over", HANDLED)
def doubling(folder: Path) -> Path:
    """Add of a value to itself, forty times: a walk that follows every path would not end."""
    proto = model(
        "g (float[N,4] x) => (float[N,4] y) { a0 = Add (x, x)\n"
        + "\n".join(f"a{i + 1} = Add (a{i}, a{i})" for i in range(40))
        + "\ny = Relu (a40) }"
    )
    return write(folder, proto)


@attempt(425, "constants-shared-many-times-over", HANDLED)
def constant_doubling(folder: Path) -> Path:
    proto = model(
        "g (float[N,4] x) => (float[N,4] y) { a0 = Constant <value_float = 1.0> ()\n"
        + "\n".join(f"a{i + 1} = Add (a{i}, a{i})" for i in range(60))
        + "\ny = Mul (x, a60) }"
    )
    return write(folder, proto)
