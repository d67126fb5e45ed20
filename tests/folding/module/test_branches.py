"""Parallel branches in torch modules: merged where the trace shows them, the module's own code kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bnexport
from models.branches import randomise_statistics
from tests.folding.module.nets import Called
from tests.folding.parallel.test_blocks import NETS, network

X = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0))


def block(add) -> Called:
    """conv3, conv1 and norm of one value, added by the function given."""
    torch.manual_seed(0)
    layers = {
        **{"conv3": nn.Conv2d(4, 4, 3, padding=1, bias=False), "norm3": nn.BatchNorm2d(4), "conv1": nn.Conv2d(4, 4, 1)},
        **{"norm": nn.BatchNorm2d(4), "tail": nn.BatchNorm2d(4), "deep": nn.Conv2d(4, 4, 3, padding=1, groups=4)},
        **{"pool": nn.AvgPool2d(3, 1, 1), "none": nn.Identity()},
        **{"pad": nn.ZeroPad2d((0, 1, 0, 1)), "corner": nn.Conv2d(4, 4, 2)},
    }
    return randomise_statistics(Called(add, **layers)).eval()


def in_place(m, x):
    out = m.norm(x)
    out += m.conv1(x)
    out += m.norm3(m.conv3(x))
    return torch.relu(out)


def in_place_on_a_zero(m, x):
    first = m.conv1(x)
    out = m.norm(x)
    out += m.norm3(m.conv3(x))
    return out + first


def in_place_on_the_input(m, x):
    out = m.none(x)
    out += m.conv1(x)
    out += m.norm3(m.conv3(x))
    return out


def in_place_on_a_zero_by_the_sum(m, x):
    first = m.conv1(x)
    out = m.norm(x)
    out += first
    return out


def in_place_on_the_first_sum(m, x):
    """As timm's RepVGG adds its identity."""
    identity = m.norm(x)
    x = m.none(m.conv1(x) + m.norm3(m.conv3(x)))
    x += identity
    return x


def in_place_on_a_zero_of_either(m, x):
    """Whichever becomes the convolution, x is added in place to a zero of the other."""
    first, second = m.conv1(x), m.norm3(m.conv3(x))
    first += torch.relu(x)
    second += torch.sigmoid(x)
    return first + second + m.norm(x)


def read_elsewhere(m, x):
    a = m.conv1(x)
    return a + m.norm3(m.conv3(x)) * a


def changed_in_between(m, x):
    x = x + 1
    a = m.conv1(x)
    x.mul_(2)
    return a + m.norm3(m.conv3(x))


# The sum, and modules that still compute something.
MERGED = {
    "tree": (lambda m, x: torch.relu((m.norm3(m.conv3(x)) + m.conv1(x)) + m.norm(x)), 1),
    "differences": (lambda m, x: m.norm(x) - (m.conv1(x) - m.norm3(m.conv3(x))), 1),
    "in-place": (in_place, 1),
    "norm-of-the-sum-and-the-input": (lambda m, x: m.tail(m.deep(x) + x), 1),
    "norm-of-the-sum-with-the-input-twice": (lambda m, x: m.tail((x - m.conv3(x)) + x), 1),
    "pool": (lambda m, x: m.norm3(m.conv3(x)) + m.norm(m.pool(x)), 1),
    "identity-module": (lambda m, x: m.conv1(x) + m.none(x), 1),
    "starts-at-zero": (lambda m, x: 0 + m.norm(x) + m.conv1(x), 1),
    "minus-a-layer-of-a-sum": (lambda m, x: m.conv1(x) - m.none(m.conv3(x) + x), 1),
    "another-term": (lambda m, x: m.norm(x) + torch.relu(x) + m.conv1(x), 1),
    "would-grow": (lambda m, x: m.deep(x) + m.conv1(x), 2),
    "read-elsewhere": (read_elsewhere, 2),
    "in-place-on-a-zero": (in_place_on_a_zero, 1),
    "in-place-on-a-zero-by-the-sum": (in_place_on_a_zero_by_the_sum, 1),
    "in-place-on-the-first-sum": (in_place_on_the_first_sum, 1),
    "in-place-on-a-zero-of-either": (in_place_on_a_zero_of_either, 3),
    "changed-in-between": (changed_in_between, 2),
    "padded-on-one-side": (lambda m, x: m.corner(m.pad(x)) + m.conv1(x), 2),
    "a-number-below-a-layer": (lambda m, x: m.conv1(m.conv3(x) + 1.0) + m.norm(x), 3),
    "a-zero-below-a-layer": (lambda m, x: m.conv1(m.conv3(x) + 0.0) + m.norm(x), 1),
    "in-place-on-the-input": (in_place_on_the_input, 2),  # each branch reads what the one before it wrote
}


def convolutions(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.modules() if isinstance(child, (nn.Conv2d, nn.BatchNorm2d))]


@pytest.mark.parametrize("case", MERGED)
def test_sums(case: str) -> None:
    add, left = MERGED[case]
    net = block(add)
    expected = net(X.clone())
    folded = bnexport.fold_module(net, X)
    report = folded.fold_report
    assert not report.changed or report.verification.passed
    calls: list[nn.Module] = []
    for child in convolutions(folded):
        child.register_forward_hook(lambda module, *_: calls.append(module))
    torch.testing.assert_close(folded(X.clone()), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == left, report.sites


def test_a_hook_sees_its_values() -> None:
    net = block(MERGED["tree"][0])
    seen = []
    net.conv1.register_forward_hook(lambda module, inputs, output: seen.append(output))
    expected = net(X)
    folded = bnexport.fold_module(net, X, verify=False)
    torch.testing.assert_close(folded(X), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen[0], seen[-1])


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"skip": ["parallel"]}, {"conv3", "conv1", "norm"}),
        ({"only": ["parallel"]}, {"conv3"}),
        ({"skip": ["norm"]}, {"conv3", "norm"}),
        ({"only": ["norm"]}, {"conv3", "norm3", "conv1"}),
        ({"only": ["norm", "norm3"]}, {"conv3"}),
    ],
)
def test_selection(options: dict[str, list[str]], left: set[str]) -> None:
    net = block(MERGED["tree"][0])
    folded = bnexport.fold_module(net, X, **options)
    working = convolutions(folded)
    assert {name for name, child in folded.named_modules() if child in working} - {"deep", "tail", "corner"} == left
    torch.testing.assert_close(folded(X), net(X), rtol=1e-4, atol=1e-5)


def test_the_report_has_a_line_for_the_merge() -> None:
    site = bnexport.fold_module(block(MERGED["tree"][0]), X).fold_report.explain("norm")
    assert site.summary == "3 branches, 2 batch norms -> 1 Conv 3x3"
    assert (site.outcome, site.rules, site.targets) == ("folded", ("parallel",), ("conv3",))


@pytest.mark.parametrize("name", NETS)
def test_networks_keep_no_batch_norm(name: str) -> None:
    net, x = network(name), torch.randn(2, 3, 16, 16)
    folded = bnexport.fold_module(net, x)
    assert folded.fold_report.after.batch_norm == 0
    assert sum(isinstance(module, nn.Conv2d) for module in folded.modules()) == NETS[name][1]
    torch.testing.assert_close(folded(x), net(x), rtol=1e-4, atol=1e-5)
