"""MMCV's own exporter writes the attribute `group` as an int; it names the group by its decimal digits."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from bnexport import schema
from bnexport.native import capi
from tests.support.node_models import (
    FORWARD_INPUTS,
    FORWARD_OUTPUTS,
    GRAD_INPUTS,
    GRAD_OUTPUTS,
    echo,
    forward_feeds,
    forward_model,
    grad_model,
    run,
)

# The attributes that MMCV's symbolic writes.
MMCV = {"eps": 1e-3, "momentum": 0.2, "stats_mode": "default"}


@pytest.fixture
def group_12():
    capi.register_group("12", 2, 0, echo)
    yield
    capi.unregister_group("12")


@pytest.fixture
def feeds():
    rng = np.random.default_rng(3)
    feeds = forward_feeds(rng, (2, 4, 3, 3))
    return feeds | {
        "grad_output": rng.normal(size=(2, 4, 3, 3)).astype(np.float32),
        "saved_mean": rng.normal(size=4).astype(np.float32),
        "saved_invstd": (rng.random(4) + 0.5).astype(np.float32),
    }


MODELS = {
    schema.SYNC_BATCH_NORM.name: functools.partial(
        forward_model, inputs=FORWARD_INPUTS, outputs=FORWARD_OUTPUTS, **MMCV
    ),
    schema.SYNC_BATCH_NORM_GRAD.name: functools.partial(
        grad_model, inputs=GRAD_INPUTS, outputs=GRAD_OUTPUTS, stats_mode="default", grad_reduction="mean"
    ),
}


@pytest.mark.parametrize("operator", MODELS)
def test_it_is_the_name_of_a_group(operator, feeds, group_12):
    def results(**attributes):
        return run(MODELS[operator](**attributes), feeds)

    alone, pair = results(), results(group="12", group_size=2)
    cases = [(results(group=number, group_size=1), alone) for number in (0, 12, -1, 2**63 - 1)]  # not asked
    for got, expected in [*cases, (results(group=12, group_size=2), pair)]:
        assert got.keys() == expected.keys()
        for name, value in got.items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
    if operator == schema.SYNC_BATCH_NORM.name:
        # The group was asked: twice the batch has another unbiased variance.
        assert not np.array_equal(pair["running_var_out"], alone["running_var_out"])
    with pytest.raises(Exception, match=r"'group': got '-7' with group_size 2, expected the name of a regist"):
        results(group=-7, group_size=2)
