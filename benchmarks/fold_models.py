"""Models for bench_fold: chains of Conv and BatchNormalization of any size, written without being held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = helper.make_opsetid("", 17)


def pairs(count: int, channels: int, path: Path, *, external: bool, plain_convolutions: int = 0) -> None:
    """`count` times Conv 3x3, BatchNormalization, Relu; every weight changes in a fold.

    external: weights of convolutions lie in one file beside the model. plain_convolutions: as many
    convolutions without a batch norm follow, whose weights do not change.
    """
    generator = np.random.default_rng(0)
    scale = np.sqrt(2.0 / (9 * channels))
    weight = (generator.standard_normal((channels, channels, 3, 3)) * scale).astype(np.float32)
    vectors = {
        "scale": generator.uniform(0.8, 1.2, channels),
        "bias": generator.standard_normal(channels) * 0.1,
        "mean": generator.standard_normal(channels) * 0.1,
        "variance": generator.uniform(0.8, 1.2, channels),
    }
    data = path.with_name(path.name + ".data")
    nodes, initializers = [], []
    last = "x"
    with open(data, "wb") if external else open("/dev/null", "wb") as file:
        for index in range(count + plain_convolutions):
            tensor = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=weight.shape)
            if external:
                tensor.data_location = TensorProto.EXTERNAL
                for key, value in (("location", data.name), ("offset", file.tell()), ("length", weight.nbytes)):
                    tensor.external_data.add(key=key, value=str(value))
                weight.tofile(file)
            else:
                tensor.raw_data = weight.tobytes()
            initializers.append(tensor)
            nodes.append(helper.make_node("Conv", [last, f"w{index}"], [f"c{index}"], f"conv{index}", pads=[1] * 4))
            last = f"c{index}"
            if index < count:
                names = [f"{name}{index}" for name in vectors]
                initializers += [
                    numpy_helper.from_array(vector.astype(np.float32), name)
                    for name, vector in zip(names, vectors.values(), strict=True)
                ]
                nodes.append(helper.make_node("BatchNormalization", [last, *names], [f"b{index}"], f"bn{index}"))
                last = f"b{index}"
            nodes.append(helper.make_node("Relu", [last], [f"r{index}"], f"relu{index}"))
            last = f"r{index}"
    write(path, nodes, initializers, ["N", channels, "H", "W"], last, [None] * 4)


def matmul_blocks(blocks: int = 8, length: int = 128, width: int = 256) -> onnx.ModelProto:
    """Blocks of MatMul, Add, Transpose, BatchNormalization, Relu, Transpose: a sequence model's projections."""
    generator = np.random.default_rng(1)
    nodes, initializers, last = [], [], "x"
    for index in range(blocks):
        weight = generator.standard_normal((width, width)) / np.sqrt(width)
        initializers += [_constant(f"w{index}", weight), _constant(f"a{index}", generator.standard_normal(width) * 0.1)]
        nodes += [
            helper.make_node("MatMul", [last, f"w{index}"], [f"m{index}"]),
            helper.make_node("Add", [f"m{index}", f"a{index}"], [f"s{index}"]),
            helper.make_node("Transpose", [f"s{index}"], [f"t{index}"], perm=[0, 2, 1]),
            _norm(f"t{index}", f"n{index}", f"bn{index}", width, initializers, generator),
            helper.make_node("Relu", [f"n{index}"], [f"r{index}"]),
            helper.make_node("Transpose", [f"r{index}"], [f"o{index}"], perm=[0, 2, 1]),
        ]
        last = f"o{index}"
    return _model(nodes, initializers, [1, length, width], last)


