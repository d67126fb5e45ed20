"""A test that sees one guard of graph/nodes.py and not others; `test_guards.py` runs it."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from bnexport.graph.nodes import Refused, get_flag


def test_a_flag_is_0_or_1() -> None:
    node = ir.node("Gemm", [], attributes={"transA": 2, "transB": 1})
    assert get_flag(node, "transB")
    with pytest.raises(Refused):
        get_flag(node, "transA")
