"""Ranges of labels and indices, and questions for NaN, in recorded functions."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from bnexport.training import translations
from bnexport.training.tracing import index_ranges

SCORES, LABELS = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 4])


def recorded(function, *tensors):
    def of_two(x, target):
        return function(x, target)

    return make_fx(of_two, decomposition_table=translations.decompositions(), tracing_mode="fake")(*tensors).graph


CASES = {
    "labels": (F.cross_entropy, LABELS, [[0, 4, -100]]),
    "ignored": (lambda x, t: F.cross_entropy(x, t, ignore_index=255), LABELS, [[0, 4, 255]]),
    "smoothed": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), LABELS, [[0, 4, -100]]),
    "from one": (lambda x, t: F.cross_entropy(x, t - 1), LABELS + 1, [[1, 5, -99]]),
    "column": (lambda x, t: F.cross_entropy(x, t.squeeze(1).long()), LABELS[:, None].to(torch.uint8), [[0, 4, -100]]),
    "pixels": (lambda x, t: F.cross_entropy(x.T.reshape(1, 5, 2, 2), t), LABELS.reshape(1, 2, 2), [[0, 4, -100]]),
    "tokens": (lambda x, t: F.embedding(t, x).sum(), LABELS[:3], [[0, 3]]),
    "gathered": (lambda x, t: x.gather(1, t[:, None]).sum(), LABELS, [[0, 4]]),
    "both": (lambda x, t: F.embedding(t, x).sum() + F.cross_entropy(x, t), LABELS, [[0, 3], [0, 4, -100]]),
    "numbers": (lambda x, t: (x * t[:, None]).sum(), LABELS, []),
    "half of them": (lambda x, t: F.cross_entropy(x[:2], t[:2]), LABELS, []),
    "clamped": (lambda x, t: F.cross_entropy(x, t.clamp(0, 4)), LABELS, []),
}


@pytest.mark.parametrize("name", CASES)
def test_ranges(name):
    function, labels, expected = CASES[name]
    graph = recorded(function, SCORES, labels)
    assert index_ranges(graph, ["x", "target"]) == ({"target": expected} if expected else {})
    if expected and name != "both":
        first, last, *_ = expected[0]
        assert function(SCORES, labels).isfinite()
        for wrong in (first - 1, last + 1):
            with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
                function(SCORES, torch.full_like(labels, 0).long() + wrong)
