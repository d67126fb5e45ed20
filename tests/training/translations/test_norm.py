"""Normalisation layers: our nodes in the library, and standard operators."""

import pytest
import torch
from torch.nn import functional as F

from bnexport.sync_bn import operators
from tests.training.translations.cases import case, check

C = 4


def _batch_norm(training, **options):
    def function(x, mean, var, weight, bias):
        # cos(var), say, would be a negative variance.
        mean, var = mean.detach().clone(), var.detach().abs() + 0.5
        y = F.batch_norm(x, mean, var, weight, bias, training, **options)
        return (y, mean, var)

    return function


def _sync(training, affine=True, tracked=True):
    def function(x, mean, var, weight, bias):
        statistics = (mean.detach(), var.detach().abs() + 0.5) if tracked else (None, None)
        parameters = (weight, bias) if affine else (None, None)
        outputs = operators.sync_batch_norm(
            x, *statistics, *parameters, training, 0.3, 1e-3, "", 1, "exact", "local", 0
        )
        return outputs[:3]

    return function


def _partly_frozen(x, weight, bias):
    first = F.batch_norm(x.detach(), None, None, weight, bias, True)
    second = F.batch_norm(first * x, None, None, weight.detach(), bias, True)
    return F.batch_norm(second, None, None, None, None, True)


VECTORS = ((C,), (C,), (C,), (C,))
BATCH_NORMS = [
    case("1d", _batch_norm(True), ("N", C), *VECTORS),
    case("2d", _batch_norm(True, momentum=0.3, eps=1e-3), ("N", C, 5, 3), *VECTORS),
    case("3d", _batch_norm(True), ("N", C, 2, 5, 3), *VECTORS),
    case("evaluation", _batch_norm(False), ("N", C, 5, 3), *VECTORS),
    case("no statistics", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ("N", C, 5), (C,), (C,)),
    case("not affine", lambda x: F.batch_norm(x, None, None, None, None, True), ("N", C, 5, 3)),
    case("partly frozen", _partly_frozen, ("N", C, 5, 3), (C,), (C,)),
    case("instance norm", lambda x, w, b: F.instance_norm(x, None, None, w, b), ("N", C, 5, 3), (C,), (C,)),
    case("sync", _sync(True), ("N", C, 5, 3), *VECTORS),
    case("sync, evaluation", _sync(False), ("N", C, 5, 3), *VECTORS),
    case("sync, not affine", _sync(True, affine=False), ("N", C, 5), *VECTORS),
    case("sync, no statistics", _sync(True, tracked=False), ("N", C, 5, 3), *VECTORS),
]


def test_batch_norm_as_standard_operators():
    check(BATCH_NORMS, standard_ops_only=True)


def test_batch_norm_as_our_nodes():
    # Their ranks and types are the library's matter.
    cases = [case for case in BATCH_NORMS if case.name not in ("1d", "3d", "instance norm")]
    check(cases, standard_ops_only=False, library=True)


@pytest.mark.parametrize("standard_ops_only", [True, False])
def test_batch_norm_of_data_far_from_zero(standard_ops_only):
    """|mean| = 1000 std: sums of squares would lose everything."""

    def function(x, weight):
        return F.batch_norm(x / 8 + 128, None, None, weight, None, True)

    check([case("offset", function, ("N", C, 7, 5), (C,))], standard_ops_only, library=not standard_ops_only)


def test_other_norms():
    check(
        [
            case("layer", lambda x, w, b: F.layer_norm(x, (6,), w, b), ("N", 5, 6), (6,), (6,)),
            case("layer, two axes", lambda x, w: F.layer_norm(x, (5, 6), w), ("N", 5, 6), (5, 6)),
            case("layer, not affine", lambda x: F.layer_norm(x, (6,), eps=1e-3), ("N", 5, 6)),
            case("group", lambda x, w, b: F.group_norm(x, 2, w, b), ("N", 6, 5, 3), (6,), (6,)),
            case("group, not affine", lambda x: F.group_norm(x, 3), ("N", 6, 5)),
            case("normalize", lambda x: F.normalize(x, dim=1), ("N", 6)),
            case("var_mean", lambda x: torch.var_mean(x, (0, 2)), ("N", 4, 5)),
            case("std", lambda x: x.std(1), ("N", 4, 5)),
        ]
    )
