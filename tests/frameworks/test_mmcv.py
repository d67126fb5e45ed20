"""The real MMCV's SyncBatchNorm, on functions written from its kernels' formulas, and its stand-in in the tests."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
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


@functools.cache
def symbolic(folder: Path) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(
        environment.run("tests.frameworks.mmcv_symbolic", str(folder)).splitlines()[-1]
    )
    return written


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return symbolic(tmp_path_factory.mktemp("symbolic"))


@pytest.mark.parametrize("mode", ["default", "N"])
def test_a_file_of_its_own_symbolic_is_folded(mode: str, files: dict[str, Any]) -> None:
    result = files[mode]
    assert result["domain"] == "mmcv"
    assert result["attributes"] == {
        "eps": "FLOAT",
        "group": "INT",
        "group_size": "INT",
        "momentum": "FLOAT",
        "stats_mode": "STRING",
    }
    assert result["operators"] == ["Conv", "Conv", "Relu"]
    assert result["meaning_changed"]
    assert result["folded"] < 1e-5


@pytest.mark.parametrize("mode", ["default", "N"])
def test_a_file_of_its_own_symbolic_trains_in_the_runtime(mode: str, files: dict[str, Any]) -> None:
    """A number as group names the group; with group_size 1 no group is asked for."""
    assert files[mode]["run"] < 1e-5


SOURCE = "BNEXPORT_MMCV_TEST"


@pytest.mark.parametrize(("reduction", "failing"), [("mean", 0), ("local", 4)])
def test_mmcvs_own_test(reduction: str, failing: int) -> None:
    """All 12 cases with MMCV's reduction; with torch's, gradients of weight and bias of groups above 1 differ."""
    if not os.environ.get(SOURCE):
        pytest.skip(f"{SOURCE} names no file; it is tests/test_ops/test_syncbn.py of MMCV's repository")
    printed = environment.run("tests.frameworks.mmcv_own_test", os.environ[SOURCE], reduction)
    for results in json.loads(printed.splitlines()[-1]):
        assert len(results) == 12
        assert sum(error is not None for error in results.values()) == failing, results
