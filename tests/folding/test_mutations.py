"""Damaged model files: refused in one line, or folded; never another error, never a hang."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bnexport.errors import BnexportError
from bnexport.folding import fold, inspect
from bnexport.model_io import to_proto
from tests.folding.converting.test_sync_bn import with_body
from tests.folding.test_random_graphs import build, in_a_function

SEEDS = {
    "pieces": build(["conv", "norm", "branches", "norm", "positions", "flattened", "pooled"], 1, True),
    "more-pieces": build(["split", "norm", "sliced", "pre-activation", "padded", "readers"], 2, False),
    "function": in_a_function(build(["conv", "norm", "residual", "norm"], 3, False)),
    "training-node": with_body(1),
    "inference-node": with_body(0),
}


def mutated(data: bytes, generator: random.Random) -> bytes:
    """A few bytes changed, removed or inserted."""
    result = bytearray(data)
    for _ in range(generator.randint(1, 6)):
        kind, place = generator.random(), generator.randrange(len(result))
        if kind < 0.5:
            result[place] = generator.randrange(256)
        elif kind < 0.7:
            result[place] ^= 1 << generator.randrange(8)
        elif kind < 0.85:
            del result[place : place + generator.randint(1, 8)]
        else:
            result[place:place] = generator.randbytes(generator.randint(1, 8))
    return bytes(result)


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_files(seed: str, tmp_path: Path) -> None:
    generator = random.Random(seed)
    data = SEEDS[seed].SerializeToString()
    path = tmp_path / "model.onnx"
    refused = 0
    for _ in range(400):
        path.write_bytes(mutated(data, generator))
        try:
            inspect(path)
            to_proto(fold(path, verify=False).model)
        except BnexportError as error:
            assert str(error).isprintable(), str(error)
            refused += 1
    assert 50 < refused < 400
