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
# Networks of parallel branches, and one whose arithmetic looks like a batch norm.
BRANCHES = ("repvgg_a0", "mobileone_s0", "fastvit_t8", "repvit_m0_9", "repghostnet_050", "poolformer_s12")


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, exporter: str) -> None:
    result = json.loads(environment.run("tests.frameworks.timm_model", name, exporter, timeout=1800).splitlines()[-1])
    assert result["passed"], result
    assert result["reference"] == "original"
    assert max(result["differences"].values()) < 1e-4, result
    assert result["training"] < 1e-4, result


@pytest.mark.parametrize("name", BRANCHES)
def test_parallel_branches(name: str) -> None:
    """As few batch norms and convolutions as timm's own re-parameterisation leaves."""
    result = json.loads(environment.run("tests.frameworks.timm_branches", name, timeout=1800).splitlines()[-1])
    counts = result["counts"]
    assert result["passed"], result
    assert counts["merged"]["BatchNormalization"] == counts["theirs"]["BatchNormalization"] == 0, result
    for operator in ("Conv", "Gemm", "MatMul", "nodes"):
        assert counts["merged"][operator] <= counts["theirs"][operator], result
    assert counts["plain"]["BatchNormalization"] > 0 or name == "poolformer_s12", result
    assert max(result["differences"].values()) < 1e-4, result


def test_the_stand_ins_have_the_attributes_of_the_classes() -> None:
    real = json.loads(environment.run("tests.frameworks.timm_classes").splitlines()[-1])
    stand_ins = (
        lookalikes.BatchNormAct2d(4, act=nn.SiLU()),
        lookalikes.timm_sync_batch_norm_act(4, nn.SiLU()),
    )
    assert {type(module).__name__: described(module) for module in stand_ins} == real
