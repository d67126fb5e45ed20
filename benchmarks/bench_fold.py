"""Folding against other tools, a copy of the files, and what it buys at run time.

`python -m benchmarks.bench_fold [--peers PYTHON] [--cases ...] [--timeout 300] [--repeat 3] [--work FOLDER]`

Fold: whole processes, from the start of the interpreter to its end, without verification; wall time and peak
memory as the kernel counts them for the process and its children. PYTHON is the interpreter of an
environment with onnxoptimizer, onnxsim, onnxslim, onnxscript and onnxruntime; a tool that is missing, fails
or takes longer than the timeout is reported as such. Peers run only the passes that a fold needs where
they let the caller choose. Beside each case: `cp --reflink=never` of its files, the same with a flush to
the disk (ours flushes), and the start of an interpreter with our imports. What ours takes beyond that start
is also measured by a clock inside the process. Runs go over all candidates in turn.

Run time: sessions of ONNX Runtime before and after our fold, in turn, in one process. "processor" is the time of
the processors together, which other work on the machine changes less; "batch_norm_share" is what ONNX Runtime's own
profile gives batch norms of the time of all nodes before the fold, the most that removing them can save.

Prints tables, writes benchmarks/results/fold.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import records

# Nothing large is imported here: the kernel counts a process from its fork, with what its parent held then.

RESULTS = Path(__file__).resolve().parent / "results"

# name: (pairs, channels, external, convolutions without batch norm)
CASES: dict[str, tuple[int, int, bool, int]] = {
    "1,000 pairs": (1000, 8, False, 0),
    "10,000 pairs": (10_000, 8, False, 0),
    "250 MB, one file": (27, 512, False, 0),
    "250 MB, external": (27, 512, True, 0),
    "1.5 GB, one file": (40, 1024, False, 0),
    "2.6 GB, external": (70, 1024, True, 0),
    "2.6 GB, external, half unchanged": (35, 1024, True, 35),
}

OURS = "bnexport"
TOOLS: dict[str, str] = {
    OURS: """
sys.argv[1:] = ['fold', source, target, '--no-verify', '--overwrite', '--json', target + '.json']
import bnexport.cli
bnexport.cli.main()""",
    "load and save": "import onnx; save(onnx.load(source))",
    "onnxruntime": """
import onnxruntime as ort
options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
options.optimized_model_filepath = target
if external:
    options.add_session_config_entry('session.optimized_model_external_initializers_file_name', 'out.onnx.data')
ort.InferenceSession(source, options, providers=['CPUExecutionProvider'])""",
    "onnxscript": """
import onnx_ir as ir
from onnxscript.rewriter.rules.common._fuse_batchnorm import rules
model = ir.load(source)
rules.apply_to_model(model)
ir.save(model, target, external_data='out.onnx.data' if external else None)""",
    "onnxsim": "import onnx, onnxsim; save(onnxsim.simplify(source if external else onnx.load(source))[0])",
    "onnxslim": "import onnxslim; onnxslim.slim(source, target, save_as_external_data=external)",
    "onnxoptimizer": """
import onnx, onnxoptimizer
save(onnxoptimizer.optimize(onnx.load(source), ['fuse_bn_into_conv']))""",
}
_PROLOGUE = """
import sys
source, target, external = sys.argv[1], sys.argv[2], sys.argv[3] == 'True'
def save(model):
    import onnx
    onnx.save(model, target, save_as_external_data=external, location='out.onnx.data' if external else None)
"""


_START = """
import sys
from bnexport.cli import main, startup
startup.prepare()
import bnexport.folding.api
sys.argv[1:] = ["--version"]
main()"""


def measure(command: list[str], timeout: float) -> dict[str, Any]:
    """Wall time and peak memory of a process with its children, or how it ended."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    expired = threading.Event()

    def stop() -> None:
        expired.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout, stop)
    timer.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    if expired.is_set():
        return {"status": f"over {timeout:g} s", "peak_mb": usage.ru_maxrss / 1e3}
    if process.returncode:
        return {"status": f"failed ({process.returncode})", "seconds": seconds, "peak_mb": usage.ru_maxrss / 1e3}
    return {"status": "ok", "seconds": seconds, "peak_mb": usage.ru_maxrss / 1e3}


def left(target: Path) -> int | None:
    """Batch norms that a tool has left."""
    if not target.exists():
        return None
    code = (
        "import onnx, sys; proto = onnx.load(sys.argv[1], load_external_data=False);"
        "print(sum(node.op_type == 'BatchNormalization' for node in proto.graph.node))"
    )
    return int(subprocess.run([sys.executable, "-c", code, target], capture_output=True, check=True).stdout)


