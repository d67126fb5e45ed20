"""A test that notices some changes of graph/nodes.py and not others; `test_mutation.py` runs it."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from bnexport.graph.nodes import Names


def test_a_name_that_is_taken_gets_a_number() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> f (float x) => (float y) { y = Relu (x) }')
    )
    assert Names(model).fresh("x") == "x_1"
