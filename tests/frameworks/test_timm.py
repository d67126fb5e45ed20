"""Networks of parallel branches of the real timm, and the classes of its batch norms; the zoo exports its models."""

from __future__ import annotations

import json

import pytest
from torch import nn

from tests.frameworks import environment
from tests.frameworks.timm_classes import described
from tests.sync_bn import lookalikes

pytestmark = pytest.mark.slow

# Networks of parallel branches, and one whose arithmetic looks like a batch norm.
BRANCHES = ("repvgg_a0", "mobileone_s0", "fastvit_t8", "repvit_m0_9", "repghostnet_050", "poolformer_s12")


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
