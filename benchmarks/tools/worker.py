"""Runs one tool over a folder of models, each in a process of its own, and prints what came of it as JSON.

    PYTHON worker.py TOOL FOLDER

Runs in the environment of the tool: it imports the tool, onnx, onnxruntime and NumPy, and nothing of this project. For
each `NAME.onnx` the tool writes `NAME.TOOL.onnx`. Where a `NAME.npz` has the input `x` and the expected output `y`,
stock ONNX Runtime runs the result without optimisations of its own; otherwise only its batch norms are counted.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

TOLERANCE = {"float32": 1e-4, "float16": 2e-2}  # relative to the largest output
NORMS = ("BatchNormalization", "MMCVSyncBatchNorm")


def onnxsim(source: str, target: str) -> None:
    import onnxsim

    model, same = onnxsim.simplify(onnx.load(source))
    if not same:
        raise RuntimeError("onnxsim says that its own check failed")
    onnx.save(model, target)


def onnxslim(source: str, target: str) -> None:
    import onnxslim

    onnx.save(onnxslim.slim(onnx.load(source)), target)


def onnxoptimizer(source: str, target: str) -> None:
    import onnxoptimizer

    model = onnxoptimizer.optimize(onnx.load(source), onnxoptimizer.get_fuse_and_elimination_passes())
    onnx.save(model, target)


def onnxscript(source: str, target: str) -> None:
    import onnx_ir
    import onnxscript.optimizer
    import onnxscript.rewriter

    model = onnx_ir.load(source)
    onnxscript.optimizer.optimize(model)
    model = onnxscript.rewriter.rewrite(model)
    onnx_ir.save(model, target)


def runtime(source: str, target: str) -> None:
    """ONNX Runtime's own optimisations, all that keep standard operators."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = target
    options.log_severity_level = 3
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def extensions(source: str, target: str) -> None:
    """Loads the model with the operators of onnxruntime-extensions: it folds nothing."""
    import onnxruntime_extensions

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    options.log_severity_level = 4
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    onnx.save(onnx.load(source), target)


def aimet(source: str, target: str) -> None:
    """Folds in place; names the nodes first, since AIMET tells nodes apart by their names."""
    from aimet_onnx.batch_norm_fold import fold_all_batch_norms_to_weight

    model = onnx.load(source)
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"node_{index}"
    fold_all_batch_norms_to_weight(model)
    onnx.save(model, target)


def quark(source: str, target: str) -> None:
    """ONNX Runtime's optimisations, which AMD Quark's preprocessing runs first, then its own folds."""
    from quark.shapeshifter.passes.onnx_fold_batch_norm import ONNXFoldBatchNormPass
    from quark.shapeshifter.passes.onnx_fold_batch_norm_after_concat import ONNXFoldBatchNormAfterConcatPass

    runtime(source, target)
    model = onnx.shape_inference.infer_shapes(onnx.load(target))
    for kind, name in (
        (ONNXFoldBatchNormPass, "fold_batch_norm"),
        (ONNXFoldBatchNormAfterConcatPass, "fold_batch_norm_after_concat"),
    ):
        model = kind.__new__(kind)._run_for_config(model, {name: True})
    onnx.save(model, target)


def bnexport(source: str, target: str) -> None:
    import bnexport

    bnexport.fold(source, target)


TOOLS: dict[str, tuple[str, Callable[[str, str], None]]] = {
    "onnxsim": ("onnxsim", onnxsim),
    "onnxslim": ("onnxslim", onnxslim),
    "onnxscript": ("onnxscript", onnxscript),
    "onnxoptimizer": ("onnxoptimizer", onnxoptimizer),
    "aimet-onnx": ("aimet-onnx", aimet),
    "amd-quark": ("amd-quark", quark),
    "onnxruntime": ("onnxruntime", runtime),
    "onnxruntime-extensions": ("onnxruntime-extensions", extensions),
    "bnexport": ("bnexport", bnexport),
}


def norms(model: onnx.ModelProto) -> int:
    """Returns the number of batch norms of ONNX and MMCV in the main graph."""
    return sum(
        node.op_type in NORMS and not (node.op_type == NORMS[0] and node.domain not in ("", "ai.onnx"))
        for node in model.graph.node
    )


def outcome(source: str, target: str, data: Any | None) -> dict[str, Any]:
    """Counts the batch norms that a tool left, and compares its file with the expected output."""
    before, written = onnx.load(source), onnx.load(target)
    left = norms(written)
    result: dict[str, Any] = {"before": norms(before), "left": left}
    notes = {entry.key: entry.value for entry in written.metadata_props}
    if "onnxsim.certify" in notes:
        result["certify"] = notes["onnxsim.certify"]
    if data is None:
        return {**result, "status": f"{left} left"}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(target, options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        got = session.run(None, {name: data["x"]})[0].astype(np.float64)
    except Exception as error:
        return {**result, "status": "does not load", "error": str(error)[:300]}
    expected = data["y"].astype(np.float64)
    scale = max(np.abs(expected).max(), 1e-30)
    difference = float(np.abs(got - expected).max() / scale) if np.isfinite(got).all() else float("inf")
    result["difference"] = difference if np.isfinite(difference) else "inf"
    if not difference <= TOLERANCE[str(data["x"].dtype)]:
        return {**result, "status": "wrong result"}
    return {
        **result,
        "status": "folded" if left < result["before"] and left == 0 else f"{left} left" if left else "right",
    }


def apart(work: Callable[[], dict[str, Any]], seconds: int | None = None) -> dict[str, Any]:
    """Does the work in a process of its own, since some tools crash. seconds: of processor time that it may take."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if seconds is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        try:
            result = work()
        except BaseException as error:
            result = {"status": "fails", "error": f"{type(error).__name__}: {error}"[:300]}
        with os.fdopen(write, "w") as stream:
            stream.write(json.dumps(result))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    if not text and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return {"status": "out of time", "error": f"more than {seconds} s"}
    return json.loads(text) if text else {"status": "crashes", "error": f"exit status {status}"}


def one(tool: str, source: Path) -> dict[str, Any]:
    """Runs the tool over a model and looks at its file."""
    target = str(source.with_suffix(f".{tool}.onnx"))

    def work() -> dict[str, Any]:
        TOOLS[tool][1](str(source), target)
        data = source.with_suffix(".npz")
        return outcome(str(source), target, dict(np.load(data)) if data.exists() else None)

    return apart(work)


def main() -> None:
    tool, folder = sys.argv[1], Path(sys.argv[2])
    package, _ = TOOLS[tool]
    sources = sorted(path for path in folder.glob("*.onnx") if not path.stem.endswith(tuple(f".{it}" for it in TOOLS)))
    print(
        json.dumps(
            {"version": importlib.metadata.version(package), "cases": {path.stem: one(tool, path) for path in sources}}
        )
    )


if __name__ == "__main__":
    main()
