"""The real inplace_abn, built from its source distribution, and its stand-in in the tests."""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

import pytest

from tests.frameworks import environment
from tests.sync_bn import lookalikes

pytestmark = pytest.mark.slow

CASES = (
    *(f"{name} {activation}" for name in ("ABN", "InPlaceABN") for activation in ("leaky_relu", "elu", "identity")),
    "ABN relu",
    "InPlaceABNSync leaky_relu",
)


@functools.cache
def results() -> dict[str, Any]:
    found = subprocess.run([str(environment.python()), "-c", "import inplace_abn"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"inplace_abn could not be built or imported: {found.stderr.decode()[-300:]}")
    measured: dict[str, Any] = json.loads(environment.run("tests.frameworks.inplace_abn_step").splitlines()[-1])
    return measured


@pytest.mark.parametrize("case", CASES)
def test_the_conversion_equals_it(case: str) -> None:
    result = results()[case]
    assert result["inference"] < 1e-6
    assert result["exported"] and result["reference"] == "original" and result["batch_norms"] == [1, 0]
    assert all(value < 1e-5 for value in result["training"].values()), result
    assert len(result["training"]) == (0 if "Sync" in case else 9)


def test_the_stand_in_has_the_attributes_of_the_class() -> None:
    stand_in = lookalikes.ABN(4)
    assert {name for name in vars(stand_in) if not name.startswith("_")} == set(results()["ABN relu"]["attributes"])
    assert sorted(stand_in.state_dict()) == results()["ABN relu"]["state"]
    assert set(results()["InPlaceABNSync leaky_relu"]["attributes"]) - set(results()["ABN relu"]["attributes"]) == {
        "group"
    }
