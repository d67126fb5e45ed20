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
from bnexport.model_io import load, save
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


def test_what_onnx_ir_cannot_read_or_write_is_one_line(tmp_path: Path) -> None:
    """Found by the fuzzer: an element type that there is not, and an attribute without a type."""
    odd = onnx.ModelProto.FromString(SEEDS["conv"])
    odd.graph.input[0].type.tensor_type.elem_type = -(2**31)
    onnx.save(odd, tmp_path / "odd.onnx")
    with pytest.raises(MalformedModelError, match=r"not a valid ONNX model: -2147483648 is not a valid DataType$"):
        load(tmp_path / "odd.onnx")
    odd = onnx.ModelProto.FromString(SEEDS["conv"])
    odd.graph.node[2].attribute.add(name="none")
    onnx.save(odd, tmp_path / "odd.onnx")
    with pytest.raises(
        MalformedModelError, match=r"the model cannot be written: Unsupported attribute type: UNDEFINED$"
    ):
        save(load(tmp_path / "odd.onnx"), tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def fuzz(run: object, folder: Path, seconds: float = 2.0) -> plain.Outcome:
    target = targets.Target("broken", lambda: iter([("seed", b"\x08\x08")]), lambda: None, run)  # type: ignore[arg-type]
    return plain.run(target, seconds, 1, folder, most=1)


def _raises(data: bytes, folder: Path) -> bool:
    if data != b"\x08\x08":
        raise ZeroDivisionError("a bug")
    return True


def _dies(data: bytes, folder: Path) -> bool:
    if data != b"\x08\x08":
        os.kill(os.getpid(), 11)
    return True


def _fills(data: bytes, folder: Path) -> bool:
    return data == b"\x08\x08" or bool(np.ones(2**30, np.float64).sum())


def _hangs(data: bytes, folder: Path) -> bool:
    while data != b"\x08\x08":
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    ("run", "verdict"), [(_raises, "exception"), (_dies, "signal-11"), (_fills, "exception"), (_hangs, "hang")]
)
def test_findings_are_saved(run: object, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "SECONDS", 0.5)
    outcome = fuzz(run, tmp_path)
    (found,) = outcome.findings.values()
    assert f"broken-{verdict}-" in found
    data = Path(found).read_bytes()
    assert data != b"\x08\x08"
    assert len(data) <= mutations.LARGEST


def test_files_that_are_left_are_a_finding(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "inspect", lambda path: (path.parent / "left").write_bytes(b""))
    with pytest.raises(targets.Finding, match="files"):
        targets.load_fold_save(SEEDS["conv"], work)
