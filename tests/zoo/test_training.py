"""The training zoo notices what it is there for, and its page is its result."""

import json

import pytest
import torch

from tests.zoo.training import networks, page
from tests.zoo.training.trial import judged

OWN, JUMP = [1e-6, 1e-6, 1e-8, 1e-8], [1e-3, 1e-6, 1e-8, 1e-8]


def test_each_architecture_is_there_once() -> None:
    found = networks.networks()
    assert len(found) >= 250 and len({network.name for network in found}) == len(found)
    assert {network.optimizer for network in found} == {"sgd", "adamw"}


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
def test_verdicts(errors: list[list[float]], followed: list[list[float]], expected: str) -> None:
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


def test_the_page_is_its_result() -> None:
    results = json.loads(page.RESULTS.read_text())
    assert set(results) <= {network.name for network in networks.networks()}
    assert page.PAGE.read_text() == page.render(results), "run `python -m tests.campaign zoo-training --report`"


def test_nothing_is_silently_wrong() -> None:
    for result in json.loads(page.RESULTS.read_text()).values():
        assert page.verdict(result) != "wrong", result["name"]
        assert "passed" not in result["ways"].get("faults", {}).get("found", {}).values(), result["name"]
