"""Context of a rule, as a fold opens it for the main graph."""

import onnx
import onnx_ir as ir

from bnexport.folding.context import Context, Options
from bnexport.graph.nodes import Names
from bnexport.graph.shapes import Shapes
from bnexport.graph.surgery import Surgery


def context_of(proto: onnx.ModelProto, opset: int) -> Context:
    source, surgery = ir.from_proto(proto), Surgery()
    return Context(source, opset, Names(source), Shapes(source, surgery), surgery, False, options=Options())
