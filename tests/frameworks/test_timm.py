"""Models of the real timm, after timm's own SyncBN conversion, against the untouched model at two sizes."""

from __future__ import annotations

import json

import pytest
from torch import nn

from tests.frameworks import environment
from tests.frameworks.timm_classes import described
from tests.sync_bn import lookalikes

pytestmark = pytest.mark.slow

MODELS = ("regnetx_002", "densenet121", "efficientnet_b0", "levit_128s", "mobilevit_xxs", "dm_nfnet_f0")


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, exporter: str) -> None:
    result = json.loads(environment.run("tests.frameworks.timm_model", name, exporter, timeout=1800).splitlines()[-1])
    assert result["passed"], result
    assert result["reference"] == "original"
    assert max(result["differences"].values()) < 1e-4, result
    assert result["training"] < 1e-4, result


def test_the_stand_ins_have_the_attributes_of_the_classes() -> None:
    real = json.loads(environment.run("tests.frameworks.timm_classes").splitlines()[-1])
    stand_ins = (
        lookalikes.BatchNormAct2d(4, act=nn.SiLU()),
        lookalikes.timm_sync_batch_norm_act(4, nn.SiLU()),
    )
    assert {type(module).__name__: described(module) for module in stand_ins} == real