def resnet50(size: int = 112) -> onnx.ModelProto:
    """The topology of ResNet-50, random weights."""
    generator = np.random.default_rng(2)
    nodes: list[onnx.NodeProto] = []
    initializers: list[TensorProto] = []

    def conv(source: str, name: str, inside: int, outside: int, kernel: int, stride: int, relu: bool) -> str:
        weight = generator.standard_normal((outside, inside, kernel, kernel)) * np.sqrt(2.0 / (inside * kernel**2))
        initializers.append(_constant(f"{name}.w", weight))
        attributes = {"strides": [stride] * 2, "pads": [kernel // 2] * 4}
        nodes.append(helper.make_node("Conv", [source, f"{name}.w"], [f"{name}.c"], name, **attributes))
        nodes.append(_norm(f"{name}.c", f"{name}.n", f"{name}.bn", outside, initializers, generator))
        if relu:
            nodes.append(helper.make_node("Relu", [f"{name}.n"], [f"{name}.r"]))
        return f"{name}.r" if relu else f"{name}.n"

    last = conv("x", "stem", 3, 64, 7, 2, True)
    nodes.append(helper.make_node("MaxPool", [last], ["pool"], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4))
    last, inside = "pool", 64
    for stage, (depth, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(depth):
            name, stride = f"s{stage}b{block}", 2 if stage and not block else 1
            branch = conv(last, f"{name}.1", inside, width, 1, 1, True)
            branch = conv(branch, f"{name}.2", width, width, 3, stride, True)
            branch = conv(branch, f"{name}.3", width, 4 * width, 1, 1, False)
            skip = last if block else conv(last, f"{name}.0", inside, 4 * width, 1, stride, False)
            nodes.append(helper.make_node("Add", [branch, skip], [f"{name}.sum"]))
            nodes.append(helper.make_node("Relu", [f"{name}.sum"], [f"{name}.out"]))
            last, inside = f"{name}.out", 4 * width
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["features"]))
    return _model(nodes, initializers, [1, 3, size, size], "features")


def pre_activation(blocks: int = 8, channels: int = 64, size: int = 56) -> onnx.ModelProto:
    """Residual blocks with BatchNormalization and Relu in front of each convolution."""
    generator = np.random.default_rng(3)
    nodes: list[onnx.NodeProto] = []
    initializers: list[TensorProto] = []
    last = "x"
    for block in range(blocks):
        branch = last
        for part in range(2):
            name = f"b{block}.{part}"
            nodes.append(_norm(branch, f"{name}.n", f"{name}.bn", channels, initializers, generator))
            nodes.append(helper.make_node("Relu", [f"{name}.n"], [f"{name}.r"]))
            weight = generator.standard_normal((channels, channels, 3, 3)) * np.sqrt(1.0 / (9 * channels))
            initializers.append(_constant(f"{name}.w", weight))
            nodes.append(helper.make_node("Conv", [f"{name}.r", f"{name}.w"], [f"{name}.c"], name, pads=[1] * 4))
            branch = f"{name}.c"
        nodes.append(helper.make_node("Add", [branch, last], [f"b{block}.sum"]))
        last = f"b{block}.sum"
    return _model(nodes, initializers, [1, channels, size, size], last)


def write(
    path: Path,
    nodes: list[onnx.NodeProto],
    initializers: list[TensorProto],
    shape: list[int | str],
    output: str,
    output_shape: list[None],
) -> None:
    graph = helper.make_graph(
        nodes,
        "benchmark",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, output_shape)],
    )
    graph.initializer.extend(initializers)
    model = helper.make_model(graph, opset_imports=[OPSET], ir_version=8)
    path.write_bytes(model.SerializeToString())


def _model(
    nodes: list[onnx.NodeProto], initializers: list[TensorProto], shape: list[int], output: str
) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info(output, TensorProto.FLOAT, [None] * len(shape))]
    graph = helper.make_graph(nodes, "benchmark", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[OPSET], ir_version=8)


def _constant(name: str, values: np.ndarray) -> TensorProto:
    return numpy_helper.from_array(values.astype(np.float32), name)


def _norm(
    source: str, target: str, name: str, channels: int, initializers: list[TensorProto], generator: np.random.Generator
) -> onnx.NodeProto:
    values = {
        "scale": generator.uniform(0.5, 1.0, channels),
        "bias": generator.standard_normal(channels) * 0.1,
        "mean": generator.standard_normal(channels) * 0.1,
        "variance": generator.uniform(0.8, 1.2, channels),
    }
    initializers += [_constant(f"{name}.{key}", value) for key, value in values.items()]
    return helper.make_node("BatchNormalization", [source, *(f"{name}.{key}" for key in values)], [target], name)
