"""The real MMCV's SyncBatchNorm, on functions written from its kernels' formulas, and its stand-in in the tests."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from tests.frameworks import environment
from tests.sync_bn import lookalikes

pytestmark = pytest.mark.slow


@functools.cache
def ranks() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads(environment.run("tests.frameworks.mmcv_step").splitlines()[-1])
    return results


def test_one_training_step_equals_mmcv() -> None:
    for result in ranks():
        assert len(result["differences"]) == 8
        assert max(result["differences"].values()) < 1e-5, result


def test_the_stand_in_has_the_attributes_of_the_class() -> None:
    stand_in = lookalikes.MmcvSyncBatchNorm(4)
    real = ranks()[0]
    assert {name for name in vars(stand_in) if not name.startswith("_")} == set(real["attributes"])
    assert sorted(stand_in.state_dict()) == real["state"]
