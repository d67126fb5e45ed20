"""Random sums of branches: what ONNX Runtime runs gives the same outputs after folding."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.onnx_text import assert_near, model, operators, run


class Branches:
    """Random branches of `x` in ONNX text, whose kernels keep its size or make the same other one."""

    def __init__(self, seed: int) -> None:
        self.choose = np.random.default_rng(seed)
        self.nodes: list[str] = []
        self.stride = int(self.choose.choice([1, 1, 2]))

    def node(self, text: str) -> str:
        """Add a node, whose text names its parameters by the value that it makes, `{0}`."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(f"{name} = {text.replace('{0}', name)}")
        return name

    def conv(self, value: str, stride: int = 1) -> str:
        size, dilation, group = (int(self.choose.choice(of)) for of in ([1, 1, 2, 3, 3, 5], [1, 1, 2], [1, 1, 2, 4]))
        total = dilation * (size - 1)
        begin = int(self.choose.integers(0, total + 1)) if self.choose.random() < 0.3 else total // 2
        pads = [begin, begin, total - begin, total - begin]
        bias = ", {0}_b:4" if self.choose.random() < 0.3 else ""
        fields = f"pads={pads}, strides={[stride] * 2}, dilations={[dilation] * 2}, group={group}"
        return self.node(f"Conv <{fields}> ({value}, {{0}}_w:4.{4 // group}.{size}.{size}{bias})")

    def pool(self, value: str, stride: int = 1) -> str:
        include = int(self.choose.integers(0, 2))
        fields = f"kernel_shape=[3,3], pads=[1,1,1,1], strides={[stride] * 2}, count_include_pad={include}"
        return self.node(f"AveragePool <{fields}> ({value})")

    def map(self, value: str) -> str:
        texts = [f"Norm ({value}, {{0}}:4)", f"Mul ({value}, {{0}}_s:4.1.1)", f"Add ({value}, {{0}}_c:4.1.1)", f"Identity ({value})",
            f"Relu ({value})", f"Add ({value}, {{0}}_c:1)"]  # fmt: skip
        return self.node(str(self.choose.choice(texts, p=[0.3, 0.2, 0.2, 0.15, 0.1, 0.05])))

    def branch(self, value: str, depth: int) -> str:
        """One that makes the size of the sum of `value`."""
        if self.stride == 1 and self.choose.random() < 0.15:
            return value
        before = self.choose.random()
        if before < 0.35:
            value = self.map(value) if before < 0.2 else self.conv(value)
        stride = self.stride
        if depth > 0 and self.choose.random() < 0.25:
            value = self.total(value, depth - 1)
        else:
            value = self.pool(value, stride) if self.choose.random() < 0.15 else self.conv(value, stride)
        self.stride = 1
        while self.choose.random() < 0.4:
            value = self.map(value) if self.choose.random() < 0.7 else self.conv(value)
        self.stride = stride
        return value

    def total(self, value: str, depth: int) -> str:
        parts = [self.branch(value, depth) for _ in range(self.choose.integers(2, 5))]
        while len(parts) > 1:
            first, second = parts.pop(int(self.choose.integers(len(parts)))), parts.pop(0)
            parts.append(self.node(f"{self.choose.choice(['Add', 'Sub'])} ({first}, {second})"))
        return parts[0]

    def model(self) -> onnx.ModelProto:
        value = self.total(self.node("Relu (x)"), 2)
        return model(f"g (float[N,4,H,W] x) => (float[N,A,B,C] {value}) {{ {' '.join(self.nodes)} }}")


def check(seed: int) -> bool:
    """Whether something was merged."""
    proto = Branches(seed).model()
    x = np.random.default_rng(seed).standard_normal((2, 4, 9, 8)).astype(np.float32)
    expected = run(proto, {"x": x})[0]
    result = fold(proto, verify=False)
    folded = to_proto(result.model)
    onnx.checker.check_model(folded)
    assert_near(run(folded, {"x": x})[0], expected, f"seed {seed}")
    assert len(folded.graph.node) <= len(proto.graph.node), seed
    assert operators(folded).count("BatchNormalization") <= operators(proto).count("BatchNormalization")
    return any(site.summary for site in result.report.sites)


def test_random_sums() -> None:
    merged = sum(check(seed) for seed in range(120))
    assert merged > 40, "the random graphs hold too few branches"


@pytest.mark.slow
def test_many_random_sums() -> None:
    for seed in range(1000, 6000):
        check(seed)
