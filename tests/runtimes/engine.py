"""One case in one runtime: `python -m tests.runtimes.engine ENGINE CASE.json`; the result is the last line of stdout.

An engine gets the path of a model, its inputs by name, the names of its outputs and the custom-op libraries, and returns the outputs
by name or in order. It runs in the runtime's own environment, with NumPy and nothing of ours.
"""

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

Inputs = Mapping[str, np.ndarray]
Results = Mapping[str, np.ndarray] | Sequence[np.ndarray]
# The packages whose versions are shown.
PACKAGES = {
    "onnxruntime_cpu": ("onnxruntime",), "onnx_reference": ("onnx",), "openvino_cpu": ("openvino",), "tract_onnx": ("tract",),
    "onnx_to_torch": ("onnx2torch",), "tvm_relax": ("apache-tvm",), "ncnn_pnnx": ("ncnn", "pnnx"),
}  # fmt: skip


def onnxruntime_cpu(path: str, inputs: Inputs, outputs: list[str], libraries: list[str]) -> Results:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for library in libraries:
        options.register_custom_ops_library(library)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(outputs, _needed(inputs, [value.name for value in session.get_inputs()]))


def onnx_reference(path: str, inputs: Inputs, outputs: list[str], libraries: list[str]) -> Results:
    import onnx.reference

    evaluator = onnx.reference.ReferenceEvaluator(path)
    return evaluator.run(outputs, _needed(inputs, evaluator.input_names))


def openvino_cpu(path: str, inputs: Inputs, outputs: list[str], libraries: list[str]) -> Results:
    import openvino

    compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    results = compiled(_needed(inputs, [name for value in compiled.inputs for name in value.names]))
    return {name: results[name] for name in outputs}


def tract_onnx(path: str, inputs: Inputs, outputs: list[str], libraries: list[str]) -> Results:
    import tract

    model = tract.onnx().load(path)
    feeds = [inputs[model.input_name(index)] for index in range(model.input_count())]
    results = model.into_model().into_runnable().run(feeds)  # with names of its own, in the order of the file's
    return [value.to_numpy() for value in results]


def onnx_to_torch(path: str, inputs: Inputs, outputs: list[str], libraries: list[str]) -> Results:
    """onnx2torch imports torchvision, whose wheel for CUDA does not load next to a CPU build of torch; nothing of it is used."""
    import torch

    sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
    torch.library.define("torchvision::nms", "(Tensor boxes, Tensor scores, float limit) -> Tensor")
    import onnx2torch

    names, outputs_of_file = _ends(path)
    with torch.no_grad():
        results = onnx2torch.convert(path)(*(torch.from_numpy(inputs[name]) for name in names))
    results = results if isinstance(results, (tuple, list)) else (results,)
    return dict(zip(outputs_of_file, (result.numpy() for result in results)))


def tvm_relax(path: str, inputs: Inputs, outputs: list[str], libraries: list[str]) -> Results:
    import onnx
    import tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    names, outputs_of_file = _ends(path)
    shapes = {name: list(inputs[name].shape) for name in names}
    module = from_onnx(onnx.load(path), shape_dict=shapes, keep_params_in_input=False)
    machine = relax.VirtualMachine(tvm.compile(module, tvm.target.Target("llvm")), tvm.cpu())
    results = machine["main"](*(tvm.runtime.tensor(inputs[name]) for name in names))
    results = [results] if hasattr(results, "numpy") else list(results)
    return dict(zip(outputs_of_file, (result.numpy() for result in results)))


def ncnn_pnnx(path: str, inputs: Inputs, outputs: list[str], libraries: list[str]) -> Results:
    """ncnn has no batches: each row runs alone, from a file that pnnx converts for its size."""
    import ncnn

    if len(inputs) != 1 or len(outputs) != 1:
        raise NotImplementedError("ncnn has no batches: only inference, row by row")
    (image,) = inputs.values()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder, "model.onnx"))
        shape = ",".join(map(str, (1, *image.shape[1:])))
        command = [str(Path(sys.executable).parent / "pnnx"), "model.onnx", f"inputshape=[{shape}]", "fp16=0"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        param, weights = Path(folder, "model.ncnn.param"), Path(folder, "model.ncnn.bin")
        if done.returncode or not param.exists():
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise RuntimeError(f"pnnx: {lines[-1] if lines else done.returncode}")
        kinds = {line.split()[0] for line in param.read_text().splitlines()[2:]}
        if unknown := sorted(kind for kind in kinds if not kind[0].isupper() or "." in kind):
            raise RuntimeError(f"pnnx leaves operators that ncnn has not: {', '.join(unknown)}")
        rows = []
        for row in image:
            net = ncnn.Net()
            net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
            net.opt.num_threads = 1
            if net.load_param(str(param)) or net.load_model(str(weights)):
                raise RuntimeError("ncnn cannot load what pnnx wrote")
            extractor = net.create_extractor()
            extractor.input("in0", ncnn.Mat(np.ascontiguousarray(row)).clone())
            status, value = extractor.extract("out0")
            if status:
                raise RuntimeError(f"ncnn ends with {status}")
            rows.append(np.array(value))
    return [np.stack(rows)]


def _needed(inputs: Inputs, names: Sequence[str]) -> dict[str, np.ndarray]:
    return {name: value for name, value in inputs.items() if name in names}


def _ends(path: str) -> tuple[list[str], list[str]]:
    """Names of a file's inputs that have no value, and of its outputs, in order."""
    graph = importlib.import_module("onnx").load(path).graph
    held = {tensor.name for tensor in graph.initializer}
    return [value.name for value in graph.input if value.name not in held], [value.name for value in graph.output]


def main(engine: str, path: str) -> None:
    case = json.loads(Path(path).read_text())
    inputs = {
        name: np.asarray(value["data"], value["dtype"]).reshape(value["shape"])
        for name, value in case["inputs"].items()
    }
    names, result = list(case["outputs"]), {"version": ", pnnx ".join(map(version, PACKAGES[engine]))}
    try:
        found = globals()[engine](case["path"], inputs, names, case["libraries"])
        named = found if isinstance(found, Mapping) else dict(zip(names, found, strict=True))
        arrays = {name: np.asarray(named[name], np.float64) for name in names}
        result["outputs"] = {
            name: {"shape": list(value.shape), "data": value.ravel().tolist()} for name, value in arrays.items()
        }
    except Exception as error:  # each runtime has classes of its own
        traceback.print_exc()
        result["reason"] = f"{type(error).__name__}: {error}"
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