def run_case(name: str, arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    pairs, channels, external, plain = CASES[name]
    source = work / "source.onnx"
    code = (
        "import pathlib, sys; from benchmarks import fold_models; a = sys.argv[1:];"
        "fold_models.pairs(int(a[0]), int(a[1]), pathlib.Path(a[2]), external=a[3] == 'True', plain_convolutions=int(a[4]))"
    )
    make = [sys.executable, "-c", code, *map(str, (pairs, channels, source, external, plain))]
    subprocess.run(make, cwd=RESULTS.parents[1], check=True)
    files = [path for path in (source, work / "source.onnx.data") if path.exists()]
    out = work / "out"
    size = sum(path.stat().st_size for path in files)
    plans: dict[str, list[str]] = {
        "cp": ["cp", "--reflink=never", *map(str, files), str(out)],
        "cp and flush": ["sh", "-c", 'cp --reflink=never "$@" && sync "$0"/*', str(out), *map(str, files), str(out)],
        "start": [sys.executable, "-c", _START],
    }
    for tool, code in TOOLS.items():
        if tool not in arguments.tools:
            continue
        python = sys.executable if tool == OURS else arguments.peers
        if python:
            plans[tool] = [python, "-c", _PROLOGUE + code, str(source), str(out / "out.onnx"), str(external)]
    runs: dict[str, list[dict[str, Any]]] = {plan: [] for plan in plans}
    remaining: dict[str, int | None] = {}
    for turn in range(arguments.repeat):
        for plan, command in plans.items():
            done = runs[plan]
            slow = plan not in ("cp", "cp and flush", "start", OURS)
            # A peer that failed, or took long, is not asked again.
            if turn and slow and (done[0]["status"] != "ok" or done[0]["seconds"] > 20):
                continue
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            done.append(measure(command, arguments.timeout))
            if plan in TOOLS:
                remaining[plan] = left(out / "out.onnx")
    shutil.rmtree(out, ignore_errors=True)
    for path in files:
        path.unlink()
    tools = {plan: _summary(done, remaining.get(plan)) for plan, done in runs.items()}
    ours, start = tools[OURS], tools["start"]
    ours["inside"] = ours["seconds"] - start["seconds"]
    ours["inside_fastest"] = ours["fastest"] - start["fastest"]
    return {"case": name, "bytes": size, "load": os.getloadavg()[0], "tools": tools}


def _summary(runs: list[dict[str, Any]], remaining: int | None) -> dict[str, Any]:
    good = [run for run in runs if run["status"] == "ok"]
    summary: dict[str, Any] = {"status": runs[-1]["status"], "peak_mb": max(run["peak_mb"] for run in runs)}
    if good:
        seconds = [run["seconds"] for run in good]
        summary |= {"status": "ok", "seconds": statistics.median(seconds), "fastest": min(seconds), "runs": len(good)}
    return summary | {"batch_norms_left": remaining}


def show_case(result: dict[str, Any]) -> None:
    tools = result["tools"]
    print(f"\n{result['case']} ({result['bytes'] / 1e6:.0f} MB)")
    for tool, row in tools.items():
        time_ = f"{row['seconds']:8.2f} s" if "seconds" in row else f"{row['status']:>10}"
        print(f"  {tool:16} {time_} {row['peak_mb']:8.0f} MB  batch norms left: {row['batch_norms_left']}")
    ours, start = tools[OURS], tools["start"]
    for which, work, key in (("median", ours["inside"], "seconds"), ("fastest", ours["inside_fastest"], "fastest")):
        print(
            f"  beyond the start, {which}: {work:.2f} s, {work / tools['cp'][key]:.2f} x cp,"
            f" {work / tools['cp and flush'][key]:.2f} x cp and flush"
        )
    print(f"  {ours['peak_mb'] - start['peak_mb']:.0f} MB over the imports")


def session(model: bytes, optimised: bool, profile: str | None = None) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = 2
    # Threads that spin would take the cores from the other session, and count as processor time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, profile
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def batch_norm_share(model: bytes, optimised: bool, feed: dict[str, Any], rounds: int) -> float:
    """The part of the nodes' time that is spent in BatchNormalization."""
    with tempfile.TemporaryDirectory() as folder:
        profiled = session(model, optimised, profile=os.path.join(folder, "profile"))
        for _ in range(rounds):
            profiled.run(None, feed)
        events = json.loads(Path(profiled.end_profiling()).read_text())
    nodes = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    norms = sum(event["dur"] for event in nodes if event["args"]["op_name"] == "BatchNormalization")
    return norms / sum(event["dur"] for event in nodes)


def run_time(name: str, proto: Any, optimised: bool, rounds: int) -> dict[str, Any]:
    """Before and after our fold, in turn: one run of each, one session of each."""
    import numpy as np

    from bnexport.folding import fold
    from bnexport.model_io import to_bytes

    result = fold(proto)

    models = {"before": proto.SerializeToString(), "after": to_bytes(result.model)}
    sessions = {key: session(model, optimised) for key, model in models.items()}
    dims = proto.graph.input[0].type.tensor_type.shape.dim
    feed = {"x": np.random.default_rng(0).standard_normal([dim.dim_value for dim in dims]).astype(np.float32)}
    runs: dict[str, list[float]] = {key: [] for key in models}
    processors: dict[str, list[float]] = {key: [] for key in models}
    creation: dict[str, list[float]] = {key: [] for key in models}
    for turn in range(rounds):
        for key in sorted(models, reverse=bool(turn % 2)):
            start, processor = time.perf_counter(), time.process_time()
            sessions[key].run(None, feed)
            processors[key].append(time.process_time() - processor)
            runs[key].append(time.perf_counter() - start)
            if turn % 4 == 0:
                start = time.perf_counter()
                session(models[key], optimised)
                creation[key].append(time.perf_counter() - start)
    row: dict[str, Any] = {
        "model": name,
        "optimisations": "all" if optimised else "off",
        "folded": len(result.report.folded),
        "sites": len(result.report.sites),
        "batch_norm_share": batch_norm_share(models["before"], optimised, feed, rounds // 4),
    }
    for label, times in (("run", runs), ("processor", processors), ("session", creation)):
        for key in models:
            row[f"{label}_{key}_ms"] = 1e3 * statistics.median(times[key])
        ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
        row[f"{label}_ratio"] = statistics.median(ratios)
        row[f"{label}_ratio_of_fastest"] = min(times["after"]) / min(times["before"])
    return row


def chart(results: list[dict[str, Any]], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        from matplotlib.patches import Patch
    except ImportError:
        print("no chart: matplotlib is not installed")
        return
    names = [tool for tool in ["cp", *TOOLS] if any(tool in result["tools"] for result in results)]
    figure, axes = plt.subplots(figsize=(11, 1.2 + 1.1 * len(results)))
    height = 0.8 / len(names)
    for index, tool in enumerate(names):
        for place, result in enumerate(results):
            row = result["tools"].get(tool)
            if row is None:
                continue
            seconds = row.get("seconds")
            at = place + (index - len(names) / 2) * height
            color = f"C{index}"
            if seconds is None:
                axes.plot([0.012], [at], marker="x", color=color, markersize=4, linestyle="none")
                axes.text(0.013, at, f" {row.get('status') or 'not run'}", va="center", fontsize=6)
            else:
                axes.barh(at, seconds, height * 0.9, color=color)
                axes.text(max(seconds, 0.01), at, f" {seconds:.2f} s", va="center", fontsize=6)
    axes.set_yticks(range(len(results)), [result["case"] for result in results])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seconds, whole process")
    handles = [Patch(color=f"C{index}", label=tool) for index, tool in enumerate(names)]
    axes.legend(
        handles=handles, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names), frameon=False
    )
    axes.set_xlim(left=0.01)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="the Python of an environment with the other tools")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=list(TOOLS), help="memory: up to 14 GB")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--work", type=Path, help="where models are written; needs 9 GB for the largest case")
    parser.add_argument("--skip-run-time", action="store_true")
    arguments = parser.parse_args()
    results = []
    for name in arguments.cases:
        with tempfile.TemporaryDirectory(dir=arguments.work) as work:
            results.append(run_case(name, arguments, Path(work)))
        show_case(results[-1])
    rows = []
    if not arguments.skip_run_time:
        from benchmarks import fold_models

        for name, proto, optimised in (
            ("MatMul, Add, Transpose, BN, 128 x 256", fold_models.matmul_blocks(), True),
            ("MatMul, Add, Transpose, BN, 512 x 128", fold_models.matmul_blocks(8, 512, 128), True),
            ("ResNet-50", fold_models.resnet50(224), True),
            ("ResNet-50", fold_models.resnet50(224), False),
            ("pre-activation", fold_models.pre_activation(), True),
            ("pre-activation", fold_models.pre_activation(), False),
        ):
            rows.append(run_time(name, proto, optimised, arguments.rounds))
            print(json.dumps(rows[-1]))
    RESULTS.mkdir(exist_ok=True)
    from benchmarks import machine

    data = {"schema_version": 2, "machine": machine.describe(), "fold": results, "run_time": rows}
    path = RESULTS / "fold.json"
    if path.exists():
        # Cases, and tools of a case, that were not run keep their figures.
        old = json.loads(path.read_text())
        cases = {result["case"]: result for result in old["fold"]}
        for result in results:
            kept = cases.get(result["case"], {"tools": {}})["tools"]
            tools = {**kept, **result["tools"]}
            order = [name for name in ("cp", "cp and flush", "start", *TOOLS) if name in tools]
            cases[result["case"]] = result | {"tools": {name: tools[name] for name in order}}
        data["fold"] = [cases[name] for name in CASES if name in cases]
        data["run_time"] = rows or old["run_time"]
    records.write(path, data)


if __name__ == "__main__":
    main()
