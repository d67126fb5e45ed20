"""What finds no place, in the form that was asked for: a depthwise 1x1 Conv, or Mul and Add; and lone arithmetic."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bnexport.errors import UsageError
from bnexport.folding import fold
from tests.folding.corpus import CORPUS
from tests.support.onnx_text import batch_norms, model, operators_of


def build(nodes: str, opset: int = 17, **values: float) -> onnx.ModelProto:
    held = {f"p_{name}": np.full(8, value, np.float32) for name, value in values.items()}
    return model(f"g (float[2,8,4,4] x) => (float[2,8,4,4] y) {{ {nodes} }}", opset=opset, values=held)


@pytest.mark.parametrize(("scale", "shift", "left"), [(1, 3, "Relu Add"), (2, 0, "Relu Mul"), (1, 0, "Relu Add")])
def test_what_is_neutral_is_left_out(scale: float, shift: float, left: str) -> None:
    proto = build("r = Relu (x) y = Norm <epsilon = 0.0> (r, p:8)", s=scale, b=shift, m=0, v=1)
    assert operators_of(fold(proto, leftover="arithmetic")) == left.split()
    padded = "n = Norm <epsilon = 0.0> (x, p:8) y = Conv <pads = [1,1,1,1]> (n, w:8.8.3.3)"
    (site,) = fold(build(padded, s=scale, b=shift, m=0, v=1), leftover="arithmetic").report.sites
    assert site.outcome == ("restated" if left == "Relu Add" and shift else "folded")


def test_what_cannot_be_read_stays_with_its_reason() -> None:
    result = fold(build("y, m, v = Norm <training_mode = 1> (x, p:8)"), leftover="conv")
    assert operators_of(result) == ["BatchNormalization"]
    assert "training" in result.report.sites[0].reason
    assert "statistics" in fold(build("y, m, v = Norm (x, p:8) q = Relu (m)"), leftover="conv").report.sites[0].reason
    old = build("r = Relu (x) y = Norm <is_test = 1> (r, p:8)", opset=6)
    assert operators_of(fold(old, leftover="conv")) == ["Relu", "Conv"]
    kept = fold(old, leftover="arithmetic")
    assert operators_of(kept) == ["Relu", "BatchNormalization"]
    assert "before opset 7" in kept.report.sites[0].reason


def test_skipped_and_chosen_ones() -> None:
    proto, first = build("a = Norm (x, p:8) r = Relu (a) y = Norm (r, q:8)"), ["BatchNormalization -> a"]
    assert operators_of(fold(proto, leftover="conv", skip=first)) == ["BatchNormalization", "Relu", "Conv"]
    assert operators_of(fold(proto, leftover="conv", only=first)) == ["Conv", "Relu", "BatchNormalization"]
    with pytest.raises(UsageError, match=r"leftover: got 'dwconv', expected one of batch-norm, conv, arithmetic"):
        fold(proto, leftover="dwconv")  # type: ignore[arg-type]


def test_large_means() -> None:
    """The shift is rounded once, though it is the difference of large numbers."""
    result = fold(build("y = Norm (x, p:8)", s=2, b=0.1, m=1000, v=1), leftover="conv", verify="local")
    (bias,) = (each for each in result.model.graph.initializer if list(each.dims) == [8])
    exact = float(np.float32(0.1)) - 2.0 / np.sqrt(1.0 + float(np.float32(1e-5))) * 1000.0
    assert np.array_equal(onnx.numpy_helper.to_array(bias), np.full(8, np.float32(exact)))


def test_integers_and_what_was_skipped_are_left_alone() -> None:
    body = "g (int64[N,6] x) => (int64[N,6] y) { z = Add (x, a) y = Mul (z, a) }"
    assert not fold(model(body, values={"a": np.arange(6)})).report.sites
    proto = CORPUS["lone-conv-mul"].model()
    assert operators_of(fold(proto, skip=["Mul -> y"])) == ["Conv", "Mul"]


def random_chain(seed: int, norms: bool = False) -> onnx.ModelProto:
    """Convolutions, activations and lone arithmetic in any order, sometimes read twice. norms: batch norms in between."""
    generator = np.random.default_rng(seed)
    nodes, channels = [], 6
    for i in range(int(generator.integers(3, 9))):
        kind = str(generator.choice(["conv", "padded", "Relu", "LeakyRelu", "Mul", "Add", "Sub", "Div", "skip"]))
        if kind in ("conv", "padded"):
            size, new = 3 if kind == "padded" else 1, int(generator.choice([4, 6, 8]))
            nodes.append(f"Conv <pads={[size // 2] * 4}> (v{i}, w{i}_s:{new}.{channels}.{size}.{size})")
            channels = new
        elif kind in ("Relu", "LeakyRelu"):
            nodes.append(f"{kind} (v{i})")
        elif kind == "skip":
            nodes.append(f"Add (v{i}, v{i})")
        else:
            shapes = ["-", "1", f"{channels}.1.1", f"1.{channels}.1.1", "1.1.1.1", "5"]
            operands = [f"v{i}", f"k{i}_s:{shapes[generator.integers(len(shapes))]}"]
            turned = kind != "Div" and generator.random() < 0.3
            nodes.append(f"{kind} ({', '.join(operands[:: -1 if turned else 1])})")
        if norms and generator.random() < 0.5:
            nodes[-1] = f"{nodes[-1]} v{i + 1} = Norm (u{i}, p{i}:{channels})"
    steps = (f"{'u' if 'Norm' in node else 'v'}{i + ('Norm' not in node)} = {node}" for i, node in enumerate(nodes))
    text = " ".join(steps)
    return model(f"g (float[N,6,5,5] v0) => (y) {{ {text} y = Identity (v{len(nodes)}) }}", seed=seed)


def check_lone(seeds: range) -> None:
    gone = 0
    for seed in seeds:
        proto = random_chain(seed)
        result = fold(proto)
        gone += len(result.report.folded)
        removed = sum(len(site.nodes) for site in result.report.folded)
        pairs = sum(not site.lone for site in result.report.folded)  # an Add may be left of them
        assert 0 <= len(operators_of(result)) - (len(proto.graph.node) - removed) <= pairs, seed
        verdict = result.report.verification
        assert verdict is None or verdict.passed, (seed, verdict)
        assert verdict is None or {proof.method for proof in verdict.sites} <= {"proved", "compared"}, (seed, verdict)
    assert gone > len(seeds) // 3


def check_random(seeds: range) -> None:
    restated = 0
    for seed in seeds:
        for form in ("conv", "arithmetic"):
            result = fold(random_chain(seed, norms=True), leftover=form)
            assert batch_norms(result.model) == 0, (seed, form)
            verdict = result.report.verification
            assert verdict is None or verdict.passed, (seed, form, verdict)
            restated += sum(site.outcome == "restated" for site in result.report.sites)
    assert restated > len(seeds) // 3


def test_random_chains() -> None:
    check_random(range(12))
    check_lone(range(20))


@pytest.mark.slow
def test_300_random_chains() -> None:
    check_random(range(2000, 2150))
    check_lone(range(1000, 1300))
