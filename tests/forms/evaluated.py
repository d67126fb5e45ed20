"""Every form of every operator that the evaluator of nodes answers for, against ONNX Runtime."""

from __future__ import annotations

import collections

import numpy as np
import onnx
import onnx_ir as ir

from bnexport.graph import evaluate
from tests.forms import placements
from tests.forms.case import Data, Other
from tests.forms.engine import Engine, Refused
from tests.forms.recipes import RECIPES, Recipe, arithmetic, constants, moving, windows
from tests.forms.session import Trial, of_operator
from tests.forms.trial import difference

_UNARY = ("Abs", "Exp", "Log", "Reciprocal", "Sqrt", "Floor", "Ceil")
EVALUATED: dict[str, Recipe] = {
    **RECIPES,
    **dict.fromkeys(_UNARY, windows.plain),
    **dict.fromkeys(("Max", "Min"), arithmetic.variadic),
    **dict.fromkeys(("Pow", "Equal", "Greater", "Less"), arithmetic.binary),
    **dict.fromkeys(("And", "Or"), constants.logic),
    "ConstantOfShape": constants.filled,
    "DequantizeLinear": constants.dequantized,
    "QuantizeLinear": constants.quantized,
    "Mod": constants.modulo,
    "Not": constants.negation,
    "Range": constants.spans,
    "Where": constants.where,
    **{name: moving.reduction for name in evaluate.ANSWERED if name.startswith("Reduce")},
}
TYPES = ("float32", "int64", "int32")


def check(one: Trial, dtype: str) -> tuple[str, str]:
    """Return confirmed, opaque, wrong or not run, and what differs."""
    proto, feeds = placements.bare(one.op_type, one.case, one.shape, one.opset)
    node = proto.graph.node[0]
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    for operand, name in zip(one.case.operands, node.input, strict=True):
        array = feeds[name] if isinstance(operand, Data | Other) else arrays.get(name)
        if array is not None:
            # Integers of a size that a product or a power has room for.
            is_data = array.dtype == np.float32 and dtype != "float32"
            arrays[name] = np.asarray(np.ceil(3 * array), dtype) if is_data else array
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items() if name in node.input]
    model = placements.finish([node], [], [name for name in node.output if name], tensors, one.opset)
    try:
        engine = Engine(model)
        expected = engine.run({}) if engine.is_runtime else None
    except Refused:
        expected = None
    try:
        inputs = [arrays[name] if name else None for name in node.input]
        read = ir.from_proto(model).graph.node(0)
        exact = [
            evaluate.evaluate(read, each, one.opset)
            for each in (inputs, [None if array is None else evaluate.widened(array) for array in inputs])
        ]
    except evaluate.NotEvaluated as error:
        return "opaque" if expected is not None else "not run", str(error)
    if expected is None:
        return "not run", ""
    own, wide = ([np.asarray(value) for value in values if value is not None] for values in exact)
    narrowed = [value.astype(like.dtype) if value.dtype == np.float64 else value for value, like in zip(wide, own)]
    text = difference(expected, own) or difference(expected, narrowed)
    return ("wrong", f"{dtype}: {text}") if text else ("confirmed", "")


def counts(op_type: str, quota: int, sizes: int | None, step: int = 1) -> tuple[collections.Counter[str], list[str]]:
    """Run every `step`th form of one operator; return how many there are of each outcome, and what is wrong."""
    found, wrong = collections.Counter[str](), []
    kinds = evaluate.ANSWERED[op_type]
    for index, one in enumerate(of_operator(op_type, quota, sizes, EVALUATED[op_type])):
        if index % step:
            continue
        for dtype in TYPES:
            if kinds is None or dtype in kinds:
                outcome, text = check(one, dtype)
                found[outcome] += 1
                if outcome == "wrong":
                    wrong.append(f"{one.describe()}: {text}")
    return found, wrong
