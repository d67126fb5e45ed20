"""The zoo notices what it is there for, and its page is its result."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from torch import nn

from tests.support.onnx_text import model
from tests.zoo import catalogue, page
from tests.zoo.trial import Trial

FILES = {
    "right": "y = Relu (x)",
    "wrong": "y = Abs (x)",
    "fails": "s = Constant <value_ints = [2, 3, 8, 8]> () z = Reshape (x, s) y = Relu (z)",
}


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    entry = catalogue.Entry("none", "none", "", (2, 3, 8, 8), ((1, 3, 4, 6),))
    made = Trial(entry, tmp_path / "result.json")
    made.remember(nn.ReLU())
    return made


@pytest.mark.parametrize("verdict", FILES)
def test_a_file_is_judged_at_every_size_that_it_declares(verdict: str, trial: Trial, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model(f"g (float[N,3,H,W] x) => (float[N,3,A,B] y) {{ {FILES[verdict]} }}", {}), path)
    assert trial.judged(path)["status"] == verdict


def test_a_size_that_is_declared_fixed_is_left_out(trial: Trial, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model("g (float[2,3,8,8] x) => (float[A,3,B,C] y) { y = Relu (x) }", {}), path)
    judged = trial.judged(path)
    assert judged["status"] == "right" and judged["fixed"] == [0, 2, 3] and len(judged["errors"]) == 1


def test_one_wrong_value_is_seen(trial: Trial) -> None:
    from tests.zoo.trial import _error

    expected = np.linspace(-1, 1, 7, dtype=np.float32)
    got = expected.copy()
    got[3] += 1e-3
    assert _error([got], [expected]) == pytest.approx(1e-3, rel=1e-3)
    got[3] = np.nan
    assert _error([got], [expected]) == _error([expected[:-1]], [expected]) == _error([], [expected]) == float("inf")


def test_the_worst_way_is_the_verdict() -> None:
    ways = {name: {"status": "right", "nodes": 1, "batch_norm_nodes": 0, "seconds": 1.0} for name in page.WAYS}
    result = {"name": "a", "ways": ways}
    assert page.of_model(result) == "right"
    ways["kept dynamo"] = {**ways["kept dynamo"], "fold": {"status": "wrong"}}
    assert page.of_way(result, "kept dynamo") == page.of_model(result) == "wrong"


def test_the_catalogue() -> None:
    entries = catalogue.entries()
    assert len(entries) >= 150
    assert len({entry.name for entry in entries}) == len(entries)
    assert all(entry.shape not in entry.others and entry.others for entry in entries)


def test_the_page_is_its_result() -> None:
    results = json.loads(page.RESULTS.read_text())
    assert set(results) <= {entry.name for entry in catalogue.entries()}
    assert page.PAGE.read_text() == page.render(results), "run `python -m tests.campaign zoo --report`"


def test_nothing_is_wrong() -> None:
    """No file that was written is wrong, or fails at a size that it declares."""
    for result in json.loads(page.RESULTS.read_text()).values():
        for name in page.WAYS:
            assert page.of_way(result, name) not in ("wrong", "fails"), f"{result['name']}, {name}"


def test_a_way_that_takes_too_long_is_stopped(trial: Trial) -> None:
    def never(folder: Path) -> dict[str, str]:
        while True:
            pass

    trial.seconds = 0.05
    trial.go("deploy dynamo", never)
    found = trial.result["ways"]["deploy dynamo"]
    assert found["status"] == page.of_way(trial.result, "deploy dynamo") == "stopped"


def test_a_conversion_that_drops_an_activation_is_seen(trial: Trial) -> None:
    assert trial.changed(nn.ReLU()) == 0
    assert trial.changed(nn.Identity()) > 0.1
