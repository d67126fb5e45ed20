"""MMCV's own exporter writes the attribute `group` as an int; it names the group by its decimal digits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from bnexport import schema
from bnexport.native import capi
from tests.support.node_models import (
    FORWARD_INPUTS,
    FORWARD_OUTPUTS,
    GRAD_INPUTS,
    forward_feeds,
    forward_model,
    grad_model,
    run,
)

# The attributes that MMCV's symbolic writes.
MMCV = {"eps": 1e-3, "momentum": 0.2, "stats_mode": "default"}


@capi.ALL_GATHER
def _twice(_, send, receive, count, error, capacity):
    """Two processes that hold the same data."""
    for rank in range(2):
        ctypes.memmove(receive + 8 * count * rank, send, 8 * count)
    return 0


@pytest.fixture
def group_12():
    capi.register_group("12", 2, 0, _twice)
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


MODELS = {schema.SYNC_BATCH_NORM.name: forward_model, schema.SYNC_BATCH_NORM_GRAD.name: grad_model}
OURS = {
    schema.SYNC_BATCH_NORM.name: {"inputs": FORWARD_INPUTS, "outputs": FORWARD_OUTPUTS, **MMCV},
    schema.SYNC_BATCH_NORM_GRAD.name: {
        "inputs": GRAD_INPUTS,
        "outputs": ("grad_input", "", "", "grad_weight", "grad_bias"),
        "stats_mode": "default",
        "grad_reduction": "mean",
    },
}


def results(operator, feeds, **attributes):
    return run(MODELS[operator](**OURS[operator], **attributes), feeds)


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in got.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize("operator", MODELS)
@pytest.mark.parametrize("group", [0, 12, -1, 2**63 - 1], ids=str)
def test_of_one_process_it_is_ignored(operator, group, feeds):
    assert_same(results(operator, feeds, group=group, group_size=1), results(operator, feeds))


@pytest.mark.parametrize("operator", MODELS)
def test_of_two_processes_it_is_the_name(operator, feeds, group_12):
    got = results(operator, feeds, group=12, group_size=2)
    assert_same(got, results(operator, feeds, group="12", group_size=2))
    if operator == schema.SYNC_BATCH_NORM.name:
        # The group was asked: twice the batch has another unbiased variance.
        assert not np.array_equal(got["running_var_out"], results(operator, feeds)["running_var_out"])


@pytest.mark.parametrize("operator", MODELS)
def test_a_group_that_nobody_registered(operator, feeds):
    with pytest.raises(
        Exception, match=r"attribute 'group': got '-7' with group_size 2, expected the name of a regist"
    ):
        results(operator, feeds, group=-7, group_size=2)
