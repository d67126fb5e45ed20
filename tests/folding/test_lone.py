"""A lone Mul, Add, Sub or Div with constants leaves where a neighbour takes it, and no other node comes for it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bnexport.folding import fold
from tests.folding.corpus import CORPUS
from tests.support.onnx_text import model, operators_of


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
    text = " ".join(
        f"{'u' if 'Norm' in node else 'v'}{i + ('Norm' not in node)} = {node}" for i, node in enumerate(nodes)
    )
    return model(f"g (float[N,6,5,5] v0) => (y) {{ {text} y = Identity (v{len(nodes)}) }}", seed=seed)


def check_random(seeds: range) -> None:
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


def test_random_chains() -> None:
    check_random(range(20))


@pytest.mark.slow
def test_300_random_chains() -> None:
    check_random(range(1000, 1300))
