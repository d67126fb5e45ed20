"""Sums of parallel linear branches of one value, merged into one operator before any map is placed.

    sum_i L_i(x) + c    with L_i a Conv, a batch norm or another per-channel map, x itself, an average pool, Gemm, MatMul

is one linear map of x. The algebra is in `folding/parallel/kernels.py`; this file gives it the name by which it is
chosen, since it is no rule for one operator.
"""

from __future__ import annotations

from bnexport.folding.placing.search import Rule

NAME = "parallel"

RULE = Rule(NAME, ())
