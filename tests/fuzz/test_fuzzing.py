"""A short run of the fuzzer, by hypothesis; and what it calls a finding."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import onnx
import pytest
from hypothesis import strategies

from bnexport.errors import MalformedModelError
from bnexport.folding import fold
from bnexport.model_io import as_model
from tests.fuzz import mutations, plain, seeds, targets

SEEDS = dict(seeds.models())


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    with targets.work_folder() as folder:
        yield folder


def test_seeds_are_accepted_and_most_mutations_parse(work: Path) -> None:
    """A fuzzer whose inputs end in the parser tests nothing else."""
    generator, parsed = random.Random(1), 0
    for data in SEEDS.values():
        assert targets.load_fold_save(data, work)
        assert mutations.serialise(mutations.parse(data)) == data
        for _ in range(10):
            changed = mutations.mutate(data, generator, list(SEEDS.values()))
            assert len(changed) <= mutations.LARGEST
            try:
                parsed += onnx.ModelProto.FromString(changed) is not None
            except Exception:  # whatever protobuf raises
                continue
    assert parsed > 5 * len(SEEDS)


@hypothesis.settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(strategies.sampled_from(sorted(SEEDS)), strategies.randoms(use_true_random=False))
def test_models(work: Path, name: str, generator: random.Random) -> None:
    targets.load_fold_save(mutations.mutate(SEEDS[name], generator, list(SEEDS.values())), work)


def test_what_onnx_ir_cannot_read_is_one_line() -> None:
    """Found by the fuzzer: an element type that there is not."""
    odd = onnx.ModelProto.FromString(SEEDS["conv"])
    odd.graph.input[0].type.tensor_type.elem_type = -(2**31)
    with pytest.raises(MalformedModelError, match=r"not a valid ONNX model: -2147483648 is not a valid DataType$"):
        as_model(odd)


@pytest.mark.parametrize(("name", "node"), [("conv", 2), ("constants", 1)], ids=["a value", "a constant"])
def test_what_onnx_ir_cannot_write_is_one_line(name: str, node: int, tmp_path: Path) -> None:
    """Found by the fuzzer: an attribute without a type."""
    odd = onnx.ModelProto.FromString(SEEDS[name])
    odd.graph.node[node].attribute.add(name="none")
    with pytest.raises(
        MalformedModelError, match=r"the model cannot be written: Unsupported attribute type: UNDEFINED$"
    ):
        fold(odd, tmp_path / "out.onnx", verify=False)
    assert not (tmp_path / "out.onnx").exists()


SEED = b"\x08\x08"


def _raises(data: bytes, folder: Path) -> bool:
    return data == SEED or bool(1 // 0)


def _dies(data: bytes, folder: Path) -> bool:
    return data == SEED or bool(os.kill(os.getpid(), 11))


def _fills(data: bytes, folder: Path) -> bool:
    return data == SEED or bool(np.ones(2**30, np.float64).sum())


def _hangs(data: bytes, folder: Path) -> bool:
    while data != SEED:
        time.sleep(0.01)
    return True


VERDICTS = [(_raises, "exception"), (_dies, "signal-11"), (_fills, "exception"), (_hangs, "hang")]


@pytest.mark.parametrize(("run", "verdict"), VERDICTS)
def test_findings_are_saved(run: plain.Run, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "SECONDS", 0.5)
    (found,) = plain.run(run, [SEED], 60.0, 1, tmp_path, most=1).findings.values()
    assert Path(found).name.startswith(f"{verdict}-")
    data = Path(found).read_bytes()
    assert data != SEED and len(data) <= mutations.LARGEST


def test_files_that_are_left_are_a_finding(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "inspect", lambda path: (path.parent / "left").write_bytes(b""))
    with pytest.raises(targets.Finding, match="files"):
        targets.load_fold_save(SEEDS["conv"], work)
