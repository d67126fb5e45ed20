"""The generated tables of docs: from the JSON in benchmarks/results into the pages, between markers.

    python -m benchmarks.page        # after a benchmark was run; `make bench` does it by itself

A page has `<!-- NAME: begin -->` and `<!-- NAME: end -->` around each table; what is outside is prose and is
kept. A test compares pages and results, so that no figure is set by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks import aims, machine
from benchmarks.markdown import Report, behind_summary, setting, table
from benchmarks.tools import tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def shape_of(row: Report) -> str:
    return " x ".join(map(str, row["shape"]))


ORT_CPU_COLUMNS = (
    "train/(read+copy)", "train/(read,copy)", "train/copy", "torch/train", "ort/train", "infer/ort",
    "grad/(2read+combine)", "grad/(2read,combine)", "torch/grad",
)  # fmt: skip


def ort_cpu(report: Report) -> str:
    rows = []
    for row in report["rows"]:
        cells = [f"{row[name]:.2f}" if name in row else "" for name in ORT_CPU_COLUMNS]
        head = [shape_of(row), row["dtype"], f"{row['megabytes']:.1f}", f"{row['microseconds']['train']:.0f}"]
        rows.append([*head, *cells])
    header = ["shape", "type", "MB", "train us", *(f"`{name}`" for name in ORT_CPU_COLUMNS)]
    how = setting(report, f"{report['threads']} threads", f"{report['statistic']} of each candidate's runs")
    return f"{how}\n\n{table(header, rows, 2)}"


def torch_operator(report: Report) -> str:
    rows = []
    for row in report["rows"]:
        group = row["two_processes_ratio"]
        rows.append(
            [shape_of(row), row["dtype"], row["layout"], f"{row['megabytes']:.1f}"]
            + [f"{row[f'{part}_{of}']:.2f}" for part in ("forward", "backward") for of in ("ms", "ratio")]
            + [f"{row['step_ratio']:.2f}", "" if group is None else f"{group:.2f}"]
        )
    header = ["shape", "type", "layout", "MB", "forward ms", "torch / ours", "backward ms", "torch / ours", "both"]
    how = setting(report, f"{report['threads']} threads")
    return f"{how}\n\n{table([*header, 'torch / two processes of ours'], rows, 3)}"


def seconds_of(row: Report) -> str:
    seconds = row["seconds"]
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def megabytes_of(row: Report) -> str:
    megabytes = row["peak_mb"]
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1000:.2f} GB"


def fold(report: Report) -> str:
    names = list(dict.fromkeys(name for case in report["fold"] for name in case["tools"]))
    plain = ("cp", "cp and flush", "start")
    rows: list[list[str]] = []
    for case in report["fold"]:
        tools = case["tools"]
        cells = []
        for name in names:
            row = tools.get(name)
            if row is None:
                cells.append("not run")
            elif "seconds" not in row:
                cells.append(row["status"])
            else:
                cells.append(seconds_of(row) + ("" if name in plain else f", {megabytes_of(row)}"))
        inside = tools["bnexport"]["inside"]
        large = case["bytes"] >= 100e6  # below, a copy is over before its clock has started
        # A copy that takes longer than one with a flush was disturbed.
        copy = min(tools[name]["seconds"] for name in ("cp", "cp and flush"))
        cells.append(f"{inside:.2f} s" + (f", {inside / copy:.1f} x cp" if large else ""))
        cells.append(f"{case['load']:.1f}")
        rows.append([case["case"], *cells])
    lines = table(["case", *names, "beyond the start", "load"], rows)
    return f"{machine.sentence(report, load=False)}.\n\n{lines}"


def fold_run_time(report: Report) -> str:
    rows = []
    for row in report["run_time"]:
        before, after = row["processor_before_ms"], row["processor_after_ms"]
        rows.append(
            [row["model"], row["optimisations"], f"{row['folded']} of {row['sites']}", f"{row['run_ratio']:.2f}"]
            + [f"{row['processor_ratio']:.2f} ({before:.1f} to {after:.1f} ms)", f"{row['session_ratio']:.2f}"]
        )
    header = ["model", "optimisations", "folded", "run, wall time", "run, processor time", "session creation"]
    return f"{setting(report)}\n\n{table(header, rows, 2)}"


def branches(report: Report) -> str:
    rows = []
    for row in report["rows"]:
        apart, merged = row["apart"], row["merged"]
        cells = [f"{own['nodes']}, {own['batch_norms']}, {own['megabytes']:.0f}" for own in (apart, merged)]
        times = [f"{own['median_ms']:.1f}" for own in (apart, merged)]
        rows.append([row["network"], *cells, *times, f"{row['ratio']:.2f}", f"{row['best_ratio']:.2f}"])
    header = ["network", "nodes, batch norms, MB: folded", "and merged", "folded, ms", "and merged, ms", "ratio"]
    how = setting(report, f"{report['threads']} threads")
    return f"{how}\n\n{table([*header, 'of the least times'], rows)}"


def recalibration(report: Report) -> str:
    share = "{:.1%}".format
    rows = [
        [row["network"], *(share(row[name]) for name in ("before", "after", "folded")), f"{row['largest']:.1f}"]
        for row in report["rows"]
    ]
    header = ["digits network with", "statistics of training", "re-estimated", "and folded", "largest change, std"]
    how = setting(report, f"{report['epochs']} epochs")
    return f"{how}\n\n{table(header, rows, 1)}"


def recalibration_cost(report: Report) -> str:
    rows = [
        [
            row["network"],
            f"{row['file']['ratio']:.2f}",
            f"{row['file']['one_by_one_ratio']:.2f}",
            f"{row['module']['ratio']:.2f}",
            f"{row['deviation']:.0e}",
        ]
        for row in report["costs"]
    ]
    header = ["network", "file, `together`", "file, `one_by_one`", "module, `together`", "float32 against float64, std"]
    how = setting(report, f"{report['batch']} images of {report['image']} x {report['image']}")
    return f"{how}\n\n{table(header, rows, 1)}"


def torchscript(report: Report) -> str:
    rows = [[row["candidate"], f"{row['ratio']:.2f}", f"{row['least_ms']:.0f}"] for row in report["rows"]]
    return f"{setting(report, '1 thread')}\n\n{table(['candidate', 'time, ratio', 'ms'], rows)}"


def parallel_training(report: Report) -> str:
    rows = [
        [f"{row['batch']}", *(f"{row[key]:.1f}" for key in ("one_ms", "two_ms")), f"{row['ratio']:.2f}"]
        for row in report["rows"]
    ]
    return f"{setting(report)}\n\n{table(['joint batch', 'one process, ms', 'two, ms', 'ratio'], rows)}"


def conv_gradient(report: Report) -> str:
    rows = []
    for network, layers in report["layers"].items():
        for layer in layers:
            cells = [network, ", ".join(map(str, layer["layer"]))]
            for gradient, chosen in zip(("by_weight", "by_input"), layer["chosen"], strict=True):
                forms = dict(layer[gradient])
                own = forms.pop("torch")
                ratios = (
                    f"**{name} {seconds / own:.2f}**" if name == chosen else f"{name} {seconds / own:.2f}"
                    for name, seconds in forms.items()
                )
                cells += [f"{own * 1e3:.2f}", ", ".join(ratios)]
            rows.append(cells)
    threads = report["threads"]
    header = ["network", "N, C, O, size, k, s, groups", "by weight: torch ms", "forms, x torch"]
    how = setting(report, f"{threads} thread" + "s" * (threads != 1))
    return f"{how}\n\n{table([*header, 'by input: torch ms', 'forms, x torch'], rows, 2)}"


def training_step(report: Report) -> str:
    rows = []
    for result in report["results"]:
        for engine, own in result["engines"].items():
            rows.append(
                [result["network"], engine, f"{own['median_ms']:.1f}"]
                + [f"{own[ratio]:.2f}" for ratio in ("ratio_to_eager", "best_ratio_to_eager")]
                + [f"{own[memory]:.0f}" for memory in ("step_memory_mb", "peak_memory_mb")]
            )
        profile = list(result["profile_ms"].items())[:6]
        floor = f"{result['floor_ms']:.1f}"
        rows.append([result["network"], "floor: convolutions and products of ours", floor, "", "", "", ""])
        rows.append(
            [result["network"], "profile of ours: " + ", ".join(f"{k} {ms:.1f}" for k, ms in profile), *[""] * 5]
        )
    header = [
        "network",
        "engine",
        "ms a step",
        "x torch eager",
        "best, x torch eager",
        "MB of the steps",
        "MB of the process",
    ]
    how = setting(report, f"{report['threads']} threads")
    return f"{how}\n\n{table(header, rows, 2)}"


def lower_precision(report: Report) -> str:
    rows = [
        [row["precision"], row["batch_norms"], str(row["nodes"]), f"{row['kib']:.0f} KiB"]
        + [f"{row['accuracy']:.1%}", f"{row['same_predictions']:.1%}", f"{row['rms_difference']:.2%}"]
        for row in report["rows"]
    ]
    header = ["file", "batch norms", "BatchNormalization nodes", "size", "test accuracy", "same predictions"]
    how = setting(report, f"{report['images']} test images")
    return f"{how}\n\n{table([*header, 'rms difference'], rows, 2)}"


def forms(report: Report) -> str:
    kinds = {"wrong": "wrong", "crashes": "crash", "refused": "refused", "invalid": "invalid"}
    kinds |= {"wrong, but proved": "unsound", "another form proved": "exchanged", "right, but refuted": "rejected"}
    total = {kind: report["total"].get(f"findings: {kind}", 0) for kind in kinds.values()}
    rows = []
    for name, row in [*report["operators"].items(), ("all", {**report["total"], "findings": total})]:
        counts = [f"{row[key]:,}" for key in ("forms", "models", "folded", "kept")]
        rows.append([name, *counts, *(f"{row['findings'].get(kind, 0):,}" for kind in kinds.values())])
    lines = table(["operator", "forms", "models", "folded", "kept", *kinds], rows)
    return (
        f"Opset 7 to {report['newest_opset']}, the newest that ONNX Runtime {report['onnxruntime']} loads.\n\n{lines}"
    )


def nodes(report: Report) -> str:
    tools = [name for name in next(iter(report["files"].values())) if name != "source"]

    def cell(row: Report) -> str:
        if "nodes" not in row:
            return "fails"
        text = f"{row['nodes']:,} / {row['batch_norm']} / {row['arithmetic']}"
        return text if row.get("status", "passed") == "passed" else f"**{row['status']}**, {text}"

    rows = [[name, *(cell(row[tool]) for tool in ("source", *tools))] for name, row in report["files"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    how = f"`python -m benchmarks.bench_nodes --peers PYTHON`; nodes / batch norms / Mul, Add, Sub and Div with a constant. {versions}."
    return f"{how}\n\n{table(['file', 'source', *tools], rows)}"


def foreign_folds(report: Report) -> str:
    names = [name for name, version in report["versions"].items() if version]
    rows: list[list[str]] = []
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in report["rows"]:
        marks = {name: row["tools"][name] for name in names}
        shown = (f"**{it['mark']}**" if it["mark"] == "refuted" else it["mark"] for it in marks.values())
        rows.append([row["model"], *shown])
        for name, mark in marks.items():
            if mark["reason"]:
                key = row["model"], mark["mark"], mark["reason"].replace("|", "\\|")
                reasons.setdefault(key, []).append(name)
    header = ["model", *(f"{name} {report['versions'][name]}" for name in names)]
    why = [[model, ", ".join(tools), mark, reason] for (model, mark, reason), tools in reasons.items()]
    return f"{table(header, rows, len(header))}\n\n{table(['model', 'tool', 'mark', 'why'], why, 4)}"


def export(report: Report) -> str:
    rows = []
    for name, row in report["rows"].items():
        seconds, nodes = row["seconds"], row["nodes"]
        figures = [f"{seconds[key]:.1f}" for key in ("plain", "ours", "verified", "tracer")]
        rows.append([name, *figures, f"{row['ratio']:.2f}", f"{nodes['plain']:,}", f"{nodes['ours']:,}"])
    header = [
        "network",
        "plain s",
        "ours s",
        "ours, verified s",
        "TorchScript s",
        "ours / plain",
        "nodes, plain",
        "ours",
    ]
    size = " x ".join(map(str, report["image"]))
    rounds = min(row["rounds"] for row in report["rows"].values())
    how = setting(report, "1 thread", f"processor time, least of {rounds}, images {size}")
    long = report["median_ratio"]
    least = (
        f"Median ratio of the networks over {report['least_seconds']:.0f} s: {long:.2f}, of" if long else "Median of"
    )
    return f"{how} {least} all: {report['median_ratio_of_all']:.2f}.\n\n{table(header, rows)}"


def runtimes(report: Report) -> str:
    """Which runtime ran which file; neighbouring versions with the same results share a row."""
    kinds = list(dict.fromkeys(kind for row in report["runtimes"].values() for kind in row["files"]))
    reasons: dict[str, int] = {}

    def cell(row: Report, kind: str) -> str:
        if "reason" in row:
            return ""
        done = row["files"].get(kind)
        if done is None:
            return "-"
        if "wrong" in done or "reason" in done:
            reason = f"{row['name']}: {done.get('wrong') or done['reason']}"
            return f"no ({reasons.setdefault(reason, len(reasons) + 1)})"
        return "yes"

    rows: list[list[str]] = []
    missing = []
    versions: list[str] = []
    for row in report["runtimes"].values():
        cells = [cell(row, kind) for kind in kinds]
        if "reason" in row:
            missing.append(f"- {row['name']}: not run. {row['reason']}")
        elif rows and rows[-1][0] == row["name"] and rows[-1][2:] == cells:
            versions += [row["version"]] if row["version"] not in versions else []
            rows[-1][1] = f"{versions[0]} to {versions[-1]}" if len(versions) > 2 else " and ".join(versions)
        else:
            versions = [row["version"]]
            rows.append([row["name"], row["version"], *cells])
    notes = [f"{number}. {reason.replace('|', '/')}" for reason, number in reasons.items()]
    bound = f"Largest difference that counts as equal: {report['bound']:g} of the largest value of an output."
    parts = [
        bound,
        table(["runtime", "version", *kinds], rows, 2 + len(kinds)),
        *(["\n".join(missing)] if missing else []),
    ]
    return "\n\n".join([*parts, "\n".join(notes)]) if notes else "\n\n".join(parts)


def torch_versions(report: Report) -> str:
    rows = report["rows"]
    ways = list(next(iter(rows.values()))["ways"])
    lines = [
        "| | "
        + " | ".join(f"torch {row['torch'].partition('+')[0]}, Python {row['python']}" for row in rows.values())
        + " |"
    ]
    lines.append("|---" * (len(rows) + 1) + "|")
    for way in ways:
        cells = ({"passed": "yes"}.get(row["ways"][way], row["ways"][way]) for row in rows.values())
        lines.append(f"| {way} | {' | '.join(cells)} |")
    lines.append(
        "| tests passed, failed | " + " | ".join(f"{row['passed']}, {row['failed']}" for row in rows.values()) + " |"
    )
    lines.append("| with ONNX Runtime | " + " | ".join(row["onnxruntime"] for row in rows.values()) + " |")
    return "\n".join(lines)


def proof(report: Report) -> str:
    rows = [
        [name, str(row["sites"]), seconds_of(row), f"{row['cmp_seconds']:.2f} s" if "cmp_seconds" in row else ""]
        for name, row in report["cases"].items()
    ]
    how = setting(report, f"median of {report['rounds']}")
    return f"{how}\n\n{table(['model', 'sites proved', 'loading and proof', '`cmp` of the weights'], rows)}"


def gpu(report: Report) -> str:
    rows = []
    for row in report["kernels_us"]:
        cells = [row["name"], f"{row['mb']:.0f}"]
        for times in (row["forward"], row["backward"]):
            cells += [f"{times['ours']:.1f}", f"{100 * times['floor'] / times['ours']:.0f} %"]
            cells += [f"{times[peer]:.1f}" if peer in times else "" for peer in ("torch", "cudnn", "sync")]
        rows.append(cells)
    peers = ["PyTorch", "cuDNN", "sync"]
    header = ["shape", "MB", "forward", "", *peers, "backward", "", *peers]
    machine = report["machine"]
    parts = [f"{machine['device']}, driver {machine['driver']}, PyTorch {machine['torch']}", table(header, rows)]
    groups = [row for row in report["ways_us"] if row["name"].startswith("group")]
    header = ["one process of a group", "forward", "PyTorch", "backward", "PyTorch"]
    columns = ("forward", "torch forward", "backward", "torch backward")
    parts.append(table(header, [[row["name"][6:], *(f"{row['us'][name]:.1f}" for name in columns)] for row in groups]))
    header = ["step, milliseconds", "ours", "`BatchNorm2d`", "`SyncBatchNorm`"]
    steps = [
        [row["name"], *(f"{row['us'][name] / 1e3:.2f}" if name in row["us"] else "" for name in ("ours", "BatchNorm2d", "SyncBatchNorm"))]
        for row in report["steps"]
    ]  # fmt: skip
    return "\n\n".join([*parts, table(header, steps)])


# A generated block: its page, its result, what makes Markdown of it. A benchmark's table joins by a line here.
BLOCKS: dict[str, tuple[str, str, Callable[[Report], str]]] = {
    "ort_cpu": ("performance.md", "ort_cpu.json", ort_cpu),
    "ort_cpu_avx2": ("performance.md", "ort_cpu_avx2.json", ort_cpu),
    "ort_cpu_baseline": ("performance.md", "ort_cpu_baseline.json", ort_cpu),
    "missed": ("performance.md", "ort_cpu.json", lambda _: aims.missed(aims.load(RESULTS))),
    "torch_operator": ("performance.md", "torch_operator_cpu.json", torch_operator),
    "torch_operator_avx2": ("performance.md", "torch_operator_cpu_avx2.json", torch_operator),
    "fold": ("performance.md", "fold.json", fold),
    "fold_run_time": ("performance.md", "fold.json", fold_run_time),
    "branches": ("performance.md", "branches.json", branches),
    "training_step": ("performance.md", "training_step.json", training_step),
    "training_step_avx2": ("performance.md", "training_step_avx2.json", training_step),
    "parallel_training": ("training.md", "parallel_training.json", parallel_training),
    "conv_gradient": ("performance.md", "conv_gradient.json", conv_gradient),
    "export": ("guides/exporters.md", "export.json", export),
    "runtimes": ("runtimes.md", "runtimes.json", runtimes),
    "proof": ("verification.md", "proof.json", proof),
    "forms": ("design/forms.md", "forms.json", forms),
    "gpu": ("gpu.md", "gpu_h200.json", gpu),
    "nodes": ("comparison.md", "nodes.json", nodes),
    "foreign_folds": ("verification.md", "foreign_folds.json", foreign_folds),
    "torch_versions": ("support.md", "torch_versions.json", torch_versions),
    "recalibration": ("guides/statistics.md", "recalibration.json", recalibration),
    "recalibration_cost": ("guides/statistics.md", "recalibration.json", recalibration_cost),
    "torchscript": ("deploy.md", "torchscript.json", torchscript),
    "lower_precision": ("guides/quantization.md", "lower_precision.json", lower_precision),
    "other_tools": ("comparison.md", "other_tools.json", tables.other_tools),
    "proof_peers": ("verification.md", "proof_peers.json", tables.proof_peers),
    "other_tools_traps": ("comparison.md", "other_tools.json", tables.other_tools_traps),
    "other_tools_models": ("comparison.md", "other_tools.json", tables.other_tools_models),
}


def between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name}: begin -->\n).*?(?=<!-- {name}: end -->)", re.DOTALL)


def render(name: str) -> str:
    _, result, markdown = BLOCKS[name]
    return behind_summary(markdown(json.loads((RESULTS / result).read_text()))) + "\n"


def refresh() -> list[str]:
    """Puts every table whose result exists into its page; returns the blocks that changed."""
    changed = []
    for name, (page, result, _) in BLOCKS.items():
        path = ROOT / "docs" / page
        text = path.read_text()
        if not (RESULTS / result).exists():
            continue
        new, found = between(name).subn(lambda _, name=name: render(name), text)
        if found != 1:
            raise SystemExit(f"docs/{page}: got {found} blocks {name!r}, expected one, between its two markers")
        if new != text:
            path.write_text(new)
            changed.append(name)
    return changed


if __name__ == "__main__":
    print("changed:", ", ".join(refresh()) or "nothing")
