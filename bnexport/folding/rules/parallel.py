"""Sums of parallel linear branches of one value, merged into one operator before any map is placed.

    x -> Conv(W1) -> map, x -> Conv(W2) -> map, x -> map -> sum    =    x -> Conv(W)

Each branch is a Conv, a batch norm or another per-channel map, x itself, an average pool, Gemm or MatMul, so that their sum
is one linear map of x. The algebra is in `folding/branches/windows.py`; this file gives it the name by which it is chosen,
since it is no rule for one operator.
"""

from __future__ import annotations

from bnexport.folding.placing import Rule

NAME = "parallel"

RULE = Rule(
    NAME,
    (),
    into="sums of parallel branches",
    forms="sums of branches of one value (below)",
    behind="L1(x) + L2(x) becomes one Conv, Gemm or MatMul",
)
