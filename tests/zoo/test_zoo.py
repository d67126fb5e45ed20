"""Both zoos notice what they are there for, and their pages are their results."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from tests.support.onnx_text import model
from tests.zoo import catalogue, page
from tests.zoo.training import networks
from tests.zoo.training import page as training
from tests.zoo.training.trial import judged
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
    assert len({entry.name for entry in entries}) == len(entries) >= 150
    assert all(entry.shape not in entry.others and entry.others for entry in entries)
    found = networks.networks()
    assert len({network.name for network in found}) == len(found) >= 250
    assert {network.optimizer for network in found} == {"sgd", "adamw"}


@pytest.mark.parametrize("module", [page, training], ids=["exports", "training"])
def test_the_page_is_its_result(module: ModuleType) -> None:
    results = json.loads(module.RESULTS.read_text())
    assert set(results) <= set(module.CAMPAIGN.cases())
    assert module.PAGE.read_text() == module.render(results), (
        "run `python -m tests.campaign` zoo or zoo-training --report"
    )


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


# Training steps.

OWN, JUMP = [1e-6, 1e-6, 1e-8, 1e-8], [1e-3, 1e-6, 1e-8, 1e-8]


@pytest.mark.parametrize(
    ("errors", "followed", "expected"),
    [
        ([OWN] * 3, [], "right"),
        ([OWN, OWN, JUMP], [], "right"),
        ([OWN, JUMP, JUMP], [], "wrong"),
        ([OWN, JUMP, JUMP], [[1e-6, 1e-6]] * 3, "right"),
        ([JUMP] * 3, [[1e-3, 1e-6]] * 3, "wrong"),
        ([JUMP] * 3, [[float("nan"), 1e-6]] * 3, "wrong"),
        ([[1e-6, 1e-6, 1e-3, 1e-8]] * 3, [], "wrong"),
        ([[1e-6, 1e-6, 1e-3, 1e-8]] * 3, [[1e-6, 1e-6]] * 3, "wrong"),
        ([[float("nan")] * 4] * 3, [], "wrong"),
    ],
)
def test_verdicts_of_steps(errors: list[list[float]], followed: list[list[float]], expected: str) -> None:
    assert judged(errors, followed) == expected


def test_losses() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5), torch.tensor([1, 4])
    plain = torch.nn.functional.cross_entropy(logits, labels)
    assert torch.isclose(networks.classification(logits, labels, 0.0), plain)
    assert torch.isclose(networks.classification((logits, logits), labels, 0.0), 1.4 * plain)
    small, ignored = torch.randn(2, 5, 2, 2), torch.full((2, 4, 4), networks.IGNORED)
    ignored[0, 0, 0] = 3
    expected = torch.nn.functional.interpolate(small, (4, 4), mode="bilinear").log_softmax(1)[0, 3, 0, 0]
    assert torch.isclose(networks.segmentation(small, ignored), -expected)
    maps = [torch.randn(2, 3, 2, 2), torch.randn(2, 3, 1, 1)]
    assert networks.detection([torch.zeros(2, 7), *maps], torch.zeros(2, 15)) == networks.detection(
        maps, torch.zeros(2, 15)
    )


def test_no_step_is_silently_wrong() -> None:
    for result in json.loads(training.RESULTS.read_text()).values():
        assert training.verdict(result) != "wrong", result["name"]
        assert "passed" not in result["ways"].get("faults", {}).get("found", {}).values(), result["name"]
