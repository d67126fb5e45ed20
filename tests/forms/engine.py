"""The engine that says what a model computes: ONNX Runtime without optimisations, else onnx.reference."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import onnx
import onnx.helper
import onnx.reference
import onnx.reference.op_run
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as states

from tests.forms.case import FIRST
from tests.support.onnx_text import model

# onnx.reference takes the statistics of the batch in opset 9 to 13, and normalises its softmax by axis below 13.
_TRUSTED_FROM = 14
_ERRORS = (
    *(states.Fail, states.InvalidArgument, states.InvalidGraph, states.RuntimeException, states.NotImplemented),
    *(states.InvalidProtobuf, states.EPFail, states.NoModel, RuntimeError, ValueError),
)


class Refused(Exception):
    """No engine runs the model."""


class Engine:
    """A loaded model. Raises Refused where ONNX Runtime refuses it, or has no kernel and onnx.reference no right one."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        # Thousands of sessions, each of a few numbers.
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._reference: onnx.reference.ReferenceEvaluator | None = None
        try:
            self._session = onnxruntime.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except states.NotImplemented as error:
            opset = next(each.version for each in proto.opset_import if not each.domain)
            if opset < _TRUSTED_FROM:
                raise Refused(str(error)) from error
            self._reference = onnx.reference.ReferenceEvaluator(proto)
        except _ERRORS as error:
            raise Refused(str(error)) from error

    @property
    def is_runtime(self) -> bool:
        """Whether ONNX Runtime runs the model."""
        return self._reference is None

    def run(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return the outputs. Raises Refused."""
        try:
            if self._reference is not None:
                with np.errstate(all="ignore"):
                    return [np.asarray(each) for each in self._reference.run(None, dict(inputs))]
            return list(self._session.run(None, dict(inputs)))
        except Exception as error:  # onnx.reference raises what its NumPy code raises
            raise Refused(str(error)) from error


@functools.cache
def newest_opset() -> int:
    """Return the newest opset that ONNX Runtime loads."""
    for opset in range(FIRST, onnx.defs.onnx_opset_version() + 1):
        version = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])
        try:
            Engine(model("g (float[1] x) => (float[1] y) { y = Relu (x) }", opset=opset, ir_version=version))
        except Refused:
            return opset - 1
    return onnx.defs.onnx_opset_version()
