"""The folds of other tools, proved or refuted: `python -m benchmarks.foreign_folds --peers PYTHON`.

PYTHON is the interpreter of an environment with onnxoptimizer, onnxsim, onnxslim, onnxscript and onnxruntime. Each tool
optimises each model of foreign_models in a process of its own, as a user would call it; `bnexport.verify` compares what
comes out with the source, without a report. Writes benchmarks/results/foreign_folds.json, from which docs/verification.md has
its table.

Marks: "proved"; "refuted" with what differs; "left" where no batch norm is gone; "not proved" with the reason; "fails"
where the tool raises or crashes; "invalid" where what it writes is refused.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnx

from benchmarks import foreign_models, machine, records
from bnexport import verify
from bnexport.errors import BnexportError
from bnexport.verification.verdict import Verification

RESULT = Path(__file__).resolve().parent / "results" / "foreign_folds.json"
_TOOLS = {
    "onnxoptimizer": """
import onnxoptimizer
onnx.save(onnxoptimizer.optimize(onnx.load(source), onnxoptimizer.get_fuse_and_elimination_passes()), target)""",
    "onnxsim": "import onnxsim; onnx.save(onnxsim.simplify(onnx.load(source))[0], target)",
    "onnxslim": "import onnxslim; onnxslim.slim(source, target)",
    "onnxscript": """
import onnxscript.optimizer, onnxscript.rewriter
model = onnxscript.optimizer.optimize(onnx.load(source))
onnx.save(onnxscript.rewriter.rewrite(model), target)""",
    "onnxruntime": """
import onnxruntime
options = onnxruntime.SessionOptions()
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
options.optimized_model_filepath = target
onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])""",
}
_PROLOGUE = "import sys, onnx\nsource, target = sys.argv[1:3]\n"
_TIMEOUT = 120
_DIFFERENCE = 140


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--only", metavar="TEXT", default="", help="models whose name contains this")
    arguments = parser.parse_args()
    report = measure(arguments.peers, arguments.only)
    for row in report["rows"]:
        print(row["model"])
        for tool, mark in row["tools"].items():
            print(f"    {tool:14} {mark['mark']:10} {mark['reason']}")
    if not arguments.only:
        records.write(RESULT, report)


def measure(python: str, only: str = "") -> dict[str, Any]:
    """The marks of every tool on every model. python: the interpreter that has the tools."""
    versions = {tool: _version(python, tool) for tool in _TOOLS}
    rows = []
    groups = (("pattern", foreign_models.patterns()), ("trap", foreign_models.traps()))
    for kind, models in groups:
        for name, model in models.items():
            if only in name:
                marks = {tool: _mark(python, tool, model) for tool, version in versions.items() if version}
                rows.append({"kind": kind, "model": name, "tools": marks})
    return {"versions": versions, "rows": rows, "machine": machine.describe()}


def _version(python: str, tool: str) -> str | None:
    code = f"import importlib.metadata as m; print(m.version({tool!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _mark(python: str, tool: str, model: onnx.ModelProto) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.onnx"), Path(folder, "out.onnx")
        onnx.save(model, source)
        command = [python, "-c", _PROLOGUE + _TOOLS[tool], str(source), str(target)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False, cwd=folder)
        except subprocess.TimeoutExpired:
            return _row("fails", f"more than {_TIMEOUT} s")
        if done.returncode or not target.exists():
            lines = done.stderr.strip().splitlines()
            reason = f"signal {-done.returncode}" if done.returncode < 0 else (lines or ["no file"])[-1]
            return _row("fails", reason.replace(folder, ""))
        try:
            verdict = verify(model, onnx.load(target))
            local = verify(model, onnx.load(target), method="local")
            gone = _norms(source) - _norms(target)
        except BnexportError as error:
            return _row("invalid", str(error).replace(folder, ""))
    return _judge(verdict, local, gone)


def _judge(verdict: Verification, local: Verification, gone: int) -> dict[str, Any]:
    """The mark of a verdict. local: by the proof alone. gone: batch norms that the tool removed."""
    counts = {"folds": len(verdict.sites), "gone": gone, "bound": max((it.bound for it in local.sites), default=0.0)}
    wrong = next((site.reason for site in local.sites if site.method == "failed"), verdict.reason)
    if "failed" in (verdict.status, local.status):
        return _row("refuted", wrong, **counts)
    if verdict.sites and all(site.method == "proved" for site in verdict.sites):
        return _row("proved", **counts)
    if not verdict.sites and not gone and (verdict.passed or local.passed):
        return _row("left", **counts)
    return _row("not proved", local.reason, **counts)


def _row(mark: str, reason: str = "", **more: Any) -> dict[str, Any]:
    return {"mark": mark, "reason": " ".join(reason.split())[:_DIFFERENCE], **more}


def _norms(path: Path) -> int:
    return sum(node.op_type == "BatchNormalization" for node in onnx.load(path, load_external_data=False).graph.node)


if __name__ == "__main__":
    main()
