"""ncnn, from a file that pnnx converts for the size of the inputs.

ncnn has no batches: each row runs alone, and what depends on the batch cannot be asked for.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version as version_of
from pathlib import Path

import ncnn
import numpy as np


def version() -> str:
    return f"{version_of('ncnn')}, pnnx {version_of('pnnx')}"


def run(path: str, inputs: dict[str, np.ndarray], outputs: list[str], libraries: list[str]) -> dict[str, np.ndarray]:
    if len(inputs) != 1 or len(outputs) != 1:
        raise NotImplementedError("ncnn has no batches: only inference, row by row")
    (image,), (name,) = inputs.values(), outputs
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder) / "model.onnx")
        shape = ",".join(map(str, (1, *image.shape[1:])))
        command = [str(Path(sys.executable).parent / "pnnx"), "model.onnx", f"inputshape=[{shape}]", "fp16=0"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        param, weights = Path(folder) / "model.ncnn.param", Path(folder) / "model.ncnn.bin"
        if done.returncode or not param.exists():
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise RuntimeError(f"pnnx: {lines[-1] if lines else done.returncode}")
        unknown = [
            line.split()[0]
            for line in param.read_text().splitlines()[2:]
            if not line[0].isupper() or "." in line.split()[0]
        ]
        if unknown:
            raise RuntimeError(f"pnnx leaves operators that ncnn has not: {', '.join(sorted(set(unknown)))}")
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
    return {name: np.stack(rows)}
