"""The fuzzer itself: mutations are of use, findings are found. And a short run of it, by hypothesis."""

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
from tests.fuzz import mutations, plain, seeds
from tests.fuzz.targets import TARGETS, Target, work_folder

MODELS, NODES = dict(seeds.models()), dict(seeds.nodes())


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


@pytest.mark.parametrize("name", MODELS)
def test_seeds_are_accepted(name: str, work: Path) -> None:
    assert TARGETS["models"].run(MODELS[name], work)


@pytest.mark.parametrize("name", [*MODELS, *NODES])
def test_taken_apart_and_put_together(name: str) -> None:
    data = (MODELS | NODES)[name]
    assert mutations.serialise(mutations.parse(data)) == data


def test_most_mutations_still_parse() -> None:
    """And differ: a fuzzer whose inputs end in the parser tests nothing else."""
    generator, parsed, other = random.Random(1), 0, 0
    for _ in range(400):
        data = generator.choice(list(MODELS.values()))
        changed = mutations.mutate(data, generator, list(MODELS.values()))
        assert len(changed) <= mutations.LARGEST
        other += changed != data
        try:
            onnx.ModelProto.FromString(changed)
            parsed += 1
        except Exception:  # whatever protobuf raises
            continue
    assert parsed > 200
    assert other > 350


@hypothesis.settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(strategies.sampled_from(sorted(MODELS)), strategies.randoms(use_true_random=False))
def test_models(work: Path, name: str, generator: random.Random) -> None:
    TARGETS["models"].run(mutations.mutate(MODELS[name], generator, list(MODELS.values())), work)


def test_nodes(work: Path) -> None:
    target, generator = TARGETS["nodes"], random.Random(2)
    target.prepare()
    accepted = [target.run(data, work) for data in NODES.values()]
    assert sum(accepted) > len(accepted) * 3 // 4
    for _ in range(150):
        target.run(mutations.mutate(generator.choice(list(NODES.values())), generator, list(NODES.values())), work)


def fuzz(run: object, folder: Path, seconds: float = 2.0) -> plain.Outcome:
    target = Target("broken", lambda: iter([("seed", b"\x08\x08")]), lambda: None, run)  # type: ignore[arg-type]
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


def test_broken_promises_are_found(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of more than one line, files that are left, and what cannot be loaded again."""
    from tests.fuzz import targets

    def refuse(*arguments: object, **options: object) -> None:
        raise MalformedModelError("one line\nand another")

    with monkeypatch.context() as patch:
        patch.setattr(targets, "inspect", refuse)
        with pytest.raises(targets.Finding, match="not one printable line"):
            targets.load_fold_save(MODELS["conv"], work)
    with monkeypatch.context() as patch:
        patch.setattr(targets, "inspect", lambda path: (path.parent / "left").write_bytes(b""))
        with pytest.raises(targets.Finding, match="files"):
            targets.load_fold_save(MODELS["conv"], work)
    with monkeypatch.context() as patch:
        patch.setattr(targets, "fold", lambda source, target, verify, overwrite: target.write_bytes(b"no model"))
        with pytest.raises(targets.Finding, match="does not load again"):
            targets.load_fold_save(MODELS["conv"], work)
